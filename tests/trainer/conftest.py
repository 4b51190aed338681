"""Real runs of the `megarl` command on a tiny task; each run is a process of its own with a Ray of its own."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.data.arithmetic import arithmetic_texts, write_arithmetic
from megarl.models.tiny import make_tiny_model

REPOSITORY = Path(__file__).resolve().parents[2]

PPO = [
    "recipes/quickstart_ppo.yaml",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.test_freq=-1",
]


# Metrics of no two equal runs: times, memory, and what a sync has to send, which is everything to an engine that is new.
MEASURED = ("timing_s/", "perf/", "sync/", "memory/")


UNHEALTHY = ("health.grad_norm=1e-6", "health.patience=1")  # every gradient is
# Two on-policy steps: one mini-batch, one epoch, actor TP2 x PP2, critic PP2 x DP2, engine TP2.
TWO_STEPS = [
    *PPO, "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.log_val_generations=2", "trainer.save_freq=1",
    "actor_rollout_ref.actor.optim.lr=1e-2", "algorithm.kl_ctrl.type=adaptive", *UNHEALTHY,
    "trainer.profile_steps=[2]", "trainer.profile_ranks=[0,9]",
]  # fmt: skip


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ (2 layers, hidden 64) and data/{sft,train,test}.parquet."""
    return make_task(tmp_path_factory.mktemp("task"))


def make_task(folder: Path) -> Path:
    write_arithmetic(folder / "data", 64, 64, 16, seed=3)
    make_tiny_model(folder / "model", arithmetic_texts(), hidden_size=64, ffn_hidden_size=128, num_layers=2)
    return folder


@pytest.fixture(scope="session")
def ppo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A run of `TWO_STEPS`, one for all processes that run tests: (its task, its folder, what it printed).

    Nobody may change anything in them.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ppo-run"
    folder.mkdir(exist_ok=True)
    task, out, printed = folder / "task", folder / "run", folder / "printed"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            make_task(task)
            said = succeed("train", *TWO_STEPS, *on(task, out))
            printed.write_text(said)
    return task, out, printed.read_text()


def on(task: Path, out: Path) -> list[str]:
    """Overrides that point the PPO recipe at the task and the run folder."""
    return [
        f"data.train_files={task}/data/train.parquet",
        f"data.val_files={task}/data/test.parquet",
        f"actor_rollout_ref.model.path={task}/model",
        f"trainer.default_local_dir={out}",
    ]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "megarl.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


def megarl(*arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess:
    """Run a command to its end; its output is text."""
    return subprocess.run(
        command(*arguments),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def succeed(*arguments: str | Path, timeout: float = 240) -> str:
    """Run a command that must succeed, and end without a word of Ray's; returns what it printed."""
    result = megarl(*arguments, timeout=timeout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "(raylet)" not in result.stdout + result.stderr
    return result.stdout


def steps(folder: Path) -> Sequence[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_steps(expected: Path, found: Path, first: int) -> None:
    """The metrics of the steps from `first` on are the same in both run folders, but for `MEASURED`."""
    theirs, ours = steps(expected)[first - 1 :], steps(found)
    assert [step["step"] for step in ours][-len(theirs) :] == [step["step"] for step in theirs]
    for one, other in zip(theirs, ours[-len(theirs) :], strict=True):
        names = {name for name in one.keys() | other.keys() if not name.startswith(MEASURED)} - {"time"}
        assert {"actor/grad_norm", "actor/entropy", "critic/score/mean"} <= names
        assert {name: other.get(name) for name in names} == {name: one.get(name) for name in names}
