"""Routers that choose the experts that an engine chose, in place of their own.

An engine and a trainer compute the same router's scores with other kernels and in batches of other shapes. Where two experts' scores are
nearly equal they choose differently, and the token's log-prob differs by far more than rounding. Replayed, the choice is the
engine's; the weights of the chosen experts are the trainer's own, from its own scores, and gradients flow into the router through them
("rollout routing replay", arXiv:2510.11370).

Written against megatron-core 0.19.2, whose router asks an object for its choice where there is one (transformer/moe/router_replay.py).
Megatron's own object holds one batch's choice for all passes. Here the choice travels with the batch (`megarl.megatron.routers`): so a
layer that is computed again in the backward pass has the choice of its own micro-batch, however many others the pipeline has begun since.

Experts' loads, by which DeepSeek-V3's biases are adjusted, count the replayed choice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.data.routing import RoutingShape
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.megatron.packing import PackedBatch, unpack_tokens
from megarl.megatron.parallel import context_parallel_group
from megarl.megatron.routers import RouterPass, routed_layers
from megarl.models import ModelConfig
from megarl.models.layers import is_mixture

TopK = Callable[..., tuple[Tensor, Tensor]]


class RouterReplay:
    """The choice of one layer's router, in the place of Megatron's object of that name.

    Attributes:
        recorded: the router's choices since recording began, one a pass, [this rank's tokens, top_k]; None: they are not recorded.
        counts: float64 [2]; tokens whose own choice was another one, and all tokens whose choice was replayed, since the last reset.
    """

    def __init__(self) -> None:
        self.layer_number: int | None = None  # Megatron sets it
        self.recorded: list[Tensor] | None = None
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
        if self.recorded is not None:
            self.recorded.append(own.to(torch.int16))
        if self._experts is None or self._is_routed is None:
            return values, own
        assert self._experts.shape == own.shape, (self._experts.shape, own.shape)
        experts = torch.where(self._is_routed[:, None], self._experts.to(own.dtype), own)
        if self.counts is None:
            self.counts = torch.zeros(2, dtype=torch.float64, device=scores.device)
        changed = ~(own[:, :, None] == experts[:, None, :]).any(-1).all(-1)
        self.counts += torch.stack([changed.sum(), self._is_routed.sum()])
        return scores.gather(1, experts), experts


def routing_shape(config: ModelConfig) -> RoutingShape:
    """The shape of the routings in the model's trajectories."""
    assert config.moe is not None
    layers = sum(is_mixture(config, layer) for layer in range(config.num_layers))
    return RoutingShape(layers, config.moe.top_k, config.moe.num_experts)


def layers_of_stages(config: ModelConfig, layout: ParallelLayout) -> list[tuple[int, ...]]:
    """By pipeline stage, the numbers of its layers with experts among all such layers, chunk by chunk."""
    numbers = [layer for layer in range(config.num_layers) if is_mixture(config, layer)]
    return [
        tuple(
            numbers.index(layer)
            for chunk in layers_of(layout, config.num_layers, stage)
            for layer in chunk
            if layer in numbers
        )
        for stage in range(layout.pp)
    ]


def replay_routings(chunks: Sequence[GPTModel]) -> list[RouterReplay]:
    """Have the routers of a model choose the experts of each batch that has some (`PackedBatch.experts`)."""
    replays = []
    for index, layer in enumerate(routed_layers(chunks)):
        assert not layer.mlp.router.config.moe_router_fusion, "the fused kernel asks no replay"
        replay = RouterReplay()
        layer.mlp.router.router_replay = replay
        layer.mlp.router.register_forward_pre_hook(partial(_give, replay, RouterPass(layer), index))
        replays.append(replay)
    return replays


def _give(replay: RouterReplay, router_pass: RouterPass, index: int, *router: Any) -> None:
    bounds = router_pass.bounds
    assert bounds is not None
    experts, is_routed = bounds.experts, bounds.is_routed
    if experts is None or is_routed is None:
        replay.give(None, None)
        return
    replay.give(router_pass.own_part(experts[:, index]), router_pass.own_part(is_routed))


def start_recording(replays: Sequence[RouterReplay]) -> None:
    """Record the routers' choices until `take_recorded`."""
    for replay in replays:
        replay.recorded = []


def take_recorded(
    replays: Sequence[RouterReplay],
    batches: Sequence[PackedBatch],
    layers: Sequence[Sequence[int]],
    shape: RoutingShape,
    layout: ParallelLayout,
) -> list[np.ndarray] | None:
    """The recorded choices of a forward pass over `batches`: by sequence [tokens - 1, layers, top_k], as trajectories have them.

    Called on all ranks of a model; a collective over tensor, context and pipeline parallel ranks.

    Args:
        layers: by pipeline stage, the numbers of its layers among those with experts, in the order of its replays.

    Returns: None on ranks that are not of the last stage.
    """
    found: list[np.ndarray] = []
    most = max(map(len, layers))
    passes = [replay.recorded or [] for replay in replays]
    for replay in replays:
        replay.recorded = None
    for number, batch in enumerate(batches):
        # Gathers take equal shapes: stages with fewer layers send zeros for the others.
        tokens = batch.num_tokens // (layout.tp if layout.sp else 1)
        mine = torch.zeros((tokens, most, shape.top_k), dtype=torch.int16, device=batch.input_ids.device)
        for index, own in enumerate(passes):
            mine[:, index] = own[number]
        if layout.sp:
            mine = _gathered(mine, parallel_state.get_tensor_model_parallel_group()).flatten(0, 1)
        of_stages = mine[None]
        if layout.pp > 1:
            of_stages = _gathered(mine, parallel_state.get_pipeline_model_parallel_group())
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            continue
        whole = torch.empty((mine.shape[0], shape.layers, shape.top_k), dtype=torch.int16, device=mine.device)
        for stage, numbers in enumerate(layers):
            whole[:, list(numbers)] = of_stages[stage][:, : len(numbers)]
        group = context_parallel_group() if layout.cp > 1 else None
        found += unpack_tokens(batch, whole.view(torch.uint8), group)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return [experts[:-1].view(np.int16).astype(shape.dtype) for experts in found] if last else None


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks of a group, [ranks, ...]; as bytes, which every backend carries."""
    bytes_of = tensor.contiguous().view(torch.uint8)
    parts = [torch.empty_like(bytes_of) for _ in range(group.size())]
    dist.all_gather(parts, bytes_of, group=group)
    return torch.stack(parts).view(tensor.dtype)


def take_counts(replays: Sequence[RouterReplay]) -> Tensor:
    """The sum of the layers' counts, float64 [2]; they begin again."""
    counted = [replay.counts for replay in replays if replay.counts is not None]
    for replay in replays:
        replay.counts = None
    return torch.stack(counted).sum(0) if counted else torch.zeros(2, dtype=torch.float64)
