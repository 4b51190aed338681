"""The model that is built on each rank: names, shapes, layers, heads and initial values."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megarl import platform
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.megatron.build import build_model, local_parameters, unwrap, wrap_for_training
from megarl.megatron.parallel import coords, init_parallel
from megarl.megatron.transformer_config import check_layout
from megarl.models import ModelConfig, padded_vocab_size
from megarl.models.config import MLAConfig, MoEConfig
from megarl.weight_sync.layouts import megatron_layout
from tests.ranks import RankPool

CONFIG = ModelConfig(
    family="qwen2",
    architecture="Qwen2ForCausalLM",
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,  # not hidden_size / heads
    ffn_hidden_size=48,
    vocab_size=300,
    norm_epsilon=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    qkv_bias=True,
    qk_norm=False,
    tie_word_embeddings=False,
    max_position_embeddings=128,
    dtype="float32",
    hf={},
)


def _shapes_and_layers(
    rank: int, world: int, config: ModelConfig, sizes: dict[str, Any], head: str
) -> tuple[dict[str, tuple[int, ...]], list[list[int]], bool]:
    layout = ParallelLayout(world=world, **sizes)
    init_parallel(layout, rank, world)
    chunks = build_model(config, layout, head=head, dtype=torch.float32)
    if head == "value" and coords().pp == layout.pp - 1:
        assert chunks[-1].output_layer is None
    shapes = {name: tuple(tensor.shape) for name, tensor in local_parameters(chunks).items()}
    layers = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks]
    before = {name: tensor.data_ptr() for name, tensor in local_parameters(chunks).items()}
    wrapped = wrap_for_training(chunks)
    same_names = set(local_parameters(wrapped)) == set(before)
    return shapes, layers, same_names and unwrap(wrapped) == chunks == unwrap(chunks)


LAYOUTS = [
    (1, {}),
    (2, {"tp": 2, "sp": True}),
    (2, {"pp": 2, "vpp": 2}),
    (4, {"tp": 2, "pp": 2}),
    (4, {"pp": 4}),
]


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("world", "sizes"), LAYOUTS)
def test_parameters_are_those_of_the_weight_table(
    ranks: RankPool, world: int, sizes: dict[str, Any], tied: bool, head: str
) -> None:
    _check_against_table(ranks, replace(CONFIG, tie_word_embeddings=tied), world, sizes, head)


def _check_against_table(
    ranks: RankPool, config: ModelConfig, world: int, sizes: dict[str, Any], head: str
) -> None:
    layout = ParallelLayout(world=world, **sizes)
    for rank, result in enumerate(ranks.run(_shapes_and_layers, config, sizes, head, world=world)):
        shapes, layers, unwraps = result
        pp_rank = rank // (world // layout.pp)
        assert layers == layers_of(layout, config.num_layers, pp_rank)
        assert unwraps
        pieces = megatron_layout(config, layout, head).pieces(rank)
        assert {piece.local for piece in pieces} == set(shapes)
        filled = dict.fromkeys(shapes, 0)
        for piece in pieces:
            size = torch.Size(piece.local_box.size).numel()
            filled[piece.local] += size
        padding = {}
        for name, shape in shapes.items():
            if filled[name] != torch.Size(shape).numel():
                padding[name] = shape
        # Only the vocabulary is padded: 300 rows to 384 (one rank) or 512 (two).
        rows = padded_vocab_size(config, layout.tp) // layout.tp
        for name, shape in padding.items():
            assert "embedding" in name or "output_layer" in name
            assert shape == (rows, config.hidden_size)


EXPERTS = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=24)
SIGMOID_EXPERTS = replace(
    EXPERTS, shared_ffn_hidden_size=40, dense_layers=(0,), scoring="sigmoid", expert_bias=True
)
LATENT = MLAConfig(q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=10)
KINDS = {
    "qk_norm": replace(CONFIG, qk_norm=True),
    "experts": replace(CONFIG, qk_norm=True, moe=EXPERTS),
    "shared_experts": replace(CONFIG, moe=SIGMOID_EXPERTS),
    "latent": replace(CONFIG, qkv_bias=False, head_dim=24, mla=LATENT, moe=SIGMOID_EXPERTS),
    "latent_direct": replace(CONFIG, qkv_bias=False, head_dim=24, mla=replace(LATENT, q_lora_rank=None)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_parameters_of_every_kind_are_those_of_the_weight_table(
    ranks: RankPool, kind: str, head: str
) -> None:
    config = KINDS[kind]
    sizes: dict[str, Any] = {"tp": 2, "sp": True, "pp": 2, "first_layers": 3}
    if config.moe is not None:
        sizes |= {"ep": 1, "etp": 2} if head == "value" else {"ep": 2}
    _check_against_table(ranks, config, 4, sizes, head)


def _start(
    rank: int, world: int, sizes: dict[str, Any], head: str, seed: int
) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    layout = ParallelLayout(world=world, **sizes)
    init_parallel(layout, rank, world)
    config = replace(CONFIG, tie_word_embeddings=True)
    chunks = build_model(config, layout, head=head, dtype=torch.float32, seed=seed)
    tensors = {name: tensor.clone() for name, tensor in local_parameters(chunks).items()}
    return tensors, layers_of(layout, config.num_layers, coords().pp)


def test_the_value_head_starts_equal_in_every_layout(ranks: RankPool) -> None:
    heads = []
    for world, sizes in [(1, {}), (4, {"tp": 2, "pp": 2})]:
        for tensors, _ in ranks.run(_start, sizes, "value", 7, world=world):
            heads += [tensor for name, tensor in tensors.items() if name.endswith("value_head.weight")]
    assert len(heads) == 3  # the single rank, and the two of the last stage
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert 0.005 < heads[0].std() < 0.04
    other = ranks.run(_start, {}, "value", 8, world=1)[0][0]["0:value_head.weight"]
    assert not torch.equal(other, heads[0])


def test_replicas_start_equal_and_shards_differ(ranks: RankPool) -> None:
    """Four ranks, tp 2 and pp 2: the two stages' tied embeddings are replicas; tensor parallel ranks have different shards."""
    (first, _), (shard, _), (last, _), _ = ranks.run(_start, {"tp": 2, "pp": 2, "sp": True}, "lm", 1)
    embedding, output = "0:embedding.word_embeddings.weight", "0:output_layer.weight"
    assert torch.equal(first[embedding], last[output])
    assert not torch.equal(first[embedding], shard[embedding])
    qkv = "0:decoder.layers.0.self_attention.linear_qkv."
    assert not torch.equal(first[qkv + "weight"], shard[qkv + "weight"])
    assert not torch.equal(first[qkv + "weight"], last[qkv + "weight"])  # they are different layers
    assert torch.equal(first[qkv + "layer_norm_weight"], torch.ones(32))
    assert torch.equal(first[qkv + "bias"], torch.zeros_like(first[qkv + "bias"]))
    assert 0.018 < first[qkv + "weight"].std() < 0.022


