"""Multi-head latent attention: its tensors, and where they lie.

Queries and keys rotate pairs of neighbouring dimensions in Hugging Face, Megatron and SGLang alike, so that no rows change
their order.

- Megatron (Transformer Engine's parameter names): the norms of the latent queries, keys and values are fused with the
  projections that follow; the norm before attention is a module of its own.
- SGLang 0.5.21: `fused_qkv_a_proj_with_mqa` is [queries | keys, values and the rotary key], whole on every rank.
"""

from megarl.layout.boxes import Piece
from megarl.models.config import ModelConfig
from megarl.models.shards import MegatronPlace, SGLangPlace, Shapes, column_shard, row_shard, whole


def logical(config: ModelConfig, name: str) -> Shapes:
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


# Hugging Face -> Megatron: what every tensor parallel rank has whole, and what is cut by heads
_WHOLE = {
    "q_a_proj": "linear_q_down_proj.weight",
    "q_a_layernorm": "linear_q_up_proj.layer_norm_weight",
    "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
    "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight",
}
_ROWS = {
    "q_proj": "linear_q_proj.weight",
    "q_b_proj": "linear_q_up_proj.weight",
    "kv_b_proj": "linear_kv_up_proj.weight",
}


def megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    attention, target = name + "self_attn.", local + "self_attention."
    pieces = []
    for tensor, shape in logical(config, name).items():
        part = tensor.removeprefix(attention).removesuffix(".weight")
        if part in _ROWS:
            pieces.append(row_shard(tensor, target + _ROWS[part], shape, place.tp, place.tp_rank))
        elif part in _WHOLE:
            pieces.append(whole(tensor, target + _WHOLE[part], shape))
        elif part == "o_proj":
            pieces.append(column_shard(tensor, target + "linear_proj.weight", shape, place.tp, place.tp_rank))
        else:
            pieces.append(whole(tensor, local + "input_layernorm.weight", shape))
    return pieces


def sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    assert config.mla is not None
    attention, fused_rows = name + "self_attn.", 0
    pieces = []
    for tensor, shape in logical(config, name).items():
        part = tensor.removeprefix(attention).removesuffix(".weight")
        if part in _ROWS:
            pieces.append(row_shard(tensor, tensor, shape, place.attention_tp, place.attention_tp_rank))
        elif part == "o_proj":
            pieces.append(column_shard(tensor, tensor, shape, place.attention_tp, place.attention_tp_rank))
        elif part in ("q_a_proj", "kv_a_proj_with_mqa") and config.mla.q_lora_rank is not None:
            fused = attention + "fused_qkv_a_proj_with_mqa.weight"
            pieces.append(row_shard(tensor, fused, shape, 1, 0, at=fused_rows))
            fused_rows += shape[0]
        else:
            pieces.append(whole(tensor, tensor, shape))
    return pieces
