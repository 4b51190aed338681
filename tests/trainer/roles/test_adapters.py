"""Sections `lora` against the models' files, before anything is started."""

import json
from pathlib import Path

import pytest
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from megarl.config import SFTConfig, TrainConfig, load_config, resolve
from megarl.models import read_model_config
from megarl.trainer.roles.adapters import check_adapters
from tests.fixtures.runs import PPO, REPOSITORY, on

ACTOR, CRITIC = "actor_rollout_ref.model.lora", "critic.model.lora"


def check(task: Path, *overrides: str) -> None:
    recipe, *ppo = PPO
    config = load_config(TrainConfig, REPOSITORY / recipe, [*ppo, *on(task, task), *overrides])
    model = read_model_config(str(task / "model"))
    check_adapters(resolve(config), model, model)


def test_patterns_and_groups_of_all_models_are_refused_at_once(task: Path) -> None:
    check(task, f"{ACTOR}.rank=4", f"{CRITIC}.rank=2")
    check(task, f"{ACTOR}.target_modules=[nothing]")  # not read without a rank
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
