"""Attention with sinks and windows on SGLang's CPU engine, against one row of scores at a time, and against itself in other batches."""

from collections.abc import Iterator

import pytest
import torch

from megarl.sglang_cpu.batch_invariant import override_operators
from megarl.sglang_cpu.batched_attention import attend, attend_prompts, make_groups, within
from tests.rollout.invariance import needs_invariance

HEADS = [(4, 4), (4, 2), (6, 1)]
WINDOWS = [None, 0, 7, 127]


def row_by_row(query, keys, values, sinks, window):
    """For each token in float64: the softmax over the scores of its keys and of the sink, times the values. [tokens, heads, dim]."""
    heads, dim, rows = query.shape[1], query.shape[2], []
    keys, values = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
    for token in range(len(query)):
        seen = slice(0 if window is None else max(0, token - window), token + 1)
        scores = torch.einsum("hd,khd->hk", query[token].double(), keys[seen]) * dim**-0.5
        weights = torch.cat((scores, sinks.double()[:, None]), 1).softmax(1)[:, :-1]
        rows.append(torch.einsum("hk,khd->hd", weights, values[seen]))
    return torch.stack(rows)


def sequence(length, heads, num_kv, dim=16):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(length, heads, dim, generator=generator)
    keys, values = torch.randn(2, length, num_kv, dim, generator=generator).unbind()
    return query, keys, values, torch.randn(heads, generator=generator)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "num_kv"), HEADS)
def test_a_prompt_is_attended_within_its_window_beside_a_sink(heads, num_kv, window):
    """With more tokens than the kernel takes at a time, so that some rows attend to no key of a block."""
    query, keys, values, sinks = sequence(700, heads, num_kv)
    expected = row_by_row(query, keys, values, sinks, window)
    for cached in (0, 1, 90, 699):
        found = attend_prompts(query[None, cached:], keys[None], values[None], None, window, sinks)[0]
        torch.testing.assert_close(found.double(), expected[cached:], atol=1e-5, rtol=1e-5)


@pytest.fixture
def as_in_an_engine() -> Iterator[None]:
    """An engine's operators, whose sigmoids have the same bits at any position of a tensor."""
    library = override_operators()
    yield
    library._destroy()


@needs_invariance
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "num_kv", "dim"), [(4, 2, 16), (14, 2, 64), (8, 1, 64)])
def test_a_token_has_the_same_bits_as_the_next_one_and_in_a_prompt(
    as_in_an_engine, heads, num_kv, dim, window
):
    query, keys, values, sinks = sequence(1100, heads, num_kv, dim)
    whole = attend_prompts(query[None], keys[None], values[None], None, window, sinks)[0]
    for length in (1, 16, 31, 150, 192, 193, 257, 513, 700):
        part = slice(0, length)
        alone = attend_prompts(query[None, part], keys[None, part], values[None, part], None, window, sinks)[
            0
        ]
        assert torch.equal(alone, whole[part]), length
        for other in (length, length + 3, length + 400):
            last = torch.tensor([length - 1, other - 1])
            tables = torch.arange(len(query)).expand(2, -1), torch.arange(2)
            for group in make_groups(last + 1, *tables, torch.float32):
                tokens = last[group.rows]
                mask = group.mask if window is None else within(group, window)
                found = attend(query[tokens], keys[group.slots], values[group.slots], mask, None, True, sinks)
                assert torch.equal(found, whole[tokens]), (length, other)
