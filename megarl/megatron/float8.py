"""Training in float8: Megatron's settings for it, what it needs, and the float8 copies of weights that layers keep.

Within a layer's context (`get_fp8_context` of megatron-core 0.19.2, the same in training and evaluation) Transformer Engine quantises the
input of each linear layer, its weight and, backward, the gradient of its output. Weights stay in their own type: the first micro-batch of a
pass makes a float8 copy of each, which its other micro-batches use.
"""

from importlib import import_module
from typing import Any

import torch

from megarl.config.schema.models import MegatronConfig
from megarl.megatron.transformer_config import has_transformer_engine


def float8_settings(megatron: MegatronConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig; none without `megatron.fp8`.

    Raises:
        ValueError: as `check_float8`.
    """
    if megatron.fp8 is None:
        return {}
    check_float8(f"megatron.fp8={megatron.fp8}")
    start, end = megatron.num_layers_at_start_in_bf16, megatron.num_layers_at_end_in_bf16
    return {
        "fp8": megatron.fp8,
        "fp8_recipe": megatron.fp8_recipe,
        "first_last_layers_bf16": bool(start or end),
        "num_layers_at_start_in_bf16": start,
        "num_layers_at_end_in_bf16": end,
    }


def check_float8(given: str) -> None:
    """Refuse products in float8 where this machine has none.

    Raises:
        ValueError: there is no CUDA device, no Transformer Engine, or the device or its CUDA has no products of such blocks; begins with
            `given`.
    """
    if not has_transformer_engine():
        raise ValueError(
            f"{given} needs GPUs with Transformer Engine (requirements/gpu.txt), whose layers compute in float8; megarl's own layers in torch, "
            "which are used here, do not: set it to null"
        )
    known, reason = import_module("transformer_engine.pytorch.quantization").check_fp8_block_scaling_support()
    if not known:
        raise ValueError(f"{given}: {reason} Set it to null")


def forget_float8_weights(chunk: torch.nn.Module) -> None:
    """Free the float8 copies of weights that Transformer Engine (2.18, module/base.py) keeps.

    A pass makes them anew in any case, since its first micro-batch may find other weights. Left there they would take up to two bytes a weight
    while other roles compute.
    """
    for module in chunk.modules():
        if hasattr(module, "_fp8_workspaces"):
            module._fp8_workspaces.clear()
