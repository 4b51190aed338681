"""Sums over full sequences of a packed micro-batch, and values at their ends, though context parallelism cuts them over ranks."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.packing import PackedBatch, zigzag


def sequence_ids(batch: PackedBatch) -> Tensor:
    """The number of the sequence that each of this rank's tokens belongs to, alignment included: int64 [tokens]."""
    # Every context-parallel rank holds an equal share of each sequence, sequence after sequence.
    lengths = batch.cu_seqlens.diff().long() // batch.cp
    numbers = torch.arange(lengths.numel(), device=lengths.device)
    return numbers.repeat_interleave(lengths, output_size=batch.num_tokens)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' `x`; every rank's part gets the gradients that all ranks have for the sum.

    Forward and backward are collectives over `group`: all its ranks must take the same steps.
    """
    return _SumOverRanks.apply(x, group)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradient, ctx.group), None


def _all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def text_values(output: Tensor, batch: PackedBatch, cp_group: dist.ProcessGroup | None) -> Tensor:
    """The head's output at each text's last token, on every context parallel rank: [texts].

    Gradients go to the rank that holds the token; they are the sum over the gradients that all ranks have for the value, so each
    of `batch.cp` ranks takes a `batch.cp`-th of a loss that all of them compute.

    Args:
        output: [tokens] of this rank.
        batch: of `packing.arrange_texts`.
        cp_group: the context parallel group; needed with cp > 1, where this and its backward pass are collectives.
    """
    assert output.shape == (batch.num_tokens,), (output.shape, batch.num_tokens)
    bounds = np.cumsum([0, *batch.aligned])
    text_at = np.full(bounds[-1], -1)
    text_at[batch.first] = np.arange(len(batch.first))
    own = text_at[zigzag(bounds, batch.cp)[batch.cp_rank]]
    texts = torch.from_numpy(own[own >= 0]).to(output.device)
    # index_put also where no text ends on this rank: its backward pass has collectives that it must take part in.
    values = output.new_zeros(len(batch.first)).index_put((texts,), output[batch.live])
    if batch.cp == 1:
        return values
    assert cp_group is not None and cp_group.size() == batch.cp
    return sum_over_ranks(values, cp_group)
