"""Keys that set the values of other keys, and keys that decide between other keys."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import (
    DPOConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
    batch_table,
    check_config,
    load_config,
    resolve,
)
from megarl.config.show import resolved_keys
from tests.config.conftest import batches_of, problems

Train = Callable[..., TrainConfig]
ACTOR, REF, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"


@pytest.mark.parametrize(
    ("overrides", "actor", "critic"),
    [
        # (tokens, trajectories) of a micro-batch; the file gives the actor 128 tokens, the critic nothing
        ([], (128, None), (128, None)),
        (["critic.ppo_micro_batch_size_per_gpu=2"], (128, None), (None, 2)),
        ([f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"], (128, None), (128, None)),
        ([f"{ACTOR}.use_dynamic_bsz=true", "critic.ppo_micro_batch_size_per_gpu=2"], (128, None), (128, None)),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", "critic.ppo_micro_batch_size_per_gpu=2", "critic.use_dynamic_bsz=false"],
            (128, None),
            (None, 2),
        ),
        ([f"{ACTOR}.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=256"], (128, None), (256, None)),
        ([f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"], (None, 4), (None, 4)),
        (
            [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
             "critic.ppo_max_token_len_per_gpu=256"],
            (None, 4),
            (None, 4),
        ),
        # Without a size, a micro-batch holds four of the longest trajectories, which have 64 tokens here.
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=null"], (256, None), (256, None)),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=null", f"{ACTOR}.use_dynamic_bsz=true"], (256, None), (256, None)),
        ([f"{ACTOR}.use_dynamic_bsz=false"], (None, 4), (None, 4)),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=null", "critic.use_dynamic_bsz=false"], (256, None), (None, 4)),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=null", "critic.ppo_max_token_len_per_gpu=64"], (256, None), (64, None)),
    ],
)  # fmt: skip
def test_use_dynamic_bsz_decides_between_tokens_and_trajectories(
    train: Train, overrides: list[str], actor: tuple, critic: tuple
) -> None:
    plan = batches_of(train(*overrides))
    assert plan.critic_update is not None
    assert (plan.actor_update.micro_batch_tokens, plan.actor_update.micro_batch_sequences) == actor
    assert (plan.critic_update.micro_batch_tokens, plan.critic_update.micro_batch_sequences) == critic


@pytest.mark.parametrize(
    ("overrides", "tokens", "trajectories"),
    [
        ([], 128, None),
        ([f"{REF}.log_prob_micro_batch_size_per_gpu=2"], None, 2),
        ([f"{REF}.log_prob_micro_batch_size_per_gpu=2", f"{ACTOR}.use_dynamic_bsz=true"], 128, None),
        ([f"{REF}.log_prob_micro_batch_size_per_gpu=2", f"{REF}.log_prob_max_token_len_per_gpu=99",
          f"{REF}.log_prob_use_dynamic_bsz=true"], 99, None),
        ([f"{REF}.log_prob_use_dynamic_bsz=false", f"{REF}.log_prob_micro_batch_size_per_gpu=2"], None, 2),
        ([f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"], None, 4),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=null", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"], 4 * 64, None),
    ],
)  # fmt: skip
def test_the_reference_likewise(
    train: Train, overrides: list[str], tokens: int | None, trajectories: int | None
) -> None:
    plan = batches_of(train("algorithm.use_kl_in_reward=true", *overrides))
    assert (plan.ref_micro_batch_tokens, plan.ref_micro_batch_sequences) == (tokens, trajectories)
    row = next(row for row in batch_table(plan) if row[0] == "reference")
    size = f"{tokens} tokens" if trajectories is None else f"{trajectories} trajectories"
    assert row[-1] == f"max {size}"


@pytest.mark.parametrize(
    ("overrides", "actor", "critic"),
    [
        ([], None, None),
        ([f"{MODEL}.enable_gradient_checkpointing=true"], "full", None),
        ([f"{MODEL}.enable_gradient_checkpointing=true", "critic.megatron=null"], "full", "full"),
        ([f"{MODEL}.enable_gradient_checkpointing=true", "critic.megatron=null",
          "critic.model.enable_gradient_checkpointing=false"], "full", None),
        (["critic.model.enable_gradient_checkpointing=true"], None, "full"),
        ([f"{ACTOR}.megatron.recompute_granularity=selective"], "selective", None),
    ],
)  # fmt: skip
def test_gradient_checkpointing_is_megatrons_full_recompute(
    train: Train, overrides: list[str], actor: str | None, critic: str | None
) -> None:
    full = resolve(train(*overrides))
    assert full.critic is not None and full.critic.megatron is not None
    assert full.actor_rollout_ref.actor.megatron.recompute_granularity == actor
    assert full.critic.megatron.recompute_granularity == critic
    assert full.critic.megatron.pipeline_model_parallel_size == 2


@pytest.mark.parametrize(
    ("prompt", "response", "chosen"),
    [(24, 40, 256), (1000, 3096, 16384), (2000, 6000, 16384), (4000, 16000, 20000)],
)
def test_a_chosen_micro_batch_holds_the_longest_trajectory(
    train: Train, prompt: int, response: int, chosen: int
) -> None:
    lengths = [f"data.max_prompt_length={prompt}", f"data.max_response_length={response}"]
    config = train(f"{ACTOR}.ppo_max_token_len_per_gpu=null", "algorithm.use_kl_in_reward=true", *lengths)
    check_config(config)
    full = resolve(config)
    assert full.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == chosen
    assert full.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == chosen
    assert resolve(full) == full
    origin = resolved_keys(config, {})[f"{ACTOR}.ppo_max_token_len_per_gpu"]
    assert origin[0] == chosen and origin[1].startswith("chosen: 4 times")


def test_texts_beside_the_rewards_fit_a_chosen_micro_batch(train: Train, folder: Path) -> None:
    ptx = f"{{files: {folder}/val.parquet, batch_size: 8, max_length: 20000}}"
    config = train(f"{ACTOR}.ppo_max_token_len_per_gpu=null", f"data.ptx={ptx}", f"{ACTOR}.ptx_coef=1")
    check_config(config)
    assert resolve(config).actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 20000


def test_a_chosen_micro_batch_of_fine_tuning(sft: Callable[..., SFTConfig]) -> None:
    config = sft("max_token_len_per_gpu=null")
    check_config(config)
    assert resolve(config).max_token_len_per_gpu == 4 * 64
    keys = [
        "data.train_files=f",
        "data.max_length=64",
        "data.train_batch_size=8",
        "model.path=m",
        "optim.lr=1",
    ]
    for schema in (RMConfig, DPOConfig):  # their micro-batches hold pairs
        assert resolve(load_config(schema, None, keys)).max_token_len_per_gpu == 4 * 2 * 64
        long = load_config(schema, None, [*keys, "data.max_length=20000"])
        assert resolve(long).max_token_len_per_gpu == 40000
    kto = load_config(DPOConfig, None, [*keys, "dpo.loss_type=kto"])
    assert resolve(kto).max_token_len_per_gpu == 4 * 64


def test_gradient_checkpointing_in_fine_tuning(sft: Callable[..., SFTConfig]) -> None:
    assert resolve(sft("model.enable_gradient_checkpointing=true")).megatron.recompute_granularity == "full"
    assert resolve(sft()).megatron.recompute_granularity is None


def test_other_names(train: Train) -> None:
    full = resolve(train(f"{ACTOR}.clip_range=[0.1, 0.28]", f"{ACTOR}.grad_clip=0.5", "critic.grad_clip=0"))
    actor = full.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.28)
    assert full.critic is not None and (actor.optim.clip_grad, full.critic.optim.clip_grad) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [
                "algorithm.use_kl_in_reward=true",
                f"{REF}.log_prob_max_token_len_per_gpu=64",
                f"{REF}.log_prob_micro_batch_size_per_gpu=1",
            ],
            f"{REF}: log_prob_max_token_len_per_gpu and log_prob_micro_batch_size_per_gpu are both set; give one of "
            "them, or log_prob_use_dynamic_bsz",
        ),
        (
            [
                f"{MODEL}.enable_gradient_checkpointing=true",
                f"{ACTOR}.megatron.recompute_granularity=selective",
            ],
            f"{MODEL}.enable_gradient_checkpointing=true contradicts {ACTOR}.megatron.recompute_granularity=selective; "
            "give one of them",
        ),
        (
            [
                "critic.model.enable_gradient_checkpointing=false",
                "critic.megatron.recompute_granularity=full",
            ],
            "critic.model.enable_gradient_checkpointing=false contradicts critic.megatron.recompute_granularity=full; "
            "give one of them",
        ),
        (
            ["plugins=[no/such.py]"],
            f"plugins: no/such.py is no .py file that is there (working directory {Path.cwd()})",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(train: Train, overrides: list[str], problem: str) -> None:
    assert problems(train(*overrides)) == [problem]
