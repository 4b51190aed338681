"""Restarts after a lost process, with a simulated process and training, and errors of a full disk."""

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.cli import main as cli
from megarl.cluster import RayFailed, WorkerDied, WorkerFailed, WorkerHung
from megarl.cluster.ranks import RankError, RankProcess
from megarl.config import SFTConfig, TrainConfig, load_config, resolve
from megarl.data.trajectories import write_parquet
from megarl.trainer.health.monitor import _write as write_finding
from megarl.trainer.run import failures
from megarl.trainer.run.failures import advice, ending_after_signal, naming_keys, with_restarts
from megarl.trainer.run.logger import RunLogger, read_metrics
from megarl.trainer.run.preemption import REQUEUE, Preemption
from tests.disks import small_disk

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
    """A training that raises one of these errors at each start, then succeeds; it keeps the arguments of its starts."""

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
    assert with_restarts(config(tmp_path, max_restarts=3), training, "cluster_setup") == "hf"
    assert len(training.started) == 4
    assert training.cluster_setup == ["cluster_setup", None, None, None]  # restarts have none
    said = capsys.readouterr().out
    assert "starting again: 3 of trainer.max_restarts=3" in said and "the raylet is gone" in said


def test_a_restart_has_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trainer.max_run_minutes` is of the job: its limit would be later than the scheduler's."""
    clock = iter([0.0, 1200.0, 4000.0])  # seconds: at the start, and at each loss
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    training = Training(*LOSSES[:2])
    with_restarts(config(tmp_path, max_restarts=2, max_run_minutes=60.0), training, None)
    assert [config.trainer.max_run_minutes for config in training.started] == [60.0, 40.0, 0.001]


@pytest.mark.parametrize("allowed", [0, 2])
def test_the_last_loss_is_the_runs_end(tmp_path: Path, allowed: int) -> None:
    training = Training(*LOSSES)
    with pytest.raises(type(LOSSES[allowed])):
        with_restarts(config(tmp_path, max_restarts=allowed), training, None)
    assert len(training.started) == allowed + 1


def test_what_a_rank_raises_is_no_loss(tmp_path: Path) -> None:
    training = Training(WorkerFailed(PROCESS, RankError("ValueError", "wrong", "", 0.0, "")))
    with pytest.raises(WorkerFailed):
        with_restarts(config(tmp_path, max_restarts=3), training, None)
    assert len(training.started) == 1


def test_a_run_that_was_told_to_end_is_not_started_again_here(capsys) -> None:
    preemption = Preemption()
    with pytest.raises(WorkerDied), ending_after_signal(preemption):
        raise LOSSES[0]
    preemption.note(signal.SIGUSR1, None)
    with pytest.raises(SystemExit) as ended, ending_after_signal(preemption):
        raise LOSSES[0]
    assert ended.value.code == REQUEUE
    assert "to be started again: the run was told to end (SIGUSR1)" in capsys.readouterr().out


@pytest.mark.parametrize("command, module", [("train", "ppo"), ("sft", "sft"), ("rm", "rm"), ("dpo", "dpo")])
def test_every_command_that_trains_is_started_again(
    tmp_path: Path, monkeypatch, command: str, module: str
) -> None:
    """Reading and checking the configuration is left out."""
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
    with_restarts(begun, without, None)
    assert without.started[1] == begun
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    training = Training(LOSSES[0])
    with_restarts(begun, training, None)
    assert (training.started[1].trainer.resume_mode, training.started[1].trainer.resume_from_path) == (
        "auto",
        None,
    )


def test_it_begins_again_with_the_step_that_it_was_given_until_it_has_a_later_one(tmp_path: Path) -> None:
    """trainer.checkpoint_url may have later steps, which resume_mode=auto would fetch."""
    path = tmp_path / "checkpoints" / "step-3"
    path.mkdir(parents=True)
    begun = config(tmp_path, max_restarts=1, resume_mode="path", resume_from_path=str(path))
    training = Training(LOSSES[0])
    with_restarts(begun, training, None)
    assert training.started[1] == begun
    path.with_name("step-4").mkdir()
    training = Training(LOSSES[0])
    with_restarts(begun, training, None)
    assert training.started[1].trainer.resume_mode == "auto"


LOCAL, ROLLOUTS = "trainer.default_local_dir", "trainer.rollout_data_dir"


@pytest.fixture
def disk(tmp_path: Path):
    """A folder on a disk of its own with 64 KiB, which `fill` fills up."""
    with small_disk(tmp_path / "disk", 64) as folder:
        yield folder


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


def ended(folders: dict[str, Path], action) -> OSError:
    with pytest.raises(OSError, match="No space left on device") as caught, naming_keys(folders):
        action()
    assert caught.value.errno == errno.ENOSPC
    return caught.value


@pytest.mark.parametrize("sink", ["file", "tensorboard"])
def test_metrics_and_events(disk: Path, sink: str) -> None:
    folders = {LOCAL: disk / "run", ROLLOUTS: disk / "run" / "rollouts"}
    logger = RunLogger(disk / "run", [sink])
    fill(disk)
    if sink == "file":
        error = ended(folders, lambda: logger.log(1, {f"metric-{number}": 1.0 for number in range(3000)}))
        file = "run/metrics.jsonl"
    else:
        error = ended(folders, lambda: logger.log_samples(1, "a", [{"b": "x" * 100_000}]))
        file = "run/tensorboard/events.out.tfevents."
    assert error.filename.startswith(str(disk / file))
    assert f"set {LOCAL} to a folder on a disk with more room" in error.strerror
    # No line or event is half-written: the files can still be read and appended to.
    (disk / "filler").unlink()
    logger.log(2, {"a": 1.0})
    assert [row["step"] for row in read_metrics(disk / "run")] == [2]
    if sink == "tensorboard":
        events = EventAccumulator(str(disk / "run" / "tensorboard"))
        events.Reload()
        assert [event.step for event in events.Scalars("a")] == [2]


def test_trajectories_and_findings(disk: Path) -> None:
    folders = {LOCAL: disk / "run", ROLLOUTS: disk / "elsewhere"}
    (disk / "run").mkdir()
    fill(disk)
    table = pa.table({"response": [os.urandom(100).hex() for _ in range(1000)]})
    error = ended(folders, lambda: write_parquet(table, disk / "elsewhere" / "step-000001.parquet"))
    assert error.filename.startswith(str(disk / "elsewhere")) and f"set {ROLLOUTS} to" in error.strerror
    error = ended(folders, lambda: write_finding(disk / "run", 1, {"text": "x" * 10_000}))
    assert error.filename == str(disk / "run" / "health.jsonl") and f"set {LOCAL} to" in error.strerror


def test_an_error_without_a_name_is_of_the_disk_with_the_least_room(disk: Path) -> None:
    fill(disk)

    def bare() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    error = ended({LOCAL: disk}, bare)
    assert error.filename == str(disk) and f"set {LOCAL} to" in error.strerror


def test_a_ranks_file(disk: Path) -> None:
    process = RankProcess(SimpleNamespace(), "actor", 1, "host7", "node", "/logs/actor-rank1.log", pid=42)
    for message, words in (
        (
            f"[Errno 28] No space left on device: '{disk}/run/x.pt'",
            f"{disk}/run/x.pt: no space left; set {LOCAL} to",
        ),
        (
            "[Errno 122] Disk quota exceeded: '/dev/shm/megarl'",
            "/dev/shm/megarl: no space left; give the machine",
        ),
    ):
        failure = WorkerFailed(process, RankError("OSError", message, "", 0.0, ""))
        with pytest.raises(WorkerFailed) as caught, naming_keys({LOCAL: disk / "run"}):
            raise failure
        assert words in str(caught.value).splitlines()[-1]


def test_ray_that_cannot_start() -> None:
    told = "Ray did not start on this machine: [Errno 28] No space left on device: '/tmp/megarl-x/session'"
    with pytest.raises(RayFailed) as caught, naming_keys({LOCAL: "run"}):
        raise RayFailed(told)
    assert str(caught.value).splitlines() == [
        told,
        "/tmp/megarl-x/session: no space left; make room there, where Ray and others have temporary files",
    ]


def test_other_errors_stay_as_they_are() -> None:
    for error in (FileNotFoundError(errno.ENOENT, "no", "f"), TimeoutError("late"), ValueError("x")):
        with pytest.raises(type(error)) as caught, naming_keys({LOCAL: "run"}):
            raise error
        assert caught.value is error


def test_each_key_that_moves_it_is_named() -> None:
    folders = {LOCAL: "run", ROLLOUTS: "run/rollouts"}
    assert advice("run/rollouts/step-1.parquet", folders).startswith(f"set {LOCAL} or {ROLLOUTS} to a folder")
    assert advice("run/metrics.jsonl", folders).startswith(f"set {LOCAL} to a folder")
    assert (
        advice("/tmp/megarl-x/session", folders)
        == "make room there, where Ray and others have temporary files"
    )
    assert advice("/data/x", folders) == "make room there"
