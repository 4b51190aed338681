"""Complete runs with adapters of experts, of latent attention, with magnitudes (DoRA), and on a float8 base model: after the last
update the engines give the same answers as transformers with the merged model.

`pytest --slow` runs them, about a minute each.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.data.trajectories import read_trajectories
from tests.fixtures.runs import PPO, on, steps, succeed
from tests.trainer.test_families import GRPO, REWARD, greedy_differences

ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
LORA = "actor_rollout_ref.model.lora"
FLOAT8 = (f"{LORA}.base_dtype=float8", f"{LORA}.base_block=8")
EXPERTS = (
    *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.tensor_model_parallel_size=1",
    f"{ACTOR}.pipeline_model_parallel_size=1", f"{ACTOR}.expert_model_parallel_size=2",
    f"{ROLLOUT}.expert_parallel_size=2",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A family, its run's settings of adapters and layouts, and whether only adapters are sent to the engines."""

    family: str
    recipe: str
    overrides: tuple[str, ...]
    alone: bool = False


CASES = {
    "experts": Case("qwen3_moe", PPO[0], EXPERTS),
    "magnitudes of latent experts, float8": Case(
        "deepseek_v3", PPO[0], (*EXPERTS, *FLOAT8, f"{LORA}.use_dora=true")
    ),
    "attention beside experts that have none": Case("gpt_oss", PPO[0], EXPERTS),
    "adapters alone, float8": Case(
        "qwen2", "recipes/lora_ppo_cpu.yaml", (*FLOAT8, f"{ROLLOUT}.lora_sync=adapters"), alone=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_engines_answer_as_the_merged_model(name: str, task: Path, tmp_path: Path) -> None:
    case, out = CASES[name], tmp_path / "run"
    model = make_tiny_model(
        tmp_path / "model", arithmetic_texts(), family=case.family, hidden_size=64, ffn_hidden_size=128,
        num_layers=2, fields={"initializer_range": 0.2},
    )  # fmt: skip
    (tmp_path / "reward.py").write_text(REWARD)
    printed = succeed(
        "train", case.recipe, *PPO[1:], *on(task, out), f"actor_rollout_ref.model.path={model}",
        f"custom_reward_function.path={tmp_path}/reward.py", "trainer.total_training_steps=2",
        "trainer.test_freq=2", "actor_rollout_ref.actor.optim.lr=3e-2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0", f"{LORA}.rank=4", f"{LORA}.alpha=8", *case.overrides,
    )  # fmt: skip
    assert ("only adapters are sent" if case.alone else "adapters merged in") in printed
    first, second = steps(out)
    kl = "actor/ref_kl" if case.alone else "actor/kl_loss"
    assert first[kl] == pytest.approx(0.0, abs=1e-6) and abs(second[kl]) > 1e-4
    for step in (first, second):
        assert (step["actor/ratio_mean"], step["actor/ppo_kl"]) == (1.0, 0.0)
        assert step["actor/grad_norm"] > 0 and step["training/rollout_log_prob_diff_max"] < 1e-4
    old, new = (load_file(folder / "model.safetensors") for folder in (model, out / "hf"))
    frozen = [key for key in old if torch.equal(old[key], new[key])]
    assert not [key for key in frozen if key.endswith("_proj.weight")] and {"model.norm.weight"} < set(frozen)
    if case.family == "gpt_oss":
        assert {key for key in old if ".experts." in key} < set(frozen)
    answers = read_trajectories(out / "rollouts" / "val-000002.parquet")
    assert set(answers["weight_version"].to_pylist()) == {3}
    assert greedy_differences(out / "hf", answers) == (0, pytest.approx(0.0, abs=1e-4))
