from collections.abc import Callable
from dataclasses import dataclass

import pytest

from megarl.config import (
    EvalConfig,
    MegatronConfig,
    SFTConfig,
    TrainConfig,
    check_model,
    check_models,
    check_rollout_model,
)
from tests.config.conftest import lines_of

ACTOR = "actor_rollout_ref.actor.megatron"


@dataclass(frozen=True)
class Facts:
    num_layers: int = 4
    num_attention_heads: int = 8
    num_query_groups: int = 8
    ffn_hidden_size: int = 64


def fit(megatron: MegatronConfig, facts: Facts, **key: str) -> None:
    check_model(
        megatron,
        num_layers=facts.num_layers,
        num_attention_heads=facts.num_attention_heads,
        num_query_groups=facts.num_query_groups,
        ffn_hidden_size=facts.ffn_hidden_size,
        **key,
    )


def test_what_divides_passes() -> None:
    for tp in (1, 2, 4, 8):
        fit(MegatronConfig(tensor_model_parallel_size=tp), Facts())
    fit(MegatronConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), Facts())


def test_tensor_parallel_names_the_key_the_size_and_what_is_possible() -> None:
    lines = lines_of(lambda: fit(MegatronConfig(tensor_model_parallel_size=3), Facts(ffn_hidden_size=96)))
    assert lines == [
        f"{ACTOR}.tensor_model_parallel_size=3 does not divide num_attention_heads=8; possible: 1,2,4,8",
        f"{ACTOR}.tensor_model_parallel_size=3 does not divide num_query_groups=8; possible: 1,2,4,8",
    ]


def test_megatron_shares_no_key_value_head() -> None:
    lines = lines_of(lambda: fit(MegatronConfig(tensor_model_parallel_size=4), Facts(num_query_groups=2)))
    assert lines == [
        f"{ACTOR}.tensor_model_parallel_size=4 does not divide num_query_groups=2; possible: 1,2"
    ]


def test_layers_are_shared_out_evenly() -> None:
    pp3 = MegatronConfig(pipeline_model_parallel_size=3)
    assert lines_of(lambda: fit(pp3, Facts(), key="critic.megatron")) == [
        "critic.megatron.pipeline_model_parallel_size=3 does not divide num_layers=4; possible: 1,2,4"
    ]
    chunks = MegatronConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    assert lines_of(lambda: fit(chunks, Facts())) == [
        f"{ACTOR}.pipeline_model_parallel_size=4 x virtual_pipeline_model_parallel_size=2 chunks does not divide "
        "num_layers=4; possible: 2"
    ]


@pytest.mark.parametrize(
    ("tp", "groups", "fits"),
    [(1, 2, True), (2, 2, True), (4, 2, True), (8, 2, True), (4, 6, False), (3, 8, False)],
)
def test_an_engine_may_give_ranks_the_same_key_value_head(tp: int, groups: int, fits: bool) -> None:
    def check() -> None:
        check_rollout_model(tp, num_attention_heads=8, num_query_groups=groups, ffn_hidden_size=64)

    if fits:
        check()
    else:
        (line,) = lines_of(check)
        assert line.startswith(f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp} ")


def test_why_an_engine_does_not_fit() -> None:
    def check() -> None:
        check_rollout_model(3, num_attention_heads=8, num_query_groups=2, ffn_hidden_size=64, key="rollout")

    assert lines_of(check) == [
        "rollout.tensor_model_parallel_size=3 does not divide num_attention_heads=8 and ffn_hidden_size=64 and neither "
        "divides num_query_groups=2 nor is a multiple of it; possible: 1,2,4,8"
    ]


def test_every_role_of_a_run_is_checked(train: Callable[..., TrainConfig]) -> None:
    check_models(train(), Facts())
    config = train("actor_rollout_ref.ref.megatron={tensor_model_parallel_size: 4}")
    check_models(config, Facts(num_query_groups=2))  # the reference is not used
    lines = lines_of(
        lambda: check_models(
            train(
                "actor_rollout_ref.ref.megatron={tensor_model_parallel_size: 4}",
                "algorithm.use_kl_in_reward=true",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
            ),
            Facts(num_query_groups=2),
            Facts(num_layers=3),
        )
    )
    assert [line.split("=")[0] for line in lines] == [
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
        "critic.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ]


def test_sft_and_evaluation(sft: Callable[..., SFTConfig], evaluation: Callable[..., EvalConfig]) -> None:
    check_models(sft(), Facts())
    check_models(evaluation(), Facts())
    (line,) = lines_of(lambda: check_models(sft("megatron.pipeline_model_parallel_size=3"), Facts()))
    assert line.startswith("megatron.pipeline_model_parallel_size=3 does not divide num_layers=4")
    (line,) = lines_of(lambda: check_models(evaluation("rollout.tensor_model_parallel_size=5"), Facts()))
    assert line.startswith("rollout.tensor_model_parallel_size=5 does not divide num_attention_heads=8")
