"""Grouped-query attention: its tensors, and where they lie.

- Megatron (Transformer Engine's parameter names): `linear_qkv` interleaves by query group
  [q heads of the group | k | v]; the norm before it is fused with it.
- SGLang 0.5.21: `qkv_proj` is [q shard | k shard | v shard], key/value heads replicated where the ranks exceed them.
"""

from megarl.layout.boxes import Box, Piece
from megarl.models.config import ModelConfig
from megarl.models.shards import MegatronPlace, SGLangPlace, Shapes, column_shard, row_shard, whole

_QK_NORMS = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}  # Hugging Face and SGLang -> Megatron


def logical(config: ModelConfig, name: str) -> Shapes:
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


def _kinds(config: ModelConfig) -> tuple[str, ...]:
    return ("weight", "bias") if config.qkv_bias else ("weight",)


def megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    shapes, attention, target = logical(config, name), name + "self_attn.", local + "self_attention."
    norm, output = name + "input_layernorm.weight", attention + "o_proj.weight"
    pieces = [whole(norm, target + "linear_qkv.layer_norm_weight", shapes[norm])]
    for kind in _kinds(config):
        pieces += _interleaved_qkv(config, shapes, place, attention, target + "linear_qkv.", kind)
    if config.qk_norm:
        for norm, ours in _QK_NORMS.items():
            tensor = f"{attention}{norm}.weight"
            pieces.append(whole(tensor, f"{target}{ours}.weight", shapes[tensor]))
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


def sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    shapes, tp, rank = logical(config, name), place.attention_tp, place.attention_tp_rank
    attention, norm = name + "self_attn.", name + "input_layernorm.weight"
    output = attention + "o_proj.weight"
    pieces = [whole(norm, norm, shapes[norm])]
    replicas = max(1, tp // config.num_query_groups)  # ranks that share a key/value head
    for kind in _kinds(config):
        local, at = f"{attention}qkv_proj.{kind}", 0
        for projection, shards in (("q", tp), ("k", tp // replicas), ("v", tp // replicas)):
            tensor = f"{attention}{projection}_proj.{kind}"
            shape = shapes[tensor]
            pieces.append(row_shard(tensor, local, shape, shards, rank * shards // tp, at=at))
            at += shape[0] // shards
    for norm in _QK_NORMS if config.qk_norm else ():
        tensor = f"{attention}{norm}.weight"
        pieces.append(whole(tensor, tensor, shapes[tensor]))
    pieces.append(column_shard(output, output, shapes[output], tp, rank))
    return pieces
