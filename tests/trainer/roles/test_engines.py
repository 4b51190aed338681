"""The rollout engines of a run: their configuration, deterministic responses, and reports of a slow start."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import RolloutConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import read_trajectories
from megarl.trainer.roles import engines as determinism
from megarl.trainer.roles.engines import engine_config, is_deterministic, last_line, reporting_slow_start
from tests.fixtures.runs import PPO, on, steps, succeed
from tests.rollout.invariance import needs_invariance

ROLLOUT = RolloutConfig(tensor_model_parallel_size=2, expert_parallel_size=1, nodes_per_engine=1)


@pytest.mark.parametrize(("use_gpu", "device", "dtype", "seconds"), [(True, "cuda", "bfloat16", 1800), (False, "cpu", "float32", 300)])  # fmt: skip
def test_a_start_on_gpus_may_compile_kernels(use_gpu: bool, device: str, dtype: str, seconds: float) -> None:
    found = engine_config(ROLLOUT, "/model", 64, use_gpu=use_gpu, synced=True)
    assert (found.device, found.dtype, found.start_timeout) == (device, dtype, seconds)
    told = engine_config(replace(ROLLOUT, start_timeout=9.0), "/model", 64, use_gpu=use_gpu, synced=False)
    assert (told.start_timeout, told.load_format) == (9.0, "auto")


PLUGIN = """
import asyncio
import random
import time

from megarl.environments.environment import Environment, StepResult, register_environment

moments = random.SystemRandom()


@register_environment("test.slow")
class Slow(Environment):
    def __init__(self, seconds):
        self.seconds = seconds

    async def reset(self, task):
        await asyncio.sleep(moments.uniform(0, self.seconds))

    async def step(self, turn):
        await asyncio.sleep(moments.uniform(0, self.seconds))
        return StepResult([{"role": "tool", "content": "again"}])


def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(moments.uniform(0, 0.03))
    return float(len(solution_str))
