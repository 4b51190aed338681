"""The task that chaos.py trains, and the comparison of two runs of it."""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.data.trajectories import read_trajectories
from megarl.util.packages import example

SEED = 3
# Metrics of a step that depend on clocks and memory.
MEASURED = ("timing_s/", "perf/", "sync/seconds", "memory/")
# The reward takes its time, so that there are reward workers to hit while they are at work.
REWARD = """
import time


def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.05)
    return sum(solution_str.count(digit) for digit in ground_truth) / (1 + len(solution_str))
"""
# Two actor ranks that wait for each other, a critic on a device of its own, one engine that shares the actor's devices.
SETTINGS = (
    "recipes/quickstart_ppo.yaml",
    "data.val_files=null",
    "data.train_batch_size=16",
    "data.max_response_length=24",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "critic.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.actor.resource_pool=main",
    "critic.resource_pool=critic",
    "resource_pools.main.n_gpus_per_node=2",
    "resource_pools.critic.n_gpus_per_node=1",
    "trainer.n_gpus_per_node=3",
    "algorithm.kl_ctrl.type=adaptive",
    "trainer.test_freq=-1",
    "trainer.logger=[console]",
)
# How it survives. Hangs are seen by the defaults, but for waits that nobody but a stopped process could prolong.
SURVIVAL = (
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=2",
    "trainer.max_restarts=1000",
    "actor_rollout_ref.rollout.max_restarts=1000",
    "actor_rollout_ref.rollout.request_timeout=120",
    "trainer.collective_timeout=120",
    "trainer.phase_timeout=240",
    "reward.timeout=10",
)


@dataclass(frozen=True)
class Task:
    """A model, problems and a reward in a folder; and how many steps are trained."""

    folder: Path
    steps: int

    def command(self, run_folder: Path) -> list[str]:
        """The command of a run into `run_folder`: always the same, also to go on."""
        return [
            *(sys.executable, "-m", "megarl", "train", *SETTINGS, *SURVIVAL),
            f"data.train_files={self.folder}/data/train.parquet",
            f"actor_rollout_ref.model.path={self.folder}/model",
            f"custom_reward_function.path={self.folder}/reward.py",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.default_local_dir={run_folder}",
        ]


def make_task(folder: Path, steps: int) -> Task:
    """Write the model (2 layers of width 64), 64 problems and the reward."""
    task = example("arithmetic")
    task.write_arithmetic(folder / "data", 16, 64, 16, seed=SEED)
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 2}
    example("tiny_model").make_tiny_model(folder / "model", task.arithmetic_texts(), **sizes)
    (folder / "reward.py").write_text(REWARD)
    return Task(folder, steps)


def fingerprint(run_folder: Path) -> dict[str, Any]:
    """The results of a finished run that must equal the undisturbed one's: metrics by step, and hashes by file.

    Trajectories are hashed by their values: files of the same rows may differ.
    """
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        f"metrics of step {line['step']}": {
            name: repr(value) for name, value in sorted(line.items()) if is_compared(name)
        }
        for line in lines
    }
    found["steps"] = [line["step"] for line in lines]
    for path in sorted((run_folder / "rollouts").iterdir()):
        table = read_trajectories(path)
        rows = {name: repr(table[name].to_pylist()) for name in table.column_names}
        found[f"rollouts/{path.name}"] = {
            name: hashlib.sha256(values.encode()).hexdigest() for name, values in rows.items()
        }
    for path in sorted((run_folder / "hf").iterdir()):
        found[f"hf/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def is_compared(metric: str) -> bool:
    """Whether a metric is the same in two runs of one configuration."""
    return metric != "time" and not metric.startswith(MEASURED)


def differences(reference: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The differences of two fingerprints, a line each; none: the runs are the same, bit for bit."""
    lines = []
    for name in sorted(reference.keys() | found.keys()):
        a, b = reference.get(name), found.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += [
                f"{name}, {key}: {a.get(key)} became {b.get(key)}"
                for key in sorted(a.keys() | b.keys())
                if a.get(key) != b.get(key)
            ]
        elif a != b:
            lines.append(f"{name}: {a} became {b}")
    return lines
