"""A teacher that engines serve, in the plans of memory and seconds: it is on devices of its own, all the time."""

from pathlib import Path

import pytest

from megarl.costs.flops import causal_pairs
from megarl.costs.hardware import TABLE, Assumptions
from megarl.costs.speed import Machine
from megarl.plan.inputs import read_inputs
from megarl.plan.job import plan_job
from megarl.plan.judges import judge_seconds
from megarl.plan.memory import GIB, plan_memory

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes/qwen3_4b_distillation.yaml")
REF = "actor_rollout_ref.ref"
SERVED = [
    "resource_pools={global: {n_gpus_per_node: 4}, teacher: {n_gpus_per_node: 4}}", f"{REF}.megatron=null",
    f"{REF}.resource_pool=teacher", f"{REF}.engine={{tensor_model_parallel_size: 4}}",
]  # fmt: skip


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the repository's root: the recipe's paths are relative to it."""
    monkeypatch.chdir(ROOT)


def machine() -> Machine:
    return Machine(TABLE["H100"], Assumptions(), per_node=8)


def test_its_weights_and_its_cache_stay_on_its_pool() -> None:
    """30.5 G parameters x 2 bytes over 4 devices; the cache takes the rest of 0.8 of a device."""
    config, inputs = read_inputs(RECIPE, SERVED)
    plan = plan_memory(config, inputs, 79 * GIB)
    assert plan.fits and not plan.problems()
    owners = {owner.name: owner for owner in plan.owners if owner.role == "ref"}
    assert set(owners) == {"ref_weights", "ref_kv_cache"}
    for phase in plan.phases:
        (weights,), (cache,) = (owners[name].at(phase) for name in ("ref_weights", "ref_kv_cache"))
        assert weights == pytest.approx(30.5e9 * 2 / 4, rel=0.02)
        assert weights + cache == pytest.approx(0.8 * 79 * GIB, rel=0.01)
        assert plan.total(phase, "teacher") == weights + cache
    assert not any(owner.name.startswith("ref_evaluating") for owner in plan.owners)
    config, inputs = read_inputs(RECIPE, [*SERVED, f"{REF}.engine.gpu_memory_utilization=0.18"])
    (problem,) = plan_memory(config, inputs, 79 * GIB).problems()
    assert problem.startswith(f"the cache of {REF}.engine holds ") and "9,223" in problem


def test_its_seconds_are_those_of_prompts_that_are_computed_once() -> None:
    config, inputs = read_inputs(RECIPE, SERVED)
    (found,) = judge_seconds(config, inputs, machine(), 100.0, 900.0)
    assert (found.name, found.pool) == ("reference prefill", "teacher")
    flops = inputs.flops_of(inputs.teachers["ref"], "lm")
    # 1024 trajectories of 128 prompts: 1024 times all 1000 tokens, minus 896 times the first 100.
    all_tokens = 1024 * 1000 * flops.forward(causal_pairs(1000.0))
    again = 896 * 100 * flops.forward(causal_pairs(100.0))
    assert found.floor == pytest.approx((all_tokens - again) / 4 / TABLE["H100"].bf16)
    assert found.seconds > found.floor
    memory = plan_memory(config, inputs, 79 * GIB)
    job = plan_job(config, inputs, machine(), memory, sync=False)
    (phase,) = [phase for phase in job.phases if phase.name == "evaluate_models"]
    assert next(part.name for part in phase.parts if part.pool == "teacher") == "reference prefill"
    held = job.held("evaluate_models")
    assert set(held["teacher", 3]) == {"ref_weights", "ref_kv_cache"}
