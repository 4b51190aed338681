from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megarl.config import (
    EvalConfig,
    RolloutConfig,
    TrainConfig,
    fit_problems,
    resolve,
)
from megarl.config.model_fit import check_rollout_model
from megarl.config.schema.rollout import SpeculativeConfig
from megarl.models import read_model_config
from megarl.models.config import MoEConfig
from megarl.util.packages import shipped
from tests.config.conftest import lines_of
from tests.config.facts import GPT_OSS, MLA, MOE, NET, SPARSE, Facts


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"quantization": "fp8", "quantization_block_size": (16, 16)}, "quantization=fp8"),
        ({"speculative": SpeculativeConfig(algorithm="ngram")}, "speculative.algorithm=ngram"),
        (
            {"tensor_model_parallel_size": 2, "attention_data_parallel_size": 2},
            "attention_data_parallel_size=2",
        ),
    ],
    ids=["float8", "speculative", "groups"],
)
def test_what_gated_delta_nets_are_not_served_with(keys: dict[str, Any], named: str) -> None:
    facts = Facts(delta_net=NET, moe=replace(MOE, dense_layers=()), family="qwen3_next")
    (line,) = lines_of(lambda: check_rollout_model(RolloutConfig(**keys), facts, key="rollout"))
    assert line == f"rollout.{named}: not supported with gated delta nets (qwen3_next); leave it out"
    check_rollout_model(RolloutConfig(), facts, key="rollout")
    own = RolloutConfig(speculative=SpeculativeConfig(algorithm="mtp"))
    check_rollout_model(own, replace(facts, num_mtp_layers=1), key="rollout")


def test_experts_of_an_engine() -> None:
    def check(tp: int, ep: int, facts: Facts) -> list[str]:
        rollout = RolloutConfig(tensor_model_parallel_size=tp, expert_parallel_size=ep)
        return lines_of(lambda: check_rollout_model(rollout, facts, key="rollout"))

    check_rollout_model(RolloutConfig(tensor_model_parallel_size=8, expert_parallel_size=8), Facts(moe=MOE))
    assert check(4, 2, Facts()) == ["rollout.expert_parallel_size=2: the model has no experts"]
    assert check(4, 3, Facts(moe=MOE)) == [
        "rollout.expert_parallel_size=3: it does not divide rollout.tensor_model_parallel_size=4"
    ]
    odd = MoEConfig(num_experts=6, top_k=2, ffn_hidden_size=48, dense_layers=(0,))
    assert check(4, 4, Facts(moe=odd)) == [
        "rollout.expert_parallel_size=4 does not divide num_experts=6; possible: 1,2,3,6"
    ]


@pytest.mark.parametrize(
    ("tp", "groups", "fits"),
    [(1, 2, True), (2, 2, True), (4, 2, True), (8, 2, True), (4, 6, False), (3, 8, False)],
)
def test_an_engine_may_give_ranks_the_same_key_value_head(tp: int, groups: int, fits: bool) -> None:
    def check() -> None:
        check_rollout_model(RolloutConfig(tensor_model_parallel_size=tp), Facts(num_query_groups=groups))

    if fits:
        check()
    else:
        (line,) = lines_of(check)
        assert line.startswith(f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp} ")


def groups(tp: int, dp: int, facts: Facts, **keys: bool) -> list[str]:
    rollout = RolloutConfig(tensor_model_parallel_size=tp, attention_data_parallel_size=dp, **keys)
    return lines_of(lambda: check_rollout_model(rollout, facts, key="rollout"))


def test_data_parallel_attention_cuts_heads_within_groups_and_all_else_over_all_ranks() -> None:
    check_rollout_model(RolloutConfig(tensor_model_parallel_size=16, attention_data_parallel_size=2), Facts())
    assert groups(32, 2, Facts()) == [
        "rollout.tensor_model_parallel_size / attention_data_parallel_size=16 does not divide num_attention_heads=8; possible: 1,2,4,8"
    ]
    assert groups(12, 12, Facts()) == [
        "rollout.tensor_model_parallel_size=12 does not divide ffn_hidden_size=64; possible: 1,2,4,8,16,32,64"
    ]
    minimax = Facts(family="minimax_m2")
    (line,) = groups(2, 2, minimax, data_parallel_lm_head=True)
    assert line.startswith("rollout.data_parallel_lm_head=true: SGLang's class for minimax_m2 models")
    assert groups(2, 2, Facts(family="llama", data_parallel_attention=False)) == [
        "rollout.attention_data_parallel_size=2: SGLang has no data parallel attention for llama models; set it to 1"
    ]


