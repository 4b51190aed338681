"""Options of engines that plans follow."""

from pathlib import Path

import pytest

from megarl.plan.inputs import engine_layout, read_inputs
from megarl.plan.memory import GIB, plan_memory

ROOT = Path(__file__).resolve().parents[2]
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize("recipe", ["qwen2.5_7b_dapo", "deepseek_v3_grpo_lora"])
def test_a_cache_in_float8_holds_twice_as_many_tokens(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plain, small = (
        plan_memory(*read_inputs(f"recipes/{recipe}.yaml", keys, check=False), 140 * GIB, 0)
        for keys in ([], [f"{ROLLOUT}.kv_cache_dtype=fp8_e4m3"])
    )
    assert plain.kv_token_bytes == 2 * small.kv_token_bytes
    assert small.kv_tokens == pytest.approx(2 * plain.kv_tokens, abs=2)


def test_shared_experts_are_on_each_rank_with_deepep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = "recipes/deepseek_v3_grpo_lora.yaml"
    plans = []
    for keys in ([], [f"{ROLLOUT}.moe_a2a_backend=deepep"]):
        config, inputs = read_inputs(recipe, keys, check=False)
        assert engine_layout(config.actor_rollout_ref.rollout).whole_shared == bool(keys)
        plan = plan_memory(config, inputs, 140 * GIB, 0)
        plans.append(next(owner for owner in plan.owners if owner.name == "rollout_weights").stages[0])
    # 58 layers have three matrices [7168, 2048] in float8, an eighth of which is there already.
    assert plans[1] - plans[0] == pytest.approx(58 * 3 * 7168 * 2048 * 7 / 8, rel=0.01)
