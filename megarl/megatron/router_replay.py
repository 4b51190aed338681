"""Routers that choose the experts that an engine chose, in place of their own.

An engine and a trainer compute the same router's scores with other kernels and in batches of other shapes. Where two experts' scores are
nearly equal they choose differently, and the token's log-prob differs by far more than rounding. Replayed, the choice is the
engine's; the weights of the chosen experts are the trainer's own, from its own scores, and gradients flow into the router through them
("rollout routing replay", arXiv:2510.11370).

Written against megatron-core 0.19.2, whose router asks an object for its choice where there is one (transformer/moe/router_replay.py).
Megatron's own object holds one batch's choice for all passes. Here the choice travels with the batch, in the bounds that every layer is
given (`PackedBounds`): so a layer that is computed again in the backward pass has the choice of its own micro-batch, however
many others the pipeline has begun since.

Experts' loads, by which DeepSeek-V3's biases are adjusted, count the replayed choice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.data.routing import RoutingShape
from megarl.megatron.packing import Routing
from megarl.models import ModelConfig
from megarl.models.layers import is_mixture

TopK = Callable[..., tuple[Tensor, Tensor]]


class RouterReplay:
    """The choice of one layer's router, in the place of Megatron's object of that name.

    Attributes:
        counts: float64 [2]; tokens whose own choice was another one, and all tokens whose choice was replayed, since the last reset.
    """

    def __init__(self) -> None:
        self.layer_number: int | None = None  # Megatron sets it
        self.counts: Tensor | None = None
        self._experts: Tensor | None = None  # [this rank's tokens, top_k]
        self._is_routed: Tensor | None = None  # bool [this rank's tokens]

    def give(self, experts: Tensor | None, is_routed: Tensor | None) -> None:
        """Set the choice of the coming pass; None: the router's own."""
        self._experts, self._is_routed = experts, is_routed

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scores of the chosen experts, and the experts, each [tokens, topk]; called by Megatron's router.

        Args:
            scores: [tokens, experts], with a gradient.
            default_compute_topk: the router's own choice.
        """
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._experts is None or self._is_routed is None:
            return values, own
        assert self._experts.shape == own.shape, (self._experts.shape, own.shape)
        experts = torch.where(self._is_routed[:, None], self._experts.to(own.dtype), own)
        if self.counts is None:
            self.counts = torch.zeros(2, dtype=torch.float64, device=scores.device)
        changed = ~(own[:, :, None] == experts[:, None, :]).any(-1).all(-1)
        self.counts += torch.stack([changed.sum(), self._is_routed.sum()])
        return scores.gather(1, experts), experts


def routed_layers(chunks: Sequence[GPTModel]) -> list[tuple[int, TransformerLayer]]:
    """This rank's layers that have experts, each with its number from 0 in the model, in the order of the chunks."""
    return [
        (layer.layer_number - 1, layer)
        for chunk in chunks
        for layer in chunk.decoder.layers
        if isinstance(layer.mlp, MoELayer)
    ]


def routing_of(config: ModelConfig, chunks: Sequence[GPTModel]) -> Routing:
    """What a batch needs of the experts of trajectories for this rank's layers."""
    assert config.moe is not None
    numbers = [layer for layer in range(config.num_layers) if is_mixture(config, layer)]
    shape = RoutingShape(len(numbers), config.moe.top_k, config.moe.num_experts)
    return Routing(shape, tuple(numbers.index(number) for number, _ in routed_layers(chunks)))


def replay_routings(chunks: Sequence[GPTModel]) -> list[RouterReplay]:
    """Have the routers of a model choose the experts of each batch that has some (`PackedBatch.experts`)."""
    replays = []
    for index, (_, layer) in enumerate(routed_layers(chunks)):
        replay = RouterReplay()
        layer.mlp.router.router_replay = replay
        layer.register_forward_pre_hook(partial(_give, replay, index), with_kwargs=True)
        replays.append(replay)
    return replays


def _give(
    replay: RouterReplay, index: int, layer: TransformerLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    bounds = kwargs["packed_seq_params"]
    experts, is_routed = bounds.experts, bounds.is_routed
    if experts is None:
        replay.give(None, None)
        return
    experts = experts[:, index]
    if layer.config.sequence_parallel:  # the router has this rank's part of the tokens
        tp, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        experts, is_routed = experts.chunk(tp)[rank], is_routed.chunk(tp)[rank]
    replay.give(experts, is_routed)


def take_counts(replays: Sequence[RouterReplay]) -> Tensor:
    """The sum of the layers' counts, float64 [2]; they begin again."""
    counted = [replay.counts for replay in replays if replay.counts is not None]
    for replay in replays:
        replay.counts = None
    return torch.stack(counted).sum(0) if counted else torch.zeros(2, dtype=torch.float64)