@pytest.mark.parametrize(("tied", "head"), [(True, False), (False, True)])
def test_groups_of_several_ranks_gather_logits_of_no_padded_vocabulary(tied: bool, head: bool) -> None:
    """SGLang's LogitsProcessor._gather_attn_tp_logits crashed with a padded vocabulary on a CPU."""
    padded, keys = Facts(vocab_size=330, tie_word_embeddings=tied), {"data_parallel_lm_head": head}
    (line,) = groups(4, 2, padded, **keys)
    assert "vocabulary of 330 rows" in line and line.endswith("set rollout.attention_data_parallel_size=4")
    check_rollout_model(
        RolloutConfig(tensor_model_parallel_size=4, attention_data_parallel_size=4, **keys), padded
    )
    check_rollout_model(
        RolloutConfig(tensor_model_parallel_size=4, attention_data_parallel_size=2, **keys),
        Facts(tie_word_embeddings=tied),
    )


@pytest.mark.parametrize(
    ("tp", "ep", "cut"),
    [
        (1, 1, []),
        (2, 1, []),
        (4, 1, ["the experts' ffn_hidden_size=768"]),
        (4, 2, []),
        (8, 8, ["shared_ffn_hidden_size=512"]),
    ],
)
def test_blocks_in_float8_are_not_cut(tp: int, ep: int, cut: list[str]) -> None:
    """SGLang's Fp8LinearMethod and Fp8MoEMethod require complete blocks: 768 / 4 = 192 and 512 / 8 = 64 are no multiples of 128."""
    moe = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=768, shared_ffn_hidden_size=512)
    sizes = {"tensor_model_parallel_size": tp, "expert_parallel_size": ep}

    def check(quantization: str | None) -> None:
        check_rollout_model(RolloutConfig(**sizes, quantization=quantization), Facts(moe=moe), key="rollout")

    check(None)
    if not cut:
        check("fp8")
        return
    lines = lines_of(lambda: check("fp8"))
    assert [name for name in cut if any(name in line for line in lines)] == cut and len(lines) == len(cut)
    assert all(line.startswith("rollout.quantization=fp8: each of ") for line in lines)


QWEN = Facts(family="qwen2", num_attention_heads=14, num_query_groups=2, head_dim=64, ffn_hidden_size=4864)

FLASH = Facts(
    family="glm4_moe_lite",
    num_attention_heads=20,
    num_query_groups=20,
    head_dim=256,
    ffn_hidden_size=10240,
    mla=replace(MLA, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
)


@pytest.mark.parametrize(
    ("facts", "tp", "dp", "cut"),
    [
        (QWEN, 1, 1, ""),
        (QWEN, 2, 1, "448 rows of queries, 64 rows of keys, 448 columns of o_proj"),
        (replace(QWEN, family="qwen3"), 2, 2, ""),
        (replace(QWEN, output_gate=True), 2, 1, "64 rows of keys, 448 columns of o_proj"),
        (replace(QWEN, num_query_groups=1), 1, 1, "64 rows of keys"),
        (replace(QWEN, num_attention_heads=16, head_dim=128, ffn_hidden_size=4096), 4, 1, ""),
        (FLASH, 2, 1, ""),
        (FLASH, 4, 1, "2240 rows of keys and values"),
        (FLASH, 8, 2, "2240 rows of keys and values"),
        (FLASH, 4, 4, ""),
    ],
)
def test_blocks_in_float8_are_not_cut_in_attention(facts: Facts, tp: int, dp: int, cut: str) -> None:
    """SGLang's Fp8LinearMethod requires complete blocks: Qwen2.5-0.5B has heads of 64, GLM-4.7-Flash has 192 + 256 rows for a head's keys and
    values."""
    sizes = {"tensor_model_parallel_size": tp, "attention_data_parallel_size": dp}
    check_rollout_model(RolloutConfig(**sizes), facts, key="rollout")
    rollout = RolloutConfig(**sizes, quantization="fp8")
    if not cut:
        check_rollout_model(rollout, facts, key="rollout")
        return
    assert lines_of(lambda: check_rollout_model(rollout, facts, key="rollout")) == [
        f"rollout.quantization=fp8: a rank has {cut}, which cuts blocks of quantization_block_size=128,128; change "
        "rollout.tensor_model_parallel_size or leave quantization out"
    ]


def test_shared_experts_that_each_rank_has_as_a_whole_are_not_cut() -> None:
    moe = MoEConfig(256, 8, 2048, shared_ffn_hidden_size=2048)
    facts = Facts(num_attention_heads=128, num_query_groups=128, moe=moe)
    cut = RolloutConfig(tensor_model_parallel_size=32, expert_parallel_size=32, quantization="fp8")
    check_rollout_model(replace(cut, moe_a2a_backend="deepep"), facts)
    (line,) = lines_of(lambda: check_rollout_model(cut, facts))
    assert "each of 32 ranks has 64 of shared_ffn_hidden_size=2048" in line


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [
        ("minimax-m2", 4, ""),
        ("minimax-m2", 8, "each of 8 ranks has 192 of the experts' ffn_hidden_size=1536"),
        ("deepseek-v3", 8, ""),
        ("deepseek-v3", 32, "each of 32 ranks has 64 of the experts' ffn_hidden_size=2048"),
    ],
)
def test_engines_that_load_a_folder_in_float8_do_not_cut_its_blocks(
    train: Callable[..., TrainConfig], evaluation: Callable[..., EvalConfig], model: str, tp: int, words: str
) -> None:
    """This holds for the engines of an evaluation and of references; the policy's engines are sent weights in a type of their own."""
    facts = read_model_config(str(shipped() / "recipes" / "models" / model))
    size = f"tensor_model_parallel_size={tp}"
    pools = "resource_pools={global: {n_gpus_per_node: 4}, far: {n_gpus_per_node: 4}}"
    engine = f"engine: {{tensor_model_parallel_size: {tp}}}"
    taught = train(
        "algorithm.use_kl_in_reward=true",
        pools,
        f"actor_rollout_ref.ref={{model: {{path: teacher}}, resource_pool: far, {engine}}}",
    )

    def cut(config: Any, **models: Any) -> list[str]:
        found = fit_problems(resolve(config), **{"model": None, **models})
        return [line for line in found if "blocks" in line]

    for found, key in (
        (cut(evaluation(f"rollout.{size}"), model=facts), "rollout"),
        (cut(taught, teachers={"ref": facts}), "actor_rollout_ref.ref.engine"),
    ):
        assert bool(found) is bool(words) and all(line.startswith(f"{key}.{size}: ") for line in found)
        assert all("cuts the blocks of 128,128 that the model's folder has" in line for line in found)
        assert not words or any(words in line for line in found)
    assert cut(train(f"actor_rollout_ref.rollout.{size}"), model=facts) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("quantization", "fp8"), ("moe_a2a_backend", "deepep"), ("moe_runner_backend", "deep_gemm")],
)
def test_engines_of_gpt_oss_have_tritons_experts_in_their_own_type(key: str, value: str) -> None:
    check_rollout_model(RolloutConfig(moe_runner_backend="triton"), GPT_OSS)
    lines = lines_of(lambda: check_rollout_model(RolloutConfig(**{key: value}), GPT_OSS, "rollout"))
    assert [line for line in lines if line.startswith(f"rollout.{key}={value}: the weight sync knows")] != []


