"""The part of step `kernels` for gpt-oss' attention (Transformer Engine's) and for gated delta nets (flash-linear-attention's), compared with torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl import platform
from megarl.gpu_test.pairs import (
    BF16,
    LENGTHS,
    Case,
    Compared,
    attention,
    ends_of,
    made,
    queries_keys_values,
    with_gradients,
)

HEADS, GROUPS, WIDTH = 8, 2, 64
KEY_WIDTH, VALUE_WIDTH = 64, 128  # of a gated delta net's heads


def sinks_and_window(device: str, window: int | None) -> Iterator[Compared]:
    import transformer_engine.pytorch as te

    tokens = sum(LENGTHS)
    leaves = queries_keys_values(device, (tokens, HEADS, WIDTH), *[(tokens, GROUPS, WIDTH)] * 2)
    _, inputs, references = zip(*leaves, strict=True)
    ends = ends_of(LENGTHS, device)
    seen = (-1, 0) if window is None else (window - 1, 0)
    module = te.DotProductAttention(
        HEADS, WIDTH, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal",
        window_size=seen, softmax_type="learnable",
    )  # fmt: skip
    values, reference = made(device, HEADS, seed=9)
    offset = module.softmax_offset
    offset.data = values.detach().to(device)  # megarl.megatron.sinks has them in the model's type, too
    found = module(
        *inputs, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )  # fmt: skip
    query, key, value = references
    expected = attention(query, key, value, reference, window)
    grown = [*leaves, ("sinks", offset, reference)]
    yield from with_gradients(found.view(expected.shape), expected, grown)


def delta_rule(device: str) -> Iterator[Compared]:
    """The rule of packed sequences; queries and keys are normed before it, as in the layer."""
    platform.install()
    from megatron.core.ssm.gated_delta_net import common

    from megarl.megatron.cpu import delta_net

    assert common.HAVE_FLA, "megatron-core does not find flash-linear-attention"
    tokens, norm = sum(LENGTHS), torch.nn.functional.normalize
    queries = made(device, 1, tokens, HEADS, KEY_WIDTH, seed=1)
    keys = made(device, 1, tokens, HEADS, KEY_WIDTH, seed=2)
    values = made(device, 1, tokens, HEADS, VALUE_WIDTH, seed=3)
    decays = made(device, 1, tokens, HEADS, seed=4)
    writes = made(device, 1, tokens, HEADS, seed=5)
    ends, results = ends_of(LENGTHS, device), []
    for rule, which in ((common.chunk_gated_delta_rule, 0), (delta_net.chunk_gated_delta_rule, 1)):
        q, k, v, g, beta = (pair[which] for pair in (queries, keys, values, decays, writes))
        decay = -torch.nn.functional.softplus(g.float())
        results.append(rule(norm(q, dim=-1), norm(k, dim=-1), v, decay, beta.sigmoid(), cu_seqlens=ends)[0])
    names = ("queries", "keys", "values", "decays", "strengths of writes")
    leaves = [
        (name, *pair) for name, pair in zip(names, (queries, keys, values, decays, writes), strict=True)
    ]
    found, expected = results
    yield from with_gradients(found, expected, leaves)


def convolution(device: str) -> Iterator[Compared]:
    """Over the tokens of packed sequences, a window of four."""
    platform.install()
    from megatron.core.ssm.gated_delta_net import common

    from megarl.megatron.cpu import delta_net

    assert common.HAVE_FLA, "megatron-core does not find flash-linear-attention"
    x, x_too = made(device, 1, sum(LENGTHS), 192, seed=6)
    weight, weight_too = made(device, 192, 4, seed=7)
    ends = ends_of(LENGTHS, device)
    found, _ = common.causal_conv1d(x, weight, activation="silu", cu_seqlens=ends)
    expected, _ = delta_net.causal_conv1d(x_too, weight_too, activation="silu", cu_seqlens=ends)
    yield from with_gradients(found, expected, [("the input", x, x_too), ("the weight", weight, weight_too)])


TRANSFORMER_ENGINE: dict[str, tuple[Case, float]] = {
    "attention with sinks": (lambda device: sinks_and_window(device, None), BF16),
    "attention with sinks to a window of 32": (lambda device: sinks_and_window(device, 32), BF16),
}
FLA: dict[str, tuple[Case, float]] = {
    "gated delta rule": (delta_rule, BF16),
    "convolution of a gated delta net": (convolution, BF16),
}
