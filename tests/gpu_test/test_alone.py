"""A rank without its peers, with real tensors: on the CPU here, where no memory is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.gpu_test.alone import Meter
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, plan_memory

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes" / "quickstart_ppo.yaml")
SIZES = {"hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 2}
MEGATRON = "actor_rollout_ref.actor.megatron"


def keys_of(model: Path) -> list[str]:
    return [f"actor_rollout_ref.model.path={model}", "trainer.test_freq=-1", "data.val_files=null"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """TP2 x PP2."""
    return keys_of(make_tiny_model(tmp_path_factory.mktemp("alone"), ["two words"], **SIZES))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """TP2 x EP2."""
    folder = tmp_path_factory.mktemp("alone-experts")
    model = make_tiny_model(folder, ["two words"], family="qwen3_moe", **SIZES)
    return [
        *keys_of(model), "critic=null", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2",
        f"{MEGATRON}.pipeline_model_parallel_size=1", f"{MEGATRON}.expert_model_parallel_size=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def reports(dense: list[str], experts: list[str]) -> list[dict]:
    """Reports of the last stage of a pipeline, which gets no shapes from another rank, and of a rank that gets no other rank's tokens."""
    jobs = [(dense, "actor", 3), (experts, "actor", 0)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu_test.lone_ranks", RECIPE, json.dumps(jobs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_ranks_run_to_their_end_alone(reports: list[dict]) -> None:
    assert [report["stage"] for report in reports] == [1, 0]
    for report in reports:
        assert report["phases"].keys() >= {"evaluate", "first_update", "update"}


def test_what_they_hold_is_what_is_planned(reports: list[dict], dense: list[str], experts: list[str]) -> None:
    for report, keys in zip(reports, (dense, experts), strict=True):
        config, inputs = read_inputs(RECIPE, keys, check=False)
        plan = plan_memory(config, inputs, 80 * GIB, 0)
        owners = {owner.name: owner for owner in plan.owners}
        # On a CPU weights are in float32, twice as wide as on a GPU; gradients are in float32 on both.
        for part, times in (("weights", 2), ("gradients", 1)):
            planned = times * owners[f"actor_{part}"].stages[report["stage"]]
            assert report["parts"][part] == pytest.approx(planned, rel=1e-3), part


@pytest.mark.parametrize("peak", [300, 200])
def test_a_phase_is_what_the_allocator_counted_meanwhile(peak: int) -> None:
    now, begun = [100], []
    meter = Meter(lambda: now[0], lambda: peak, lambda: begun.append(meter.name))
    with meter.phase("update") as phase:
        now[0] = 150
    assert (phase.before, phase.peak, phase.after) == (100, peak, 150)
    assert begun == ["update"] and meter.name == "start" and meter.phases["update"] is phase