def test_why_an_engine_does_not_fit() -> None:
    def check() -> None:
        check_rollout_model(
            RolloutConfig(tensor_model_parallel_size=3), Facts(num_query_groups=2), key="rollout"
        )

    assert lines_of(check) == [
        "rollout.tensor_model_parallel_size=3 does not divide num_attention_heads=8 and ffn_hidden_size=64 and neither "
        "divides num_query_groups=2 nor is a multiple of it; possible: 1,2,4,8"
    ]


def test_what_engines_of_sparse_attention_cannot_have() -> None:
    for key, value in (("quantization", "fp8"), ("kv_cache_dtype", "fp8_e4m3")):
        lines = drafting(None, SPARSE, **{key: value})
        assert any(line.startswith(f"rollout.{key}={value}") for line in lines)
    whole = replace(SPARSE, indexer=replace(SPARSE.indexer, interleaved=False), ffn_hidden_size=1024)
    assert drafting(None, whole, quantization="fp8") == []


def drafting(algorithm: str | None, facts: Facts, **keys: Any) -> list[str]:
    rollout = RolloutConfig(speculative=SpeculativeConfig(algorithm=algorithm), **keys)
    try:
        check_rollout_model(rollout, facts, "rollout")
    except ValueError as error:
        return str(error).split("\n  - ")[1:]
    return []


def test_layers_that_draft_are_loaded_from_the_models_folder_as_they_are_there() -> None:
    sizes = {"ffn_hidden_size": 128, "num_mtp_layers": 1}
    assert drafting("ngram", Facts()) == drafting("mtp", Facts(**sizes)) == drafting("eagle3", Facts()) == []
    (line,) = drafting("mtp", Facts())
    assert "algorithm=mtp: the model has 0 layers for further tokens (num_nextn_predict_layers)" in line
    (line,) = drafting("mtp", Facts(family="glm4_moe_lite", **sizes))
    assert "class of this family's own layer fails after loading" in line
    in_float8 = Facts(fp8_block=(128, 128), **sizes)
    assert drafting("mtp", in_float8, quantization="fp8") == []
    (line,) = drafting("mtp", in_float8)
    assert (
        "the engines hold weights in its own type, the model's folder in float8 by blocks of 128,128" in line
    )
    (line,) = drafting("mtp", Facts(scaled_channels=True, **sizes))
    assert "the engines hold weights in its own type, the model's folder in float8 by rows" in line
    (line,) = drafting("mtp", Facts(**sizes), quantization="fp8")
    assert "in float8 by blocks of 128,128, the model's folder in its own type" in line
    (line,) = drafting("eagle3", in_float8, quantization="fp8")
    assert "SGLang would take the draft model's weights for float8" in line
