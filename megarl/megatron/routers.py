"""Routers of a rank's layers, and the micro-batch that each of them computes on.

What routers need of a micro-batch travels in the bounds that every layer is given (`PackedBounds`), so that a layer that is computed
again in the backward pass has the bounds of its own micro-batch. Where the MoE layer alone is computed again (`recompute_modules` has
moe), its router is called without the layer around it, while the pipeline has begun other micro-batches: the bounds of the first
passes then wait for the second ones. Backward passes of a layer come in the order of its forward passes, in all of Megatron's schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.megatron.packing import PackedBounds


class RouterBounds(NamedTuple):
    """What routers need of a micro-batch's bounds, which stays until the next pass. The bounds themselves must not: where layers share the
    choice of keys of sparse attention they hold a bit for each of a text's keys and each query.

    Attributes:
        experts, is_routed, mask: as in `PackedBounds`.
    """

    experts: Tensor | None
    is_routed: Tensor | None
    mask: Tensor | None


class RouterPass:
    """The bounds of the micro-batch that a layer's router computes on.

    Attributes:
        bounds: of the router's current pass, or its last one.
    """

    def __init__(self, layer: TransformerLayer) -> None:
        self.bounds: RouterBounds | None = None
        self._given: RouterBounds | None = None
        self._waiting: deque[RouterBounds] = deque()
        self._again, self._parts = layer.mlp.moe_layer_recompute, layer.config.sequence_parallel
        layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        layer.mlp.router.register_forward_pre_hook(self._route)

    def own_part(self, tokens: Tensor) -> Tensor:
        """The router's part of a tensor of all tokens: this rank's with sequence parallelism, else all of it."""
        if not self._parts:
            return tokens
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        return tokens.chunk(size)[rank]

    def _begin(self, layer: TransformerLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bounds: PackedBounds = kwargs["packed_seq_params"]
        self._given = RouterBounds(bounds.experts, bounds.is_routed, bounds.mask)

    def _route(self, router: TopKRouter, args: tuple[Any, ...]) -> None:
        assert self._given is not None
        self.bounds = self._given
        if not (self._again and router.training):
            return
        if torch.is_grad_enabled():
            self.bounds = self._waiting.popleft()
        else:
            self._waiting.append(self._given)


def routed_layers(chunks: Sequence[GPTModel]) -> list[TransformerLayer]:
    """This rank's layers that have experts, in the order of the chunks."""
    return [layer for chunk in chunks for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer)]
