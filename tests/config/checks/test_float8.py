"""Configurations of float8 training that are refused."""

from collections.abc import Callable

import pytest

from megarl.config import TrainConfig, check_config, resolve
from megarl.config.schema.models import MegatronConfig
from tests.config.conftest import problems

Train = Callable[..., TrainConfig]
MEGATRON = "actor_rollout_ref.actor.megatron"
FLOAT8 = f"{MEGATRON}.fp8=e4m3"


def test_it_is_off_and_reaches_the_reference_with_the_actor(train: Train) -> None:
    assert resolve(train()).actor_rollout_ref.actor.megatron.fp8 is None
    config = train(FLOAT8, "actor_rollout_ref.actor.use_kl_loss=true")
    check_config(config)
    reference = resolve(config).actor_rollout_ref.ref.megatron
    assert reference is not None and reference.fp8 == "e4m3"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([f"{MEGATRON}.dtype=float16"], "gradients of scaled losses"),
        ([f"{MEGATRON}.dtype=float32"], "only products of bfloat16 tensors"),
        (["actor_rollout_ref.model.lora.rank=8"], "a base that is quantised anew in each pass"),
        (
            [f"{MEGATRON}.recompute_granularity=selective", f"{MEGATRON}.recompute_modules=[mlp,moe_act]"],
            "recompute_modules=mlp has not been executed",
        ),
        (
            [f"{MEGATRON}.recompute_granularity=selective"],
            "recompute_modules=core_attn has not been executed",
        ),
        (
            [f"{MEGATRON}.override_transformer_config={{moe_token_dispatcher_type: flex}}"],
            "moe_token_dispatcher_type=flex has not been executed",
        ),
    ],
    ids=str,
)
def test_what_it_has_not_been_executed_with(train: Train, changes: list[str], words: str) -> None:
    (line,) = problems(train(FLOAT8, *changes))
    assert line.startswith(FLOAT8) and words in line


def test_weights_that_ranks_share(train: Train) -> None:
    one = f"{MEGATRON}.pipeline_model_parallel_size=1"
    (line,) = problems(train(FLOAT8, one, f"{MEGATRON}.fsdp=optim_grads"))
    assert line.startswith(f"{FLOAT8} goes without {MEGATRON}.fsdp=optim_grads")


def test_layers_in_bfloat16_are_of_float8(train: Train) -> None:
    (line,) = problems(train(f"{MEGATRON}.num_layers_at_end_in_bf16=1"))
    assert line == (
        f"{MEGATRON}.num_layers_at_end_in_bf16=1 is of {MEGATRON}.fp8, which is null; set that, or leave it out"
    )


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("delayed", "follows from earlier batches"),
        ("tensorwise", "all texts of a micro-batch"),
        ("mxfp8", "Blackwell"),
    ],
)
def test_other_recipes_are_refused_by_name(train: Train, recipe: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"fp8_recipe={recipe}.*{words}"):
        train(FLOAT8, f"{MEGATRON}.fp8_recipe={recipe}")


def test_tokens_of_a_rank() -> None:
    """With float8 the tokens of a rank are a multiple of 128 where ranks gather their inputs (`Float8BlockQuantizer.is_quantizable`), else of 16
    (`get_fp8_align_size`)."""
    assert MegatronConfig(tensor_model_parallel_size=2).token_multiple == 1
    assert MegatronConfig(fp8="e4m3").token_multiple == 16
    assert MegatronConfig(fp8="e4m3", tensor_model_parallel_size=2).token_multiple == 128
