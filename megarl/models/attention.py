"""The tensors of attention, grouped-query (GQA) and multi-head latent (MLA), and their places in Megatron and SGLang.

Grouped-query attention:

- Megatron (Transformer Engine's parameter names): `linear_qkv` interleaves by query group
  [q heads of the group | k | v]; the norm before it is fused with it.
- SGLang 0.5.21: `qkv_proj` is [q shard | k shard | v shard], key/value heads replicated where the ranks exceed them.

Multi-head latent attention. Queries and keys rotate pairs of neighbouring dimensions in Hugging Face, Megatron and SGLang alike, so
that no rows change their order.

- Megatron (Transformer Engine's parameter names): the norms of the latent queries, keys and values are fused with the
  projections that follow; the norm before attention is a module of its own.
- SGLang 0.5.21: `fused_qkv_a_proj_with_mqa` is [queries | keys, values and the rotary key], complete on every rank.
"""

from megarl.layout.boxes import Box, Piece
from megarl.models.config import ModelConfig
from megarl.models.shards import (
    Block,
    MegatronPlace,
    SGLangPlace,
    Shapes,
    column_shard,
    replicated,
    row_shard,
)

_QK_NORMS = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}  # Hugging Face and SGLang -> Megatron


def gqa_tensors(config: ModelConfig, name: str) -> Shapes:
    """The tensors of the layer `name` ("model.layers.3.")."""
    hidden, dim, attention = config.hidden_size, config.head_dim, name + "self_attn."
    queries, keys = config.num_attention_heads * dim, config.num_query_groups * dim
    shapes: Shapes = {name + "input_layernorm.weight": (hidden,)}
    for projection, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"{attention}{projection}_proj.weight"] = (rows, hidden)
        if config.qkv_bias:
            shapes[f"{attention}{projection}_proj.bias"] = (rows,)
    shapes[attention + "o_proj.weight"] = (hidden, queries)
    if config.qk_norm:
        shapes |= {f"{attention}{norm}.weight": (dim,) for norm in _QK_NORMS}
    return shapes


def _qkv_kinds(config: ModelConfig) -> tuple[str, ...]:
    return ("weight", "bias") if config.qkv_bias else ("weight",)


def gqa_megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    shapes, attention, target = gqa_tensors(config, name), name + "self_attn.", local + "self_attention."
    norm, output = name + "input_layernorm.weight", attention + "o_proj.weight"
    pieces = [replicated(norm, target + "linear_qkv.layer_norm_weight", shapes[norm])]
    for kind in _qkv_kinds(config):
        pieces += _interleaved_qkv(config, shapes, place, attention, target + "linear_qkv.", kind)
    if config.qk_norm:
        for norm, ours in _QK_NORMS.items():
            tensor = f"{attention}{norm}.weight"
            pieces.append(replicated(tensor, f"{target}{ours}.weight", shapes[tensor]))
    pieces.append(
        column_shard(output, target + "linear_proj.weight", shapes[output], place.tp, place.tp_rank)
    )
    return pieces


def _interleaved_qkv(
    config: ModelConfig, shapes: Shapes, place: MegatronPlace, name: str, local: str, kind: str
) -> list[Piece]:
    """Megatron's order: for each query group of the rank its query heads, its key head, its value head."""
    dim, groups = config.head_dim, config.num_query_groups // place.tp
    heads = config.num_attention_heads // config.num_query_groups
    pieces, at = [], 0
    for group in range(place.tp_rank * groups, (place.tp_rank + 1) * groups):
        for projection, rows in (("q", heads * dim), ("k", dim), ("v", dim)):
            tensor = f"{name}{projection}_proj.{kind}"
            shape = shapes[tensor]
            box = Box.rows(group * rows, rows, shape)
            pieces.append(Piece(tensor, box, local + kind, Box.rows(at, rows, shape)))
            at += rows
    return pieces


