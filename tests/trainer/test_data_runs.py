"""Real runs on several data sets, in a plugin's order and streamed; and a health monitor that acts and stops the run."""

import json
from pathlib import Path

import pytest

from megarl.data.trajectories import read_trajectories
from tests.fixtures.runs import PPO, on, steps, succeed
from tests.trainer.test_dapo import ONE_DEVICE

ACTOR = "actor_rollout_ref.actor"
CRITIC = "critic.megatron.pipeline_model_parallel_size=1"
SAMPLER = """
import numpy as np
from megarl.data.samplers import Sampler, register_sampler

@register_sampler("last_first")
class LastFirst(Sampler):
    \"\"\"From row `options.first` backwards, then the rows after it.\"\"\"

    def order(self, table, seed, epoch):
        first = self.config.options["first"]
        return np.concatenate([np.arange(first, -1, -1), np.arange(first + 1, table.num_rows)])
"""

pytestmark = pytest.mark.slow


def prompts_of(run: Path, step: int) -> list[str]:
    table = read_trajectories(run / "rollouts" / f"step-{step:06d}.parquet")
    return list(dict.fromkeys(table["prompt_uid"].to_pylist()))


def test_a_mixture_in_a_plugins_order_while_the_monitor_acts_and_stops(task: Path, tmp_path: Path) -> None:
    """Of every 4 prompts 3 are from one set and 1 is from the other; any KL above 0 exceeds the monitor's bound."""
    plugin, run = tmp_path / "sampler.py", tmp_path / "run"
    plugin.write_text(SAMPLER)
    files = {"train": (3, "train"), "held": (1, "test")}
    mixture = {
        name: {"files": f"{task}/data/{file}.parquet", "weight": weight}
        for name, (weight, file) in files.items()
    }
    printed = succeed(
        "train", *PPO, *on(task, run), *ONE_DEVICE, CRITIC, "data.train_files=null", f"data.mixture={json.dumps(mixture)}",
        f"plugins=[{plugin}]", "data.sampler.name=last_first", 'data.sampler.options={"first": 9}',
        f"{ACTOR}.ppo_mini_batch_size=4", "trainer.total_training_steps=6", "health.patience=1", "health.every=1",
        "health.ppo_kl_high=1e-12", "health.ppo_kl_low=null", "health.auto_action=true", "health.kl_coef_max=0.003", "trainer.test_freq=2",
        "health.stagnation=1", "health.early_stop=[stagnation]", f"{ACTOR}.optim.lr=1e-8", "critic.optim.lr=1e-8",
        f"{ACTOR}.optim.lr_warmup_steps=0", "actor_rollout_ref.rollout.val_kwargs.temperature=0",
    )  # fmt: skip
    uids = prompts_of(run, 1)
    assert sorted(uid for uid in uids if uid.startswith("train:")) == sorted(
        f"train:train:{row}" for row in (9, 8, 7, 6, 5, 4)
    )
    assert sorted(uid for uid in uids if uid.startswith("held:")) == ["held:test:8", "held:test:9"]
    entries = [json.loads(line) for line in (run / "health.jsonl").read_text().splitlines()]
    # The policy hardly moves, so that its greedy answers have the same score at steps 2 and 4.
    (stop,) = [entry for entry in entries if entry["kind"] == "stop"]
    assert stop["step"] == 4 and [step["step"] for step in steps(run)] == [1, 2, 3, 4]
    assert "stopping: val/score/mean has not risen" in printed and (run / "hf/model.safetensors").is_file()
    # The coefficient doubles, up to its maximum, after each step whose KL estimate, which may be negative, exceeds its bound.
    coefficient, over = 0.001, []
    for step in steps(run):
        assert step["actor/kl_coef"] == pytest.approx(coefficient)
        if step["actor/ppo_kl"] > 1e-12:
            coefficient = min(2 * coefficient, 0.003)
            over.append(step["step"])
    actions = [entry for entry in entries if entry["kind"] == "action"]
    first = [entry["message"] for entry in actions if entry["step"] == over[0]]
    assert first == [
        "algorithm.kl_ctrl.kl_coef from 0.001 to 0.002",
        f"{ACTOR}.clip_ratio_low from 0.2 to 0.1",
        f"{ACTOR}.clip_ratio_high from 0.2 to 0.1",
    ]


def test_streamed_data_sets(task: Path, tmp_path: Path) -> None:
    """Rows are read in windows of 16; one set is smaller than the run's share of it, so that its second epoch begins."""
    run = tmp_path / "run"
    mixture = {
        "train": {"files": f"{task}/data/train.parquet", "weight": 1},
        "held": {"files": f"{task}/data/test.parquet", "weight": 1},
    }
    succeed(
        "train", *PPO, *on(task, run), *ONE_DEVICE, CRITIC, "data.train_files=null", f"data.mixture={json.dumps(mixture)}",
        "data.streaming=true", "data.stream_window_rows=16", "trainer.total_training_steps=5", "data.val_files=null",
    )  # fmt: skip
    held = [uid for step in range(1, 6) for uid in prompts_of(run, step) if uid.startswith("held:")]
    assert [len(prompts_of(run, step)) for step in range(1, 6)] == [8] * 5
    assert abs(len(held) - 20) < 2 and len(set(held[:16])) == 16 and set(held[16:]) < set(held[:16])
