"""What a rank of an SGLang engine holds, in bytes: its weights by the weight table, and the cache of a token."""

import torch

from megarl.config.lora_section import LoraConfig
from megarl.hybrid_engine.layouts import EngineLayout, sglang_layout
from megarl.hybrid_engine.quantize import Block, dtype_in_fp8, with_scales
from megarl.models import (
    ModelConfig,
    logical_tensors,
    sglang_keeps_float32,
    sglang_padding,
    sglang_pieces,
)
from megarl.models.lora import adapted_weights
from megarl.models.sglang_lora import sglang_adapters


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
        copies = dtype.itemsize if config.mla is not None and ".kv_b_proj.weight" in piece.tensor else 0
        total += piece.box.numel * (kind.itemsize + copies)
    return total + dtype.itemsize * sum(sglang_padding(config, engines.place(0)).values())


def engine_adapter_bytes(
    config: ModelConfig, engines: EngineLayout, lora: LoraConfig, dtype: torch.dtype
) -> int:
    """Adapters that an engine's first rank serves beside its weights."""
    pieces = sglang_pieces(config, engines.place(0))
    found = sglang_adapters(pieces, adapted_weights(config, lora), lora.rank)
    return dtype.itemsize * sum(piece.box.numel for piece in found)


def cache_bytes(config: ModelConfig, engines: EngineLayout, dtype: torch.dtype) -> int:
    """Of one token in an engine's rank: keys and values of its heads, or the latent ones, which every rank has."""
    if config.mla is not None:
        return config.num_layers * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * dtype.itemsize
    heads = max(1, config.num_query_groups // (engines.tp // engines.dp))
    return config.num_layers * 2 * heads * config.head_dim * dtype.itemsize
