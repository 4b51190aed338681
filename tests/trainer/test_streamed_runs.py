"""Runs from the command line whose responses continue from step to step: a complete run, and a killed and resumed one."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from megarl.checkpoints import steps_in
from megarl.data.trajectories import read_trajectories
from tests.fixtures.runs import REPOSITORY, command, environment, steps, succeed
from tests.waiting import wait_for

# Engines generate four of the twelve responses for two steps at a time: most are unfinished when a step has its batch.
RECIPE = [
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.max_num_seqs=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "data.val_files=null", "trainer.test_freq=-1",
    "trainer.total_training_steps=6", "trainer.save_freq=1", "trainer.max_staleness=2",
    "actor_rollout_ref.rollout.top_k=20",
]  # fmt: skip

pytestmark = pytest.mark.slow  # 35 to 60 s for each start of a run


def arguments(task: Path, mode: str, folder: Path) -> list[str]:
    return [
        f"recipes/{mode}_cpu.yaml", *RECIPE, f"data.train_files={task}/data/train.parquet",
        f"actor_rollout_ref.model.path={task}/model", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip


def trained(folder: Path) -> list[str]:
    """The uids of all trajectories that the run's steps were trained on."""
    return [
        uid
        for step in range(1, 7)
        for uid in read_trajectories(folder / f"rollouts/step-{step:06d}.parquet")["uid"].to_pylist()
    ]


@pytest.mark.parametrize("mode", ["partial_rollouts", "fully_async"])
def test_a_complete_run(task: Path, tmp_path: Path, mode: str) -> None:
    succeed("train", *arguments(task, mode, tmp_path / "run"))
    rows = steps(tmp_path / "run")
    assert len(rows) == 6 and max(row["staleness/max"] for row in rows) <= 2
    if mode == "partial_rollouts":  # otherwise it depends on the speeds of rollout and training
        assert sum(row["staleness/of_several_versions"] for row in rows) > 0
    assert all(row["staleness/too_late"] == 0 for row in rows)
    uids = trained(tmp_path / "run")
    assert len(uids) == len(set(uids)) == 6 * 8


def test_a_killed_run_goes_on_and_loses_nothing(task: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = command("train", *arguments(task, "fully_async", folder))
    process = subprocess.Popen(run, cwd=REPOSITORY, env=environment(), stdout=subprocess.DEVNULL)
    checkpoints = folder / "checkpoints"

    def has_saved() -> bool:
        assert process.poll() is None
        return checkpoints.exists() and 3 in steps_in(checkpoints)

    wait_for(has_saved, 200)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    newest = max(steps_in(folder / "checkpoints"))
    kept = tmp_path / "kept"
    shutil.copytree(folder / f"checkpoints/step-{newest}" / "under_way", kept)
    succeed("train", *arguments(task, "fully_async", folder))
    uids = trained(folder)
    assert len(uids) == len(set(uids)) == 6 * 8
    assert max(row["staleness/max"] for row in steps(folder)) <= 2
    assert json.loads((kept / "counts.json").read_text())["drawn"] >= 4 * newest
