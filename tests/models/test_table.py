"""The tables' facts beyond the tensors' places; tests/checkpoints/hf/test_round_trips.py compares the places with both sides."""

from math import prod

import pytest

from megarl.layout.grid import ParallelLayout
from megarl.models import (
    FAMILIES,
    SGLangPlace,
    keeps_float32,
    logical_tensors,
    mtp_copies,
    sglang_padding,
)
from megarl.models.fields import Fields
from megarl.weight_sync.layouts import EngineLayout, megatron_layout, sglang_layout
from tests.models.published import CONFIGS


def published(name):
    return FAMILIES[CONFIGS[name]["model_type"]](Fields(CONFIGS[name], name))


def elements(layout):
    """Logical tensor -> the number of its elements that all shards hold together."""
    found = {}
    for shard in layout.shards:
        for piece in shard.pieces:
            found[piece.tensor] = found.get(piece.tensor, 0) + piece.box.numel
    return found


def test_deepseek_v3_at_its_own_size():
    """Over 512 training ranks, and over 32 ranks of an engine: each expert is held once; other weights are cut or repeated evenly."""
    config = published("DeepSeek-V3")
    shapes = logical_tensors(config)
    training = ParallelLayout(world=512, tp=8, pp=16, ep=8, sp=True, first_layers=3, last_layers=2)
    megatron = megatron_layout(config, training)
    assert (
        len(megatron.shards) == 16 * 8 + 16 * 8
    )  # by stage and tensor parallel rank; by stage and expert rank
    engine = sglang_layout(config, EngineLayout(tp=32, ep=32))
    for layout, tp in ((megatron, 8), (engine, 32)):
        found = elements(layout)
        assert found.keys() == shapes.keys()
        for name, shape in shapes.items():
            if ".experts." in name or name in ("lm_head.weight", "model.embed_tokens.weight"):
                assert found[name] == prod(shape), name
            else:
                assert found[name] in (prod(shape), tp * prod(shape)), name
    cut = ("q_b_proj", "kv_b_proj", "o_proj", "shared_experts", "layers.0.mlp")
    assert all(
        found[name] == prod(shape) for name, shape in shapes.items() if any(part in name for part in cut)
    )


@pytest.mark.parametrize(
    ("place", "rows"),
    [
        # 100 rows are padded to 128
        (SGLangPlace(tp=1), {"model.embed_tokens.weight": 28, "lm_head.weight": 28}),
        (SGLangPlace(tp=2, tp_rank=0), {}),
        (SGLangPlace(tp=2, tp_rank=1), {"model.embed_tokens.weight": 28, "lm_head.weight": 28}),
        (SGLangPlace(tp=8, tp_rank=7), {"model.embed_tokens.weight": 16, "lm_head.weight": 16}),
        # the ranks of one attention group share out the embedding, all ranks share out the head
        (SGLangPlace(tp=4, tp_rank=1, dp=2), {"model.embed_tokens.weight": 28}),
        (SGLangPlace(tp=4, tp_rank=2, dp=2), {}),
        (SGLangPlace(tp=4, tp_rank=3, dp=2), {"model.embed_tokens.weight": 28, "lm_head.weight": 28}),
        # 128 rows are not divisible by 3, 192 rows are
        (SGLangPlace(tp=3, tp_rank=1), {"model.embed_tokens.weight": 28, "lm_head.weight": 28}),
        (SGLangPlace(tp=3, tp_rank=2), {"model.embed_tokens.weight": 64, "lm_head.weight": 64}),
    ],
)
def test_padding_of_the_vocabulary_in_sglang(place, rows):
    hf = {**CONFIGS["Qwen3-8B"], "vocab_size": 100}
    config = FAMILIES["qwen3"](Fields(hf, ""))
    assert sglang_padding(config, place) == {name: count * 4096 for name, count in rows.items()}


def test_what_stays_float32():
    names = logical_tensors(published("DeepSeek-V3"))
    assert {name for name in names if keeps_float32(name)} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(3, 61)
    }
    assert not any(keeps_float32(name) for name in logical_tensors(published("Qwen3-30B-A3B")))
    more = {name for name in logical_tensors(published("DeepSeek-V3.2")) if keeps_float32(name)}
    assert {name for name in more if ".indexer." in name} == {
        f"model.layers.{layer}.self_attn.indexer.k_norm.{kind}"
        for layer in range(61)
        for kind in ("weight", "bias")
    }


def test_what_prediction_layers_repeat():
    assert mtp_copies(published("GLM-4.5-Air")) == {
        "model.layers.46.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.46.shared_head.head.weight": "lm_head.weight",
    }
    assert mtp_copies(published("Kimi-K2-Instruct")) == {}


@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.5-Air"])
def test_shared_experts_are_complete_on_each_rank_where_deepep_sends_tokens(name):
    """SGLang 0.5.21 then builds them for a single tensor parallel rank (models/deepseek_v2.py, glm4_moe.py)."""
    config = published(name)
    cut = elements(sglang_layout(config, EngineLayout(tp=8, ep=8)))
    whole = elements(sglang_layout(config, EngineLayout(tp=8, ep=8, whole_shared=True)))
    shared = {tensor for tensor in cut if "shared_experts" in tensor}
    assert len(shared) > 100
    assert {tensor: 8 * count for tensor, count in cut.items() if tensor in shared} == {
        tensor: whole[tensor] for tensor in shared
    }
    assert all(whole[tensor] == count for tensor, count in cut.items() if tensor not in shared)