"""
# Two data parallel ranks of actor and critic, two engines.
SETTINGS = [
    "trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", "trainer.test_freq=2", "data.max_response_length=64",
    "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=true", "critic.megatron.pipeline_model_parallel_size=1",
    *(f"actor_rollout_ref.actor.megatron.{name}_model_parallel_size=1" for name in ("tensor", "pipeline")),
    *(f"actor_rollout_ref.rollout.{setting}" for setting in (
        "tensor_model_parallel_size=1", "num_engines=2", "n=4", "multi_turn.enable=true",
        "multi_turn.environment=test.slow", "multi_turn.max_assistant_turns=3", "stop_token_ids={stops}",
    )),
]  # fmt: skip
MEASURED = ("timing_s/", "perf/", "sync/seconds", "memory/")


def chosen(folder):
    """The metrics of a run, by step, without measured times, speeds and memory."""
    return [
        {name: value for name, value in step.items() if name != "time" and not name.startswith(MEASURED)}
        for step in steps(folder)
    ]


def run(task, folder, *settings):
    succeed("train", *PPO, *on(task, folder), *settings)
    return folder


def assert_same(first, second):
    """Two runs have the same metrics, trajectories, validation answers and weights, bit for bit."""
    for number, (a, b) in enumerate(zip(chosen(first), chosen(second), strict=True), start=1):
        different = {
            name: (a.get(name), b.get(name)) for name in a.keys() | b.keys() if a.get(name) != b.get(name)
        }
        assert not different, f"step {number}: {different}"
    files = sorted(path.name for path in (first / "rollouts").iterdir())
    assert files == sorted(path.name for path in (second / "rollouts").iterdir()) and len(files) > 2
    for name in files:
        a, b = (read_trajectories(folder / "rollouts" / name) for folder in (first, second))
        for column in a.column_names:
            assert repr(a[column].to_pylist()) == repr(b[column].to_pylist()), (name, column)  # NaN, too
    name = "hf/model.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.slow
@needs_invariance
def test_a_run_does_not_depend_on_when_things_happen(task, tmp_path):
    """PPO with a critic, several turns and two engines: with environments that answer at once, or after random times of up to 0.1 s."""
    plugin = tmp_path / "slow.py"
    plugin.write_text(PLUGIN)
    stops = list(range(3, len(load_tokenizer(f"{task}/model", False)), 2))
    settings = [setting.format(stops=stops) for setting in SETTINGS]
    settings += [f"plugins=[{plugin}]", f"custom_reward_function.path={plugin}"]
    option = "actor_rollout_ref.rollout.multi_turn.options={{seconds: {}}}"
    first, second = (
        run(task, tmp_path / name, *settings, option.format(seconds))
        for name, seconds in (("at-once", 0.0), ("late", 0.1))
    )
    assert_same(first, second)
    last = read_trajectories(first / "rollouts" / "step-000002.parquet")
    assert set(last["num_turns"].to_pylist()) == {3} and set(last["weight_version"].to_pylist()) == {2}
    assert len({len(ids) for ids in last["response_ids"].to_pylist()}) > 3
    assert len({step["critic/score/mean"] for step in chosen(first)}) == 2


GROUPS = {"tensor_model_parallel_size": 8, "attention_data_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "device", "dtype", "adapters", "expected"),
    [
        ({}, "cpu", "float32", True, True),
        ({}, "cpu", "bfloat16", False, False),
        ({}, "cuda", "float32", False, False),
        ({"deterministic": False}, "cpu", "float32", False, False),
        ({"deterministic": True}, "cuda", "bfloat16", False, True),
        ({"deterministic": True, "quantization": "fp8"}, "cpu", "float32", False, True),
        ({"deterministic": True}, "cpu", "bfloat16", False, "set rollout.dtype=float32"),
        (
            {"deterministic": True, "quantization": "fp8"},
            "cuda",
            "bfloat16",
            False,
            "leave the quantization out",
        ),
        ({"deterministic": True}, "cuda", "bfloat16", True, "set rollout.lora_sync=merged"),
        (
            {"deterministic": True, **GROUPS, "attention_data_parallel_size": 4},
            "cuda",
            "bfloat16",
            False,
            True,
        ),
        ({"deterministic": True, **GROUPS}, "cpu", "float32", False, True),
        (
            {"deterministic": True, **GROUPS},
            "cuda",
            "bfloat16",
            False,
            "raise rollout.attention_data_parallel_size",
        ),
    ],
)
def test_which_engines_are_deterministic(monkeypatch, settings, device, dtype, adapters, expected):
    monkeypatch.setattr(determinism, "cpu_engine_function", lambda name: lambda: None)
    rollout = RolloutConfig(**settings)
    if isinstance(expected, bool):
        assert is_deterministic(rollout, device, dtype, adapters) is expected
    else:
        with pytest.raises(ValueError, match=f"rollout.deterministic=true: .*{expected}"):
            is_deterministic(rollout, device, dtype, adapters)


def test_a_cpu_that_cannot_is_asked_for_it_only_if_the_key_says_so(monkeypatch):
    monkeypatch.setattr(
        determinism, "cpu_engine_function", lambda name: lambda: "its products round otherwise"
    )
    assert not is_deterministic(RolloutConfig(), "cpu", "float32", adapters=False)
    assert is_deterministic(RolloutConfig(deterministic=True), "cpu", "float32", adapters=False)


def test_the_last_line_of_a_log_is_said_until_the_start_is_over(tmp_path: Path) -> None:
    log, said, enough = tmp_path / "rollout-rank0.log", [], threading.Event()

    def say(text: str) -> None:
        said.append(text)
        enough.set()

    with reporting_slow_start(say, log, seconds=0.01):
        assert not said  # there is no log yet
        log.write_text("imported\nDeepGEMM warmup:  10%\rDeepGEMM warmup:  20%\r\n\n")
        assert enough.wait(60)
    assert said[0].endswith("s; rollout-rank0.log: DeepGEMM warmup:  20%")
    assert "slow-start" not in {thread.name for thread in threading.enumerate()}


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"x" * 100_000 + b"\n" + b"y" * 1000)
    assert last_line(log) == "y" * 300
