"""Gated delta nets' functions in torch equal transformers' functions for machines without flash-linear-attention, sequence by sequence."""

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as oracle

from megarl.megatron.cpu import delta_net

HEADS, KEY, VALUE, CHANNELS, WINDOW = 3, 8, 16, 12, 4
# Several chunks with and without a remainder, one token, and a sequence of exactly one chunk.
PACKED = [
    pytest.param([5, 31, 1, 12], id="shorter than a chunk"),
    pytest.param([130, 1, 64, 200, 63], id="several chunks"),
]


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(lengths: list[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v, g and beta of packed sequences, as a layer passes them: [1, tokens, heads, ...]."""
    generator, tokens = torch.Generator().manual_seed(7), sum(lengths)
    random = [torch.randn(1, tokens, HEADS, width, generator=generator) for width in (KEY, KEY, VALUE)]
    q, k = (part / part.norm(dim=-1, keepdim=True) for part in random[:2])
    g, beta = torch.randn(2, 1, tokens, HEADS, generator=generator)
    return [part.to(dtype).requires_grad_() for part in (q, k, random[2], -g.exp(), beta.sigmoid())]


@pytest.mark.parametrize("lengths", PACKED)
def test_the_rule_of_packed_sequences_is_that_of_each_one(lengths: list[int]) -> None:
    """Outputs and gradients: no state crosses from one sequence to the next."""
    own, given = inputs(lengths), inputs(lengths)
    found, state = delta_net.chunk_gated_delta_rule(
        *own[:3], g=own[3], beta=own[4], cu_seqlens=bounds(lengths)
    )
    parts = zip(*(part.split(lengths, dim=1) for part in given), strict=True)
    expected = torch.cat([oracle.torch_chunk_gated_delta_rule(*part)[0] for part in parts], dim=1)
    assert state is None and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(8))
    for result in (found, expected):
        (result * weights).sum().backward()
    for part, wanted in zip(own, given, strict=True):
        torch.testing.assert_close(part.grad, wanted.grad, rtol=1e-3, atol=1e-4)


def test_the_rule_without_bounds_is_of_one_sequence() -> None:
    q, k, v, g, beta = inputs([100])
    found, _ = delta_net.chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    recurrent, _ = oracle.torch_recurrent_gated_delta_rule(q, k, v, g, beta, None, False)
    torch.testing.assert_close(found, recurrent, rtol=1e-4, atol=1e-5)


def test_strong_decay_is_finite() -> None:
    """The decay's exponential between any two tokens, and its gradients; the exponential's inverse would be infinite."""
    q, k, v, _, beta = inputs([70])
    g = torch.full((1, 70, HEADS), -50.0, requires_grad=True)
    found, _ = delta_net.chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    found.sum().backward()
    assert all(part.grad.isfinite().all() for part in (q, k, v, g, beta))


def test_bfloat16_is_computed_in_float32() -> None:
    lengths = [130, 20]
    found, _ = delta_net.chunk_gated_delta_rule(
        *(part := inputs(lengths, torch.bfloat16))[:3], g=part[3], beta=part[4], cu_seqlens=bounds(lengths)
    )
    wide = [each.float() for each in part]
    expected, _ = delta_net.chunk_gated_delta_rule(
        *wide[:3], g=wide[3], beta=wide[4], cu_seqlens=bounds(lengths)
    )
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("lengths", PACKED)
def test_the_convolution_of_packed_sequences_is_that_of_each_one(lengths: list[int]) -> None:
    """Outputs and gradients: no window crosses from one sequence to the next."""
    generator, tokens = torch.Generator().manual_seed(9), sum(lengths)
    x = torch.randn(1, tokens, CHANNELS, generator=generator)
    layer = torch.nn.Conv1d(CHANNELS, CHANNELS, WINDOW, groups=CHANNELS, padding=WINDOW - 1, bias=False)
    own = x.clone().requires_grad_()
    given = x.clone().requires_grad_()
    weight = layer.weight.detach().clone().requires_grad_()
    found, window = delta_net.causal_conv1d(
        own, weight.squeeze(1), activation="silu", initial_state=None, cu_seqlens=bounds(lengths)
    )
    assert window is None
    # As in transformers' Qwen3NextGatedDeltaNet.forward without causal-conv1d.
    expected = torch.cat(
        [
            torch.nn.functional.silu(layer(part.transpose(1, 2))[:, :, : part.shape[1]]).transpose(1, 2)
            for part in given.split(lengths, dim=1)
        ],
        dim=1,
    )
    torch.testing.assert_close(found, expected)
    scales = torch.randn(found.shape, generator=generator)
    for result in (found, expected):
        (result * scales).sum().backward()
    torch.testing.assert_close(own.grad, given.grad)
    torch.testing.assert_close(weight.grad, layer.weight.grad, rtol=1e-4, atol=1e-5)


def test_the_norm_of_queries_and_keys() -> None:
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(2)) * 1e-3
    torch.testing.assert_close(delta_net.l2norm(x), oracle.l2norm(x))
