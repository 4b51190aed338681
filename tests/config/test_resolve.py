"""Keys that say what others say, and keys that decide between others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import SFTConfig, TrainConfig, batch_table, check_config, resolve, resolve_batches
from tests.config.conftest import lines_of

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
    ],
)  # fmt: skip
def test_use_dynamic_bsz_decides_between_tokens_and_trajectories(
    train: Train, overrides: list[str], actor: tuple, critic: tuple
) -> None:
    plan = resolve_batches(train(*overrides))
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
    plan = resolve_batches(train("algorithm.use_kl_in_reward=true", *overrides))
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
            [f"{ACTOR}.use_dynamic_bsz=false"],
            f"{ACTOR}.use_dynamic_bsz=false needs {ACTOR}.ppo_micro_batch_size_per_gpu",
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=null"],
            f"{ACTOR}.use_dynamic_bsz=true needs {ACTOR}.ppo_max_token_len_per_gpu",
        ),
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
def test_what_lacks_its_size_or_contradicts_itself_is_refused(
    train: Train, overrides: list[str], problem: str
) -> None:
    assert lines_of(lambda: check_config(train(*overrides))) == [problem]
