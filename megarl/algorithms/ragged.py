"""Small helpers for flat tensors with offsets: `x` [tokens], `offsets` int64 [n + 1]."""

from itertools import pairwise

import torch
from torch import Tensor


def check_ragged(offsets: Tensor, *flat: Tensor) -> None:
    """Assert that `offsets` describe consecutive segments that cover each of `flat` exactly."""
    assert offsets.dtype == torch.int64 and offsets.dim() == 1 and offsets.numel() >= 1, (
        "offsets: int64 [n + 1]"
    )
    assert int(offsets[0]) == 0, f"offsets start at {int(offsets[0])}, not 0"
    assert bool((offsets.diff() >= 0).all()), "offsets decrease"
    for x in flat:
        assert x.dim() == 1, f"a flat ragged tensor has one dimension, not {x.dim()}"
        assert x.numel() == int(offsets[-1]), f"{x.numel()} tokens, but the offsets end at {int(offsets[-1])}"


def segment_ids(offsets: Tensor) -> Tensor:
    """The trajectory number of every token, int64 [tokens]."""
    lengths = offsets.diff()
    return torch.arange(lengths.numel(), device=offsets.device).repeat_interleave(lengths)


def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum of `x` [tokens], floating or bool, over each trajectory, [n], in x's dtype (bool counts as int64).

    A trajectory's tokens are added one after the other, whatever the number of threads.
    """
    counts = x.dtype == torch.bool  # in float32 up to 2^24 tokens of a trajectory are exact
    lengths, terms = offsets.diff(), x.float() if counts else x
    if not lengths.numel():  # which torch 2.13 refuses
        return torch.zeros(0, dtype=torch.int64 if counts else x.dtype, device=x.device)
    sums = torch.segment_reduce(terms, "sum", lengths=lengths, axis=0, initial=0)
    return sums.long() if counts else sums


def live_offsets(mask: Tensor, offsets: Tensor) -> Tensor:
    """Offsets of the trajectories that are left when masked tokens are taken out, int64 [n + 1]."""
    live_before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.long().cumsum(0)])
    return live_before[offsets]


def reverse_scan(x: Tensor, offsets: Tensor, factor: float) -> Tensor:
    """y[t] = x[t] + factor * y[t + 1] within each trajectory, y = 0 after its end; [tokens], x's dtype.

    One step handles the tokens at one distance from their trajectory's end. Tokens are laid out by that
    distance, and within it by decreasing trajectory length, so each step is a slice and a prefix of the
    step before it: no padding to the longest trajectory, no gather within the loop.
    """
    if x.numel() == 0:
        return x.clone()
    lengths = offsets.diff()
    order = lengths.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)

    owner = segment_ids(offsets)
    distance = offsets[1:][owner] - 1 - torch.arange(x.numel(), device=x.device)  # to the trajectory's end
    step_sizes = torch.bincount(distance)
    slot = (step_sizes.cumsum(0) - step_sizes)[distance] + rank[owner]  # each token's place in the layout

    laid_out = torch.empty_like(x)
    laid_out[slot] = x
    steps = laid_out.split(step_sizes.tolist())
    for previous, current in pairwise(steps):
        current.add_(previous[: current.numel()], alpha=factor)
    return laid_out[slot]
