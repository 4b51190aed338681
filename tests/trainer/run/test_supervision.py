"""Runs that lose a process are started again; the process and the training are made up here."""

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cli import main as cli
from megarl.cluster import RayFailed, WorkerDied, WorkerFailed, WorkerHung
from megarl.cluster.ranks import RankError
from megarl.config import SFTConfig, TrainConfig, load_config, resolve
from megarl.trainer.run.preemption import REQUEUE, Preemption
from megarl.trainer.run.supervision import not_again_once_told, supervised

RECIPE = [
    "data.train_files=a.parquet", "data.max_length=8", "data.train_batch_size=2", "model.path=m", "optim.lr=1",
    "max_token_len_per_gpu=8",
]  # fmt: skip
PROCESS = SimpleNamespace(role="actor", rank=1, host="h", pid=3, log_path="l")
LOSSES = [
    WorkerDied(PROCESS, "killed", ""),
    WorkerHung(PROCESS, "stopped", ""),
    RayFailed("the raylet is gone"),
]


class Training:
    """Raises these errors, one a start, then ends well; keeps what it was started with."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.started: list[SFTConfig] = []
        self.cluster_setup: list[str | None] = []

    def __call__(self, config: SFTConfig, cluster_setup: str | None) -> str:
        self.started.append(config)
        self.cluster_setup.append(cluster_setup)
        if self.errors:
            raise self.errors.pop(0)
        return "hf"


def config(folder: Path, **trainer: object) -> SFTConfig:
    found = resolve(load_config(SFTConfig, None, [*RECIPE, f"trainer.default_local_dir={folder}"]))
    return replace(found, trainer=replace(found.trainer, **trainer))


def test_every_loss_costs_one_restart(tmp_path: Path, capsys) -> None:
    training = Training(*LOSSES)
    assert supervised(config(tmp_path, max_restarts=3), training, "cluster setup") == "hf"
    assert len(training.started) == 4
    assert training.cluster_setup == ["cluster setup", None, None, None]  # they end with the first cluster
    said = capsys.readouterr().out
    assert "starting again: 3 of trainer.max_restarts=3" in said and "the raylet is gone" in said


@pytest.mark.parametrize("allowed", [0, 2])
def test_the_last_loss_is_the_runs_end(tmp_path: Path, allowed: int) -> None:
    training = Training(*LOSSES)
    with pytest.raises(type(LOSSES[allowed])):
        supervised(config(tmp_path, max_restarts=allowed), training, None)
    assert len(training.started) == allowed + 1


def test_what_a_rank_raises_is_no_loss(tmp_path: Path) -> None:
    training = Training(WorkerFailed(PROCESS, RankError("ValueError", "wrong", "", 0.0, "")))
    with pytest.raises(WorkerFailed):
        supervised(config(tmp_path, max_restarts=3), training, None)
    assert len(training.started) == 1


def test_a_run_that_was_told_to_end_is_not_started_again_here(capsys) -> None:
    preemption = Preemption()
    with pytest.raises(WorkerDied), not_again_once_told(preemption):
        raise LOSSES[0]
    preemption.note(signal.SIGUSR1, None)
    with pytest.raises(SystemExit) as ended, not_again_once_told(preemption):
        raise LOSSES[0]
    assert ended.value.code == REQUEUE
    assert "to be started again: the run was told to end (SIGUSR1)" in capsys.readouterr().out


@pytest.mark.parametrize("command, module", [("train", "ppo"), ("sft", "sft"), ("rm", "rm"), ("dpo", "dpo")])
def test_every_command_that_trains_is_started_again(
    tmp_path: Path, monkeypatch, command: str, module: str
) -> None:
    """What they read and check is left out."""
    training = Training(LOSSES[0])
    ready = config(tmp_path, max_restarts=1)
    if command == "train":
        settings = ["trainer.max_restarts=1", f"trainer.default_local_dir={tmp_path}"]
        ready = resolve(load_config(TrainConfig, "recipes/quickstart_ppo.yaml", settings))
    monkeypatch.setattr(cli, "_configured", lambda schema, options: ready)
    monkeypatch.setattr(f"megarl.trainer.loops.{module}.train", training)
    assert cli.main([command, "a.yaml"]) == 0
    assert len(training.started) == 2


def test_it_goes_on_from_its_own_checkpoint_not_from_where_it_began(tmp_path: Path) -> None:
    begun = config(tmp_path, max_restarts=1, resume_mode="path", resume_from_path="elsewhere/step-3")
    without = Training(LOSSES[0])
    supervised(begun, without, None)
    assert without.started[1] == begun
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    training = Training(LOSSES[0])
    supervised(begun, training, None)
    assert (training.started[1].trainer.resume_mode, training.started[1].trainer.resume_from_path) == (
        "auto",
        None,
    )
