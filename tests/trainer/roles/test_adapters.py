"""Checks of the `lora` sections against the models' files, and whether engines serve adapters or merged weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from examples.tiny_model import make_tiny_model
from megarl.config import LoraConfig, RolloutConfig, SFTConfig, TrainConfig, load_config, resolve
from megarl.models import ModelConfig, read_model_config
from megarl.rollout.engine import AdapterConfig
from megarl.trainer.roles.adapters import check_adapters, engine_adapters, served_adapters
from tests.fixtures.runs import PPO, REPOSITORY, on

ACTOR, CRITIC = "actor_rollout_ref.model.lora", "critic.model.lora"


def check(task: Path, *overrides: str) -> None:
    recipe, *ppo = PPO
    config = load_config(TrainConfig, REPOSITORY / recipe, [*ppo, *on(task, task), *overrides])
    model = read_model_config(str(task / "model"))
    check_adapters(resolve(config), model, model)


def test_patterns_and_groups_of_all_models_are_refused_at_once(task: Path) -> None:
    check(task, f"{ACTOR}.rank=4", f"{CRITIC}.rank=2")
    check(task, f"{ACTOR}.target_modules=[nothing]")  # target_modules is not checked without a rank
    with pytest.raises(ValueError) as caught:
        check(
            task, f"{ACTOR}.rank=4", f"{ACTOR}.target_modules=[q_proj,qkv_proj]", f"{CRITIC}.rank=2",
            f"{CRITIC}.expert_groups=2",
        )  # fmt: skip
    text = str(caught.value)
    assert f"{ACTOR}.target_modules: 'qkv_proj' fits no linear layer of the model; there are q_proj" in text
    assert f"{CRITIC}.expert_groups=2: the model has no experts" in text


def test_blocks_that_shards_cut_are_refused(task: Path) -> None:
    keys = (f"{ACTOR}.rank=4", f"{ACTOR}.base_dtype=float8")
    check(task, *keys, f"{ACTOR}.base_block=16")
    with pytest.raises(ValueError, match=rf"{ACTOR}.base_block=128: in this layout ranks hold parts of"):
        check(task, *keys)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_adapters_of_shared_experts_that_overlap_are_refused(tmp_path: Path, family: str) -> None:
    """With that overlap Megatron gathers the tokens, which are sharded over tensor parallel ranks, outside of the experts' layers."""
    model = read_model_config(str(make_tiny_model(tmp_path / "model", ["some text"], family=family)))
    overlap = "megatron.override_transformer_config={moe_shared_expert_overlap: true}"

    def check_tuning(*overrides: str) -> None:
        recipe = REPOSITORY / "recipes/quickstart_sft.yaml"
        check_adapters(resolve(load_config(SFTConfig, recipe, ["model.lora.rank=8", *overrides])), model)

    check_tuning()  # the recipe has two tensor parallel ranks
    check_tuning(overlap, "megatron.tensor_model_parallel_size=1")
    check_tuning(overlap, "model.lora.rank=0")
    check_tuning(overlap, "model.lora.exclude_modules=['*.mlp.shared_expert*']")
    with pytest.raises(ValueError) as caught:
        check_tuning(overlap)
    assert (
        "model.lora.rank=8: adapters of shared experts go without megatron.override_transformer_config"
        in (str(caught.value))
    )


def test_an_adapter_of_another_kind_is_refused(task: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    peft = get_peft_model(model, PeftConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    peft.save_pretrained(tmp_path)
    keys = (f"{ACTOR}.adapter_path={tmp_path}", f"{ACTOR}.rank=4", f"{ACTOR}.target_modules=[q_proj,v_proj]")
    check(task, *keys, f"{ACTOR}.alpha=8")
    with pytest.raises(ValueError, match=rf"{ACTOR}.adapter_path: adapter .* does not fit section lora"):
        check(task, *keys)
    sft = load_config(
        SFTConfig,
        REPOSITORY / "recipes/quickstart_sft.yaml",
        ["model.lora.rank=8", f"model.lora.adapter_path={tmp_path}"],
    )
    with pytest.raises(ValueError, match=r"model.lora.adapter_path: .* has r=4, lora.rank is 8"):
        check_adapters(sft, read_model_config(str(task / "model")))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4


LORA, ROLLOUT = LoraConfig(rank=4, alpha=8), RolloutConfig()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "hf", ["some text"], family="qwen3")
    return read_model_config(str(folder))


def test_adapters_are_served_where_they_can_be_and_help(model: ModelConfig) -> None:
    assert served_adapters(ROLLOUT, model, LoraConfig(), freed=False) == (None, None)
    served, said = served_adapters(ROLLOUT, model, LORA, freed=False)
    assert served == LORA and "only adapters are sent" in said
    asked = replace(ROLLOUT, lora_sync="adapters")
    assert served_adapters(asked, model, LORA, freed=True)[0] == LORA


@pytest.mark.parametrize(
    ("rollout", "lora", "freed", "reason"),
    [
        (ROLLOUT, LORA, True, "memory is freed in each step"),
        (ROLLOUT, replace(LORA, use_dora=True), False, "SGLang refuses DoRA adapters"),
        (replace(ROLLOUT, quantization="fp8"), LORA, False, "float8 engines are sent merged weights"),
        (replace(ROLLOUT, sync_skip_unchanged=True), LORA, False, "rollout.sync_skip_unchanged=true"),
        (replace(ROLLOUT, lora_sync="merged"), LORA, False, "rollout.lora_sync=merged"),
    ],
)
def test_why_they_are_merged_is_said(
    model: ModelConfig, rollout: RolloutConfig, lora: LoraConfig, freed: bool, reason: str
) -> None:
    served, said = served_adapters(rollout, model, lora, freed)
    assert served is None
    assert said is not None and said.startswith("rollout engines are sent weights") and reason in said


def test_engines_are_started_for_the_layers_and_scaling_that_are_trained(model: ModelConfig) -> None:
    lora = LoraConfig(rank=4, alpha=6, use_rslora=True, target_modules=("v_proj", "down_proj"))
    assert engine_adapters(model, lora) == AdapterConfig(4, 3.0, ("v_proj", "down_proj"))


def test_what_cannot_be_served_is_refused_before_anything_starts(task: Path) -> None:
    recipe, *ppo = PPO
    given = [
        *on(task, task),
        "actor_rollout_ref.model.lora.rank=4",
        "actor_rollout_ref.rollout.lora_sync=adapters",
    ]
    model = read_model_config(str(task / "model"))
    check_adapters(resolve(load_config(TrainConfig, REPOSITORY / recipe, [*ppo, *given])), model, model)
    given.append("actor_rollout_ref.model.lora.use_dora=true")
    config = resolve(load_config(TrainConfig, REPOSITORY / recipe, [*ppo, *given]))
    with pytest.raises(
        ValueError, match=r"lora_sync=adapters cannot be: lora\.use_dora=true: SGLang refuses DoRA"
    ):
        check_adapters(config, model, model)
