"""What the keys of low-rank adapters need of each other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import SFTConfig, TrainConfig, check_config, resolve
from tests.config.conftest import lines_of

Train = Callable[..., TrainConfig]
ACTOR, CRITIC = "actor_rollout_ref.model.lora", "critic.model.lora"
# The critic of the fixture has a layout of its own.
SHARED = (
    f"{ACTOR}.rank=8", f"{CRITIC}.rank=4", "critic.model.share_base=true",
    "critic.megatron.tensor_model_parallel_size=2",
)  # fmt: skip


def test_what_fits_is_accepted(train: Train) -> None:
    check_config(train(*SHARED, f"{ACTOR}.alpha=16", f"{ACTOR}.target_modules=[q_proj,v_proj]"))
    check_config(train(*SHARED, f"{CRITIC}.dropout=0.1", "critic.megatron.optimizer_offload=true"))
    check_config(train("critic.model.share_base=false", f"{CRITIC}.rank=4", "critic.model.path=null"))
    check_config(resolve(train(*SHARED, f"{ACTOR}.base_dtype=float8", f"{ACTOR}.base_block=64")))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{ACTOR}.alpha=16",), f"{ACTOR} has alpha, but no adapters: give {ACTOR}.rank"),
        ((f"{CRITIC}.use_dora=true", f"{CRITIC}.dropout=0.1"), f"{CRITIC} has dropout, use_dora, but no"),
        ((f"{ACTOR}.rank=8", f"{ACTOR}.dropout=0.1"), f"{ACTOR}.dropout=0.1: the policy that is trained"),
        (
            (f"{ACTOR}.rank=8", f"{ACTOR}.target_modules=[]"),
            "target_modules is empty; leave it out for all-lin",
        ),
        ((f"{ACTOR}.rank=8", f"{ACTOR}.adapter_path=/nowhere"), "it has no adapter_config.json"),
        ((f"{ACTOR}.rank=8", f"{ACTOR}.base_block=64"), f"but {ACTOR}.base_dtype is null: give float8"),
        ((*SHARED, f"{CRITIC}.base_dtype=float8"), f"it is {ACTOR}'s; leave it out"),
        ((*SHARED, f"{CRITIC}.rank=0"), "share_base=true needs critic.model.lora.rank"),
        ((*SHARED, f"{ACTOR}.rank=0"), "share_base=true needs actor_rollout_ref.model.lora.rank"),
        (
            (*SHARED[:3],),
            "critic.megatron has tensor_model_parallel_size=1 (the actor's: 2), sequence_parallel=",
        ),
        (
            (*SHARED, "critic.model.enable_gradient_checkpointing=true"),
            "critic.megatron has recompute_granularity=full (the actor's: None): the model",
        ),
        (
            (
                *SHARED,
                "resource_pools.a.n_gpus_per_node=4",
                "resource_pools.b.n_gpus_per_node=4",
                "trainer.n_gpus_per_node=8",
                "actor_rollout_ref.actor.resource_pool=a",
                "critic.resource_pool=b",
            ),
            "critic.resource_pool='b' is not the actor's ('a')",
        ),
    ],
)
def test_what_cannot_be_is_refused(train: Train, overrides: tuple[str, ...], words: str) -> None:
    lines = [
        line
        for line in lines_of(lambda: check_config(train(*overrides)))
        if "lora" in line or "share" in line
    ]
    assert len(lines) == 1 and words in lines[0], lines


@pytest.mark.parametrize("name", ["target_modules", "exclude_modules"])
def test_one_name_is_a_list_of_one(train: Train, name: str) -> None:
    """Also for a run that goes on from one which was told the other way."""
    one, listed = (train(f"{ACTOR}.rank=8", f"{ACTOR}.{name}={text}") for text in ("o_proj", "[o_proj]"))
    check_config(one)
    assert one == listed and getattr(one.actor_rollout_ref.model.lora, name) == ("o_proj",)


def test_another_model_has_another_base(train: Train, folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text("{}")
    (line,) = lines_of(lambda: check_config(train(*SHARED, f"critic.model.path={folder}/other")))
    assert f"critic.model.path='{folder}/other' is not actor_rollout_ref.model.path='{folder}/model'" in line


def test_fine_tuning_may_have_dropout(sft: Callable[..., SFTConfig]) -> None:
    check_config(sft("model.lora.rank=4", "model.lora.dropout=0.1"))
    (line,) = lines_of(lambda: check_config(sft("model.lora.dropout=0.1")))
    assert line.startswith("model.lora has dropout, but no adapters")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor_rollout_ref.model.lora_alpha=16", f"use {ACTOR}.alpha"),
        ("critic.model.target_modules=[q_proj]", f"use {CRITIC}.target_modules"),
        ("actor_rollout_ref.model.lora_adapter_path=x", f"use {ACTOR}.adapter_path"),
        ("actor_rollout_ref.model.lora.merge=true", "use actor_rollout_ref.rollout.lora_sync"),
        ("actor_rollout_ref.model.lora.type=canonical_lora", "leave it out"),
        (
            "actor_rollout_ref.model.lora.lora_A_init_method=xavier",
            f"the keys of LoRA are those of {ACTOR[:-5]}",
        ),
        ("reward_model.model.lora_rank=8", "the reward model is not trained"),
    ],
)
def test_keys_of_others_are_answered_with_ours(train: Train, key: str, words: str) -> None:
    (line,) = lines_of(lambda: train(key))
    assert words in line


def test_keys_of_verls_own_lora_section_are_read_as_typed(train: Train) -> None:
    found = train(f"+{ACTOR}.rank=16", f"{ACTOR}.alpha=32", f"{ACTOR}.exclude_modules=[o_proj]")
    lora = found.actor_rollout_ref.model.lora
    assert (lora.rank, lora.alpha, lora.exclude_modules) == (16, 32.0, ("o_proj",))