def gqa_sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    shapes, tp, rank = gqa_tensors(config, name), place.attention_tp, place.attention_tp_rank
    attention, norm = name + "self_attn.", name + "input_layernorm.weight"
    output = attention + "o_proj.weight"
    pieces = [replicated(norm, norm, shapes[norm])]
    replicas = max(1, tp // config.num_query_groups)  # ranks that share a key/value head
    for kind in _qkv_kinds(config):
        local, at = f"{attention}qkv_proj.{kind}", 0
        for projection, shards in (("q", tp), ("k", tp // replicas), ("v", tp // replicas)):
            tensor = f"{attention}{projection}_proj.{kind}"
            shape = shapes[tensor]
            pieces.append(row_shard(tensor, local, shape, shards, rank * shards // tp, at=at))
            at += shape[0] // shards
    for norm in _QK_NORMS if config.qk_norm else ():
        tensor = f"{attention}{norm}.weight"
        pieces.append(replicated(tensor, tensor, shapes[tensor]))
    pieces.append(column_shard(output, output, shapes[output], tp, rank))
    return pieces


GQA = Block(gqa_tensors, gqa_megatron, gqa_sglang)


def mla_tensors(config: ModelConfig, name: str) -> Shapes:
    """The tensors of the layer `name` ("model.layers.3.")."""
    mla, heads, hidden = config.mla, config.num_attention_heads, config.hidden_size
    assert mla is not None
    attention, queries = name + "self_attn.", heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    shapes: Shapes = {name + "input_layernorm.weight": (hidden,)}
    if mla.q_lora_rank is None:
        shapes[attention + "q_proj.weight"] = (queries, hidden)
    else:
        shapes[attention + "q_a_proj.weight"] = (mla.q_lora_rank, hidden)
        shapes[attention + "q_a_layernorm.weight"] = (mla.q_lora_rank,)
        shapes[attention + "q_b_proj.weight"] = (queries, mla.q_lora_rank)
    values = heads * mla.v_head_dim
    shapes[attention + "kv_a_proj_with_mqa.weight"] = (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
    shapes[attention + "kv_a_layernorm.weight"] = (mla.kv_lora_rank,)
    shapes[attention + "kv_b_proj.weight"] = (heads * mla.qk_nope_head_dim + values, mla.kv_lora_rank)
    shapes[attention + "o_proj.weight"] = (hidden, values)
    return shapes


# Hugging Face -> Megatron: tensors that every tensor parallel rank holds in full, and tensors that are cut by heads
_MLA_REPLICATED = {
    "q_a_proj": "linear_q_down_proj.weight",
    "q_a_layernorm": "linear_q_up_proj.layer_norm_weight",
    "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
    "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight",
}
_MLA_ROWS = {
    "q_proj": "linear_q_proj.weight",
    "q_b_proj": "linear_q_up_proj.weight",
    "kv_b_proj": "linear_kv_up_proj.weight",
}


def mla_megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    attention, target = name + "self_attn.", local + "self_attention."
    pieces = []
    for tensor, shape in mla_tensors(config, name).items():
        part = tensor.removeprefix(attention).removesuffix(".weight")
        if part in _MLA_ROWS:
            pieces.append(row_shard(tensor, target + _MLA_ROWS[part], shape, place.tp, place.tp_rank))
        elif part in _MLA_REPLICATED:
            pieces.append(replicated(tensor, target + _MLA_REPLICATED[part], shape))
        elif part == "o_proj":
            pieces.append(column_shard(tensor, target + "linear_proj.weight", shape, place.tp, place.tp_rank))
        else:
            pieces.append(replicated(tensor, local + "input_layernorm.weight", shape))
    return pieces


def mla_sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    assert config.mla is not None
    attention, fused_rows = name + "self_attn.", 0
    pieces = []
    for tensor, shape in mla_tensors(config, name).items():
        part = tensor.removeprefix(attention).removesuffix(".weight")
        if part in _MLA_ROWS:
            pieces.append(row_shard(tensor, tensor, shape, place.attention_tp, place.attention_tp_rank))
        elif part == "o_proj":
            pieces.append(column_shard(tensor, tensor, shape, place.attention_tp, place.attention_tp_rank))
        elif part in ("q_a_proj", "kv_a_proj_with_mqa") and config.mla.q_lora_rank is not None:
            fused = attention + "fused_qkv_a_proj_with_mqa.weight"
            pieces.append(row_shard(tensor, fused, shape, 1, 0, at=fused_rows))
            fused_rows += shape[0]
        else:
            pieces.append(replicated(tensor, tensor, shape))
    return pieces


MLA = Block(mla_tensors, mla_megatron, mla_sglang)
