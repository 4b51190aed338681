"""Attention over packed sequences, with one call for neighbours of equal length, against attention of each sequence on its own."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.megatron.cpu.attention import PackedAttention


def _module(sinks: torch.Tensor | None = None, before: int | None = None) -> PackedAttention:
    """The module of one rank, without Megatron's constructor. before: how many positions before its own a query attends to."""
    module = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module.scale, module.cp_group = None, SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    module.softmax_offset, module.before = None if sinks is None else torch.nn.Parameter(sinks), before
    return module


def _alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    sinks: torch.Tensor | None = None,
    before: int | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(dim)) v of each sequence; a sink is an additional column of scores, whose weights are dropped after the softmax."""
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(len(q), len(q)).triu(1).bool()
        if before is not None:
            hidden |= torch.ones(len(q), len(q)).tril(-before - 1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
        weights = scores.softmax(-1)[..., : len(q)]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs).flatten(1)


def test_sequences_of_any_lengths_attend_to_themselves_alone() -> None:
    torch.manual_seed(0)
    for lengths in ([57, 57, 57], [5, 60, 60, 1, 1, 1, 60, 200, 3], [9]):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        qkv = [torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
        out, expected = _module()(*qkv, None, packed_seq_params=packed), _alone(*qkv, lengths)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
        weights = torch.randn_like(out)
        found = torch.autograd.grad(out, qkv, weights)
        for grad, wanted in zip(found, torch.autograd.grad(expected, qkv, weights), strict=True):
            torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("before", [None, 0, 7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_sinks_and_windows(has_sinks: bool, before: int | None) -> None:
    torch.manual_seed(0)
    lengths = [5, 60, 60, 1, 200]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    qkv = [torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    module = _module(torch.randn(4) if has_sinks else None, before)
    sinks = module.softmax_offset
    out, expected = module(*qkv, None, packed_seq_params=packed), _alone(*qkv, lengths, sinks, before)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    weights, of = torch.randn_like(out), [*qkv, *([] if sinks is None else [sinks])]
    found = torch.autograd.grad(out, of, weights)
    for grad, wanted in zip(found, torch.autograd.grad(expected, of, weights), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)
