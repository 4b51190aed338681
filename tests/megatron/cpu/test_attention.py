"""Attention over packed sequences, neighbours of one length by one call, against each sequence in its own matrices."""

from types import SimpleNamespace

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.megatron.cpu.attention import PackedAttention


def _module() -> PackedAttention:
    """One rank's, without what Megatron's constructor asks for."""
    module = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module.scale, module.cp_group = None, SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return module


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """softmax(q k^T / sqrt(dim)) v of each sequence."""
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(len(q), len(q)).triu(1).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
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
