"""An engine that serves a teacher is really killed while it judges: another one loads the folder, and judges the same rows."""

import os
import signal
from pathlib import Path

import pytest

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.config import TrainConfig, load_config, resolve
from megarl.data.trajectories import read_trajectories
from megarl.trainer.loops.ppo import train
from megarl.trainer.stages.judging import Judging
from tests.faults.test_eval_engine_dies import scheduler_of
from tests.fixtures.runs import PPO, on
from tests.trainer.roles.test_weight_sync import SMALL
from tests.trainer.test_teacher_runs import ACTOR, WAYS, check_log_probs


@pytest.mark.slow
def test_while_it_judges(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "teacher", arithmetic_texts(), hidden_size=96, num_layers=2, seed=5)
    overrides = [
        *PPO[1:], *on(task, tmp_path / "run"), *SMALL, *WAYS["served"], f"actor_rollout_ref.ref.model.path={tmp_path}/teacher",
        f"{ACTOR}.use_kl_loss=true",
    ]  # fmt: skip
    config = resolve(load_config(TrainConfig, PPO[0], overrides))
    killed: list[int] = []
    results = Judging.results

    def kill_at_first(self: Judging) -> object:
        if not killed:
            killed.append(scheduler_of(self._judges["ref"].group.pids[0]))
            os.kill(killed[0], signal.SIGKILL)
        return results(self)

    monkeypatch.setattr(Judging, "results", kill_at_first)
    train(config, None)
    assert len(killed) == 1 and len(list((tmp_path / "run" / "logs").glob("ref-rank0.restart1.log"))) == 1
    for step in (1, 2):
        rows = read_trajectories(tmp_path / "run" / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
        check_log_probs(tmp_path / "teacher", [row["prompt_ids"] for row in rows], rows)
