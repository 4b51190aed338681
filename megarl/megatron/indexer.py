"""Indexers of sparse attention (DeepSeek-V3.2, GLM-5) in Megatron's layers: weights that are kept, and neither used nor trained.

An indexer chooses the `topk` keys that a query attends to. Sequences here have no more tokens than that (`megarl.config.model_fit` refuses
longer ones): each query attends to all keys before it, whatever an indexer would say, and no gradient would reach it. Engines have the
same weights, by every sync, and so have checkpoints and exports.
"""

from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel

from megarl import platform
from megarl.models import ModelConfig, keeps_float32
from megarl.models.layers import attention_weights, has_indexer

_LOCAL = "self_attention.indexer."


def add_indexers(model: GPTModel, config: ModelConfig, layers: list[int]) -> None:
    """Give the layers of a model chunk their indexers, of zeros.

    Their weights are buffers: no optimizer, gradient buffer or adapter knows of them.

    Args:
        layers: the numbers in the model of the chunk's layers.
    """
    if config.indexer is None:
        return
    numbered = list(zip(layers, model.decoder.layers, strict=True))
    if getattr(model, "mtp", None) is not None:
        numbered += [
            (config.num_layers + index, layer.mtp_model_layer) for index, layer in enumerate(model.mtp.layers)
        ]
    for number, layer in numbered:
        if has_indexer(config, number):
            layer.self_attention.indexer = _indexer(config, number, model.config.params_dtype)


def indexers_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights of a chunk's indexers."""
    return (buffer for name, buffer in model.named_buffers() if f".{_LOCAL}" in name)


def _indexer(config: ModelConfig, layer: int, dtype: torch.dtype) -> torch.nn.Module:
    indexer = torch.nn.Module()
    for weight in attention_weights(config, layer):
        if weight.megatron.startswith(_LOCAL):
            part, kind = weight.megatron.removeprefix(_LOCAL).split(".")
            if not hasattr(indexer, part):
                indexer.add_module(part, torch.nn.Module())
            own = torch.float32 if keeps_float32(weight.name) else dtype
            values = torch.zeros(weight.shape, dtype=own, device=platform.device())
            indexer.get_submodule(part).register_buffer(kind, values)
    return indexer
