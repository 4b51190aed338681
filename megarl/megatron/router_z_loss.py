"""The router z-loss, which keeps the logits of routers small (ST-MoE, arXiv:2202.08906, equation 5).

Large logits round coarsely, and small changes of them move whole experts. For each layer with experts the mean over tokens of
logsumexp(logits)^2 is added to the loss, times a coefficient.

In Megatron-core 0.19.2 it is a mean over a micro-batch's tokens, prompts and alignment among them, so that it depends on how a batch is cut.
Here it is over the tokens that an update learns from, whatever layout and micro-batches: `RouterZLoss` replaces the method of Megatron's routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megarl import platform
from megarl.megatron.routers import RouterPass, routed_layers


class RouterZLoss:
    """Adds the loss to the routers of a rank's layers."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        """
        Args:
            chunks: without their wrapping.
        """
        self._weight = 0.0
        self._sums = torch.zeros(2, dtype=torch.float64, device=platform.device())
        for layer in routed_layers(chunks):
            layer.mlp.router.apply_z_loss = partial(self._add, RouterPass(layer))

    def begin(self, weight: float) -> None:
        """Before an update: set the weight of a token's value in a layer, and forget the values of another update.

        Args:
            weight: the coefficient over the number of tokens that the update learns from, on all ranks; 0: there is no such loss.
        """
        self._weight = weight
        self._sums.zero_()

    def mean(self) -> float:
        """The mean over layers and tokens of the update, without the coefficient. Collective over all ranks."""
        sums = self._sums.clone()
        dist.all_reduce(sums)
        total, count = sums.tolist()
        return total / count if count else 0.0

    def _add(self, router_pass: RouterPass, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The logits, [this rank's tokens, experts], to whose gradient the loss's is added."""
        # As in the first pass of a layer that is computed again.
        if not (self._weight and torch.is_grad_enabled()):
            return logits
        assert router_pass.bounds is not None
        mask = router_pass.own_part(router_pass.bounds.mask)
        total = (logits.float().logsumexp(-1).square() * mask).sum()
        self._sums += torch.stack([total.detach(), mask.sum()])
        return MoEAuxLossAutoScaler.apply(logits, total * self._weight)
