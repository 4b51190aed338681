"""Indexers of sparse attention (DeepSeek-V3.2, GLM-5) in Megatron's layers: their weights and their projections.

Weights are buffers where they are kept as they are, and parameters where they are trained (learning.py): every rank has its layers'
indexers complete. Every sync gives engines the same weights; checkpoints and exports have them, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from megarl import platform
from megarl.megatron.cpu.rotary import rotate
from megarl.models import ModelConfig, keeps_float32
from megarl.models.layers import attention_weights, has_indexer

_LOCAL = "self_attention.indexer."
_KEY_NORM_EPSILON = (
    1e-6  # as transformers 5.12.1 and SGLang 0.5.21 have it, whatever the model's other norms have
)


@dataclass(frozen=True)
class Choice:
    """The keys that a layer attends to.

    Attributes:
        layer: its number in the model, from 0; layers for multi-token prediction come after the others.
        topk: how many keys are chosen for a query.
        interleaved: whether the indexer rotates pairs of neighbouring dimensions.
        source: the layer whose indexer's choice it takes; None: it has an indexer.
        is_shared: whether the layer after it takes its choice.
    """

    layer: int
    topk: int
    interleaved: bool
    source: int | None
    is_shared: bool


def choice_of(config: ModelConfig, layer: int) -> Choice:
    """What a layer of a model with indexers attends to."""
    facts = config.indexer
    assert facts is not None
    own = has_indexer(config, layer)
    source = None if own else max(number for number in facts.layers if number < layer)
    return Choice(
        layer, facts.topk, facts.interleaved, source, is_shared=own and not has_indexer(config, layer + 1)
    )


class IndexerPart(torch.nn.Module):
    """The tensors of a part of an indexer. Reading them is a forward pass, before which Megatron gathers weights that an optimizer's step has
    changed (`overlap_param_gather`)."""

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Its weight, and its bias if there is one."""
        return self.weight, getattr(self, "bias", None)


def add_indexers(model: GPTModel, config: ModelConfig, layers: list[int], *, trained: bool) -> None:
    """Tell the layers of a model chunk what they attend to, and give them their indexers, of zeros.

    Args:
        layers: the numbers in the model of the chunk's layers.
        trained: whether their weights are parameters; otherwise they are buffers, which no optimizer, gradient buffer or adapter knows.
    """
    if config.indexer is None:
        return
    numbered = list(zip(layers, model.decoder.layers, strict=True))
    if getattr(model, "mtp", None) is not None:
        numbered += [
            (config.num_layers + index, layer.mtp_model_layer) for index, layer in enumerate(model.mtp.layers)
        ]
    for number, layer in numbered:
        layer.self_attention.choice = choice_of(config, number)
        if has_indexer(config, number):
            layer.self_attention.indexer = _indexer(config, number, model.config, trained)


def indexers_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights of a chunk's indexers that are not trained."""
    return (buffer for name, buffer in model.named_buffers() if f".{_LOCAL}" in name)


def attentions_with_indexers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The attention of each layer of a chunk that has an indexer of its own, layers for multi-token prediction among them."""
    return (
        module for module in model.modules() if isinstance(getattr(module, "indexer", None), torch.nn.Module)
    )


def project(
    indexer: torch.nn.Module,
    x: Tensor,
    low_rank: Tensor,
    positions: Tensor,
    angles: Tensor,
    factor: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """An indexer's queries [tokens, heads, dim], keys [tokens, dim] and weights of heads [tokens, heads].

    Args:
        x: [tokens, hidden], the layer's normed input.
        low_rank: [tokens, low rank], the normed queries before attention's up-projection.
        positions: [tokens], in their sequences.
        angles: [positions, 1, 1, rotated], of attention's rotary embedding. The first `rotated` of an indexer's dimensions are rotated.
        factor: of sines and cosines.
    """
    (query, _), (key, _), (scale, bias), (heads, _) = (
        part() for part in (indexer.wq_b, indexer.wk, indexer.k_norm, indexer.weights_proj)
    )
    dim = len(scale)
    queries = linear(low_rank, query).unflatten(1, (-1, dim))
    keys = layer_norm(linear(x, key).float(), (dim,), scale, bias, _KEY_NORM_EPSILON).to(x.dtype)
    queries, keys = (
        rotate(part, positions, angles, interleaved, factor) for part in (queries, keys[:, None])
    )
    weights = linear(x, heads).float()
    return queries, keys[:, 0], weights * (weights.shape[1] * dim) ** -0.5


def _indexer(config: ModelConfig, layer: int, settings: TransformerConfig, trained: bool) -> torch.nn.Module:
    indexer = torch.nn.Module()
    for weight in attention_weights(config, layer):
        if weight.megatron.startswith(_LOCAL):
            part, kind = weight.megatron.removeprefix(_LOCAL).split(".")
            if not hasattr(indexer, part):
                indexer.add_module(part, IndexerPart())
            own = torch.float32 if keeps_float32(weight.name) else settings.params_dtype
            values = torch.zeros(weight.shape, dtype=own, device=platform.device())
            if not trained:
                indexer.get_submodule(part).register_buffer(kind, values)
                continue
            parameter: Any = torch.nn.Parameter(values)
            # A rank's gradient is that of its own tokens.
            parameter.sequence_parallel = settings.sequence_parallel
            # Clipped by a norm of their own, so that updates of other weights are what they are without this loss.
            setattr(parameter, GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP)
            indexer.get_submodule(part).register_parameter(kind, parameter)
    return indexer
