"""What a rank of an SGLang engine holds, in bytes: its weights by the weight table, and the cache of its tokens.

The sizes of what is neither are those of SGLang 0.5.21.
"""

import torch

from megarl.config.schema.lora import LoraConfig
from megarl.models import (
    ModelConfig,
    logical_tensors,
    sglang_keeps_float32,
    sglang_padding,
    sglang_pieces,
)
from megarl.models.lora import adapted_weights
from megarl.models.sglang_lora import sglang_adapter_padding, sglang_adapters
from megarl.weight_sync.layouts import EngineLayout, sglang_layout
from megarl.weight_sync.quantize import Block, dtype_in_fp8, with_scales

_ROTARY_MARGIN = 256  # tokens that the rotary table has more than the context
_ROTARY_ALIGN = 128  # of which it has a multiple
_TABLE_MARGIN = 4  # tokens that a request has more than the context
_PADDING_TOKENS = 1  # of the cache, where what is padded is written: a page


def engine_weight_bytes(
    config: ModelConfig, engines: EngineLayout, dtype: torch.dtype, fp8_block: Block | None = None
) -> int:
    """Parameters of an engine's first rank, which has as much as any.

    Of latent attention SGLang 0.5.21 keeps kv_b_proj a second time, as the two factors that it multiplies into queries and
    outputs.
    """
    layout = sglang_layout(config, EngineLayout(engines.tp, engines.ep, engines.dp))
    if fp8_block is not None:
        layout = with_scales(layout, logical_tensors(config), fp8_block)
    total = 0
    for piece in layout.pieces(0):
        kind = dtype if fp8_block is None else dtype_in_fp8(piece.tensor, dtype)
        kind = torch.float32 if sglang_keeps_float32(config, piece.tensor) else kind
        copies = (
            dtype.itemsize if config.mla is not None and piece.tensor.endswith(".kv_b_proj.weight") else 0
        )
        total += piece.box.numel * (kind.itemsize + copies)
    return total + dtype.itemsize * sum(sglang_padding(config, engines.place(0)).values())


def engine_adapter_bytes(
    config: ModelConfig, engines: EngineLayout, lora: LoraConfig, dtype: torch.dtype
) -> int:
    """Adapters that an engine's first rank serves beside its weights, of all layers of the kinds that have any."""
    pieces, weights = sglang_pieces(config, engines.place(0)), adapted_weights(config, lora)
    found = sum(piece.box.numel for piece in sglang_adapters(pieces, weights, lora.rank))
    padding = sglang_adapter_padding(pieces, weights, lora.rank)
    return dtype.itemsize * (found + sum(padding.values()))


def rotary_bytes(config: ModelConfig, context: int) -> int:
    """The table of cosines and sines, which all layers share, and which is released with the weights; in float32, as on GPUs.

    Args:
        context: the most tokens of a request.
    """
    scaling = config.rope_scaling or {}
    tokens = config.max_position_embeddings
    if scaling.get("rope_type") == "yarn":
        tokens = round(scaling["original_max_position_embeddings"] * scaling["factor"])
    tokens = max(tokens, -(-(context + _ROTARY_MARGIN) // _ROTARY_ALIGN) * _ROTARY_ALIGN)
    width = config.head_dim * config.rotary_percent if config.mla is None else config.mla.qk_rope_head_dim
    return tokens * int(width) * torch.float32.itemsize


def cache_bytes(
    config: ModelConfig, engines: EngineLayout, dtype: torch.dtype, tokens: int, requests: int, context: int
) -> int:
    """The cache of `tokens` in an engine's rank, and the table of where in it the tokens of each request are.

    Args:
        requests: that run at once. context: the most tokens of each.
    """
    table = torch.int32.itemsize * (requests + 1) * (context + _TABLE_MARGIN)
    return (tokens + _PADDING_TOKENS) * token_bytes(config, engines, dtype) + table


def token_bytes(config: ModelConfig, engines: EngineLayout, dtype: torch.dtype) -> int:
    """Of one token in an engine's rank: keys and values of its heads, or the latent ones, which every rank has."""
    if config.mla is not None:
        return config.num_layers * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * dtype.itemsize
    heads = max(1, config.num_query_groups // (engines.tp // engines.dp))
    return config.num_layers * 2 * heads * config.head_dim * dtype.itemsize