def _start_of_experts(rank: int, world: int, sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    layout = ParallelLayout(world=world, **sizes)
    init_parallel(layout, rank, world)
    chunks = build_model(KINDS["experts"], layout, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in local_parameters(chunks).items()}


def test_replicas_of_experts_start_equal_and_other_experts_differ(ranks: RankPool) -> None:
    """Four ranks, two for each expert: ranks 0 and 2, and ranks 1 and 3."""
    first, other, replica, _ = ranks.run(_start_of_experts, {"tp": 2, "sp": True, "ep": 2})
    mlp = "0:decoder.layers.0.mlp."
    expert = mlp + "experts.linear_fc1.weight0"
    assert torch.equal(first[expert], replica[expert])
    assert not torch.equal(first[expert], other[expert])
    assert not torch.equal(first[expert], first[mlp + "experts.linear_fc1.weight1"])
    assert torch.equal(first[mlp + "router.weight"], other[mlp + "router.weight"])
    assert 0.018 < first[expert].std() < 0.022


def _frozen(rank: int, world: int) -> tuple[bool, bool]:
    init_parallel(ParallelLayout(world=world), rank, world)
    (model,) = build_model(CONFIG, ParallelLayout(world=world), dtype=torch.bfloat16, trainable=False)
    parameters = list(model.parameters())
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    return model.training, any(parameter.requires_grad for parameter in parameters)


def test_a_model_that_is_not_trained_has_no_gradients(ranks: RankPool) -> None:
    assert ranks.run(_frozen, world=1) == [(False, False)]


def _inverse_frequencies(rank: int, world: int, config: ModelConfig) -> torch.Tensor:
    init_parallel(ParallelLayout(world=world), rank, world)
    (model,) = build_model(config, ParallelLayout(world=world), dtype=torch.float32)
    return model.rotary_pos_emb.inv_freq


@pytest.mark.parametrize("factor", [None, 8.0, 32.0])
def test_rotary_frequencies_are_hugging_faces(ranks: RankPool, factor: float | None) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500000.0}
    if factor is not None:
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    hf = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )
    scaling = None if factor is None else {"rope_type": "llama3", "factor": factor}
    config = replace(CONFIG, rope_theta=500000.0, rope_scaling=scaling)
    frequencies = ranks.run(_inverse_frequencies, config, world=1)[0]
    torch.testing.assert_close(frequencies, LlamaRotaryEmbedding(hf).inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_query_groups": 1}, r"key/value heads \(1\).*tensor_model_parallel_size=2"),
        ({"num_attention_heads": 3}, r"attention heads \(3\).*tensor_model_parallel_size=2"),
        ({"ffn_hidden_size": 47}, r"MLP width \(47\).*tensor_model_parallel_size=2"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_by_name(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(replace(CONFIG, **changes), ParallelLayout(world=2, tp=2), dtype=torch.float32)


SIX = replace(EXPERTS, num_experts=6, shared_ffn_hidden_size=10)
SIGMOID = replace(SIX, scoring="sigmoid", expert_bias=True)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, {"ep": 2}, r"expert_model_parallel_size=2 .* must be 1: the model has no experts"),
        ({"moe": SIX}, {"ep": 4}, r"number of experts \(6\).*expert_model_parallel_size=4"),
        ({"moe": replace(SIX, ffn_hidden_size=25)}, {"etp": 2}, r"experts' width \(25\).*_tensor_.*=2"),
        ({"moe": SIX}, {"tp": 4, "sp": True}, r"shared experts' width \(10\).*=4"),
        (
            {"moe": SIX},
            {"tp": 2},
            r"experts and .*tensor_model_parallel_size=2 needs .*sequence_parallel",
        ),
        ({"mla": LATENT}, {"tp": 2}, r"latent attention and .*_parallel_size=2 needs .*sequence_parallel"),
    ],
)
def test_a_layout_that_experts_or_latent_attention_do_not_fit_is_refused_by_name(
    changes: dict[str, Any], sizes: dict[str, Any], message: str
) -> None:
    config = replace(CONFIG, num_query_groups=4, **changes)
    with pytest.raises(ValueError, match=message):
        build_model(config, ParallelLayout(world=4, **sizes), dtype=torch.float32)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe": replace(SIX, scoring="relu")}, "'relu'.*softmax and sigmoid"),
        (
            {"moe": replace(SIGMOID, norm_topk_prob=False)},
            "norm_topk_prob=False with sigmoid.*num_experts_per_tok=2",
        ),
        ({"moe": replace(SIX, top_k=1)}, "norm_topk_prob=True with softmax.*num_experts_per_tok=1"),
        ({"moe": replace(SIX, expert_bias=True)}, "softmax.*expert bias"),
        ({"moe": replace(SIGMOID, num_groups=4, topk_group=1)}, r"6 experts.*n_group=4"),
        ({"moe": replace(SIGMOID, num_groups=3, topk_group=2)}, "num_experts_per_tok=2 with topk_group=2"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim=1.0 but no mscale"),
        ({"rope_scaling": YARN, "rotary_percent": 0.5}, "partial rotary factor of 0.5"),
    ],
)
def test_what_megatron_computes_otherwise_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(replace(CONFIG, **changes), ParallelLayout(world=1), dtype=torch.float32)


def test_context_parallelism_on_a_gpu_needs_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_cuda", lambda: True)
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", False)
    check_layout(CONFIG, ParallelLayout(world=2, tp=2))
    with pytest.raises(ValueError, match="context_parallel_size=2 needs Transformer Engine on GPUs"):
        check_layout(CONFIG, ParallelLayout(world=2, cp=2))
