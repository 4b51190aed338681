"""Attention to chosen keys equals torch's attention with a mask, forward and backward."""

import pytest
import torch

from megarl.megatron.sparse import selection
from megarl.megatron.sparse.attention import ChosenAttention
from megarl.megatron.sparse.selection import choose_keys, runs_of, unpack_bits

LENGTHS, TOPK = [20, 7, 13], 4


def test_it_is_attention_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = sum(LENGTHS)
    shapes = {"query": (tokens, 3, 8), "key": (tokens, 3, 8), "value": (tokens, 3, 5)}
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes.values()]
    indexed = torch.randn(tokens, 2, 6, generator=generator), torch.rand(tokens, 2, generator=generator)
    runs = runs_of(LENGTHS, 1, 0)
    chosen = choose_keys(*indexed, torch.randn(tokens, 6, generator=generator), runs, TOPK, max(LENGTHS))
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for run in runs:
        own = unpack_bits(chosen[run.rows], run.end)
        own[:TOPK] = torch.ones(TOPK, run.end).tril().bool()
        seen[run.rows, run.keys] = own
    given = torch.randn(tokens, 3, 5, generator=generator)
    masked = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in inputs), attn_mask=seen, scale=0.3
    ).transpose(0, 1)
    expected = torch.autograd.grad(masked, inputs, given)
    for limit in (selection.LIMIT, 4 * 200):  # at once, and in parts
        monkeypatch.setattr(selection, "LIMIT", limit)
        output = ChosenAttention.apply(*inputs, chosen, runs, TOPK, 0.3)
        torch.testing.assert_close(output, masked, rtol=1e-5, atol=1e-6)
        for found, wanted in zip(torch.autograd.grad(output, inputs, given), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
