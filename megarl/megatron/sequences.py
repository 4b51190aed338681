"""Whole sequences of a packed micro-batch, though context parallelism cuts each over several ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.packed import PackedBatch


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
