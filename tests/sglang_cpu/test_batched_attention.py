"""Batched attention against attention of one sequence at a time, and against itself in other batches."""

import random

import pytest
import torch

from megarl.sglang_cpu import running_batch
from megarl.sglang_cpu.batched_attention import (
    TOGETHER,
    attend,
    attend_prompt,
    attend_prompts,
    group_by_length,
    make_groups,
    plan_prompts,
    prompt_blocks,
)
from megarl.sglang_cpu.running_batch import ROOM, RunningBatch
from tests.rollout.invariance import needs_invariance

HEADS = [(4, 4), (4, 2), (6, 1)]


def one_at_a_time(query, k_cache, v_cache, slots_of, scale):
    """softmax(q k^T * scale) v for each sequence and head, in float64."""
    heads, num_kv = query.shape[1], k_cache.shape[1]
    rows = []
    for row, slots in enumerate(slots_of):
        keys, values = k_cache[slots].double(), v_cache[slots].double()
        per_head = []
        for head in range(heads):
            kv = head // (heads // num_kv)
            weights = torch.softmax(keys[:, kv] @ query[row, head].double() * scale, 0)
            per_head.append(weights @ values[:, kv])
        rows.append(torch.stack(per_head))
    return torch.stack(rows)


@pytest.mark.parametrize(("heads", "num_kv"), HEADS)
def test_equals_attention_of_each_sequence(heads, num_kv):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 40, 3, 17, 39, 8, 2, 90])
    batch, dim, num_slots, context = len(lengths), 16, 300, 94
    slots = torch.randperm(num_slots - 1, generator=generator) + 1  # slot 0 is padding
    req_to_token = torch.full((20, context), 299, dtype=torch.int32)
    req_pool_indices = torch.tensor([3, 19, 0, 7, 8, 11, 5, 2])
    slots_of, at = [], 0
    for row, length in zip(req_pool_indices.tolist(), lengths.tolist(), strict=True):
        slots_of.append(slots[at : at + length])
        req_to_token[row, :length] = slots_of[-1].int()
        at += length
    k_cache = torch.randn(num_slots, num_kv, dim, generator=generator)
    v_cache = torch.randn(num_slots, num_kv, 24, generator=generator)
    k_cache[0] = v_cache[0] = 0.0
    query = torch.randn(batch, heads, dim, generator=generator)

    output = torch.full((batch, heads, 24), float("nan"))
    groups = make_groups(lengths, req_to_token, req_pool_indices, torch.float32)
    for group in groups:
        output[group.rows] = attend(
            query[group.rows], k_cache[group.slots], v_cache[group.slots], group.mask, 0.25
        )
    expected = one_at_a_time(query, k_cache, v_cache, slots_of, 0.25)
    assert len(groups) == 3  # {90}, {40, 39, 17}, {8, 3, 2, 1}
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "num_kv"), HEADS)
def test_a_prompt_is_attended_causally(heads, num_kv):
    generator = torch.Generator().manual_seed(0)
    length = 23
    query = torch.randn(length, heads, 16, generator=generator)
    keys = torch.randn(length, num_kv, 16, generator=generator)
    values = torch.randn(length, num_kv, 8, generator=generator)
    expected = one_at_a_time(query, keys, values, [torch.arange(n + 1) for n in range(length)], 0.3)
    for cached in (0, 1, 22):
        found = attend_prompt(query[cached:], keys, values, 0.3)
        torch.testing.assert_close(found.double(), expected[cached:], atol=1e-5, rtol=1e-5)


@needs_invariance
@pytest.mark.parametrize(
    ("heads", "num_kv", "dim", "value_dim"),
    [(4, 2, 16, 16), (4, 4, 12, 12), (14, 2, 64, 64), (4, 4, 128, 128), (9, 1, 72, 64), (4, 1, 144, 128)],
)
def test_a_token_has_the_same_bits_however_it_is_attended(heads, num_kv, dim, value_dim):
    """In a prompt of any length, after a cached part of any length, and as the next token in a batch with longer sequences."""
    generator = torch.Generator().manual_seed(0)
    longest = 1400
    query = torch.randn(longest, heads, dim, generator=generator)
    keys = torch.randn(longest, num_kv, dim, generator=generator)
    values = torch.randn(longest, num_kv, value_dim, generator=generator)
    whole = attend_prompt(query, keys, values, None)
    for length in (1, 5, 16, 31, 100, 150, 191, 192, 193, 255, 257, 400, 513, 700):
        part = slice(0, length)
        assert torch.equal(attend_prompt(query[part], keys[part], values[part], None), whole[part]), length
        for cached in (1, 7, 90, 150, 192, 250, 399, 600):
            if cached < length:
                found = attend_prompt(query[cached:length], keys[part], values[part], None)
                assert torch.equal(found, whole[cached:length]), (length, cached)
        for other in (length, length + 3, 2 * length):
            last = torch.tensor([length - 1, other - 1])
            groups = make_groups(
                last + 1, torch.arange(longest).expand(2, -1), torch.arange(2), torch.float32
            )
            for group in groups:
                tokens = last[group.rows]
                found = attend(query[tokens], keys[group.slots], values[group.slots], group.mask, None)
                assert torch.equal(found, whole[tokens]), (length, other)


@needs_invariance
@pytest.mark.parametrize(("heads", "num_kv"), HEADS)
def test_prompts_of_a_batch_have_the_bits_that_each_has_alone(heads, num_kv):
    """Prompts with one new token, of equal lengths and of others, with and without a cached part."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(25, 25), (25, 1), (300, 20), (25, 25), (25, 24), (26, 1), (300, 20), (90, 1), (25, 25)]
    lengths, new_tokens = torch.tensor(sizes).unbind(1)
    slots = torch.randperm(int(lengths.sum()), generator=generator) + 1
    req_to_token = torch.zeros(20, 300, dtype=torch.int32)
    req_pool_indices = torch.tensor([3, 19, 0, 7, 8, 11, 5, 2, 13])
    slots_of = slots.split(lengths.tolist())
    for row, own in zip(req_pool_indices.tolist(), slots_of, strict=True):
        req_to_token[row, : len(own)] = own.int()
    k_cache, v_cache = torch.randn(2, len(slots) + 1, num_kv, 16, generator=generator).unbind()
    query = torch.randn(int(new_tokens.sum()), heads, 16, generator=generator)
    groups, prompts = plan_prompts(lengths, new_tokens, req_to_token, req_pool_indices, torch.float32)

    output = torch.full(query.shape, float("nan"))
    for group in groups:
        output[group.rows] = attend(
            query[group.rows], k_cache[group.slots], v_cache[group.slots], group.mask, None
        )
    for prompt in prompts:
        output[prompt.tokens] = attend_prompts(
            query[prompt.tokens], k_cache[prompt.slots], v_cache[prompt.slots], None
        )
    parts = zip(query.split(new_tokens.tolist()), slots_of, strict=True)
    alone = torch.cat([attend_prompt(part, k_cache[own], v_cache[own], None) for part, own in parts])
    assert torch.equal(output, alone)
    assert len(groups) == 2 and [len(prompt.slots) for prompt in prompts] == [3, 2, 1]


def test_few_long_prompts_are_copied_at_a_time():
    lengths = torch.full((5,), TOGETHER // 2)
    tables = torch.zeros(5, TOGETHER, dtype=torch.int32), torch.arange(5)
    _, prompts = plan_prompts(lengths, lengths, *tables, torch.float32)
    assert [len(prompt.slots) for prompt in prompts] == [2, 2, 1]
    _, prompts = plan_prompts(lengths * 2 + 2, lengths, tables[0].repeat(1, 2), tables[1], torch.float32)
    assert [len(prompt.slots) for prompt in prompts] == [1] * 5


@pytest.mark.parametrize(("heads", "num_kv"), HEADS)
def test_rows_are_not_padded_where_bits_may_differ(heads, num_kv, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 32, num_kv, 16, generator=generator).unbind()
    query = torch.randn(3, heads, 16, generator=generator)
    mask = torch.zeros(3, 1, 1, 32)
    kernel, rows = torch.nn.functional.scaled_dot_product_attention, []

    def noted(query, *args, **kwargs):
        rows.append(query.shape[2])
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    padded, bare = (attend(query, keys, values, mask, None, same_bits) for same_bits in (True, False))
    assert rows == [8, heads // num_kv]
    torch.testing.assert_close(bare, padded, atol=1e-6, rtol=1e-5)


def test_groups_waste_less_than_half():
    lengths = [1, 1000, 3, 513, 512, 30, 70, 37, 33, 193, 192]
    groups = group_by_length(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert [sorted(lengths[row] for row in group) for group in groups] == [
        [513, 1000],
        [193, 512],
        [192],
        [33, 37, 70],
        [30],
        [1, 3],
    ]


def test_prompts_are_cut_at_fixed_positions():
    assert prompt_blocks(0, 30) == [(0, 30)]
    assert prompt_blocks(0, 192) == [(0, 192)] and prompt_blocks(192, 193) == [(192, 193)]
    assert prompt_blocks(10, 1100) == [(10, 192), (192, 512), (512, 1024), (1024, 1100)]
    assert prompt_blocks(512, 1024) == [(512, 1024)]


LAYERS, RUNNING_HEADS, KV_HEADS, DIM, VALUE_DIM, CONTEXT = 2, 8, 4, 16, 12, 400
BYTES = LAYERS * 4 * KV_HEADS * (DIM + VALUE_DIM)


class Cache:
    """A KV cache whose sequences' tokens lie anywhere, as SGLang's do."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        size = 8192
        self.free = torch.randperm(size, generator=generator).tolist()
        self.keys = [torch.randn(size, KV_HEADS, DIM, generator=generator) for _ in range(LAYERS)]
        self.values = [torch.randn(size, KV_HEADS, VALUE_DIM, generator=generator) for _ in range(LAYERS)]
        self.table = torch.zeros(len(lengths), CONTEXT, dtype=torch.int32)
        self.lengths = torch.zeros(len(lengths), dtype=torch.int64)
        for row, length in enumerate(lengths):
            for _ in range(length):
                self.grow([row])

    def grow(self, rows: list[int]) -> None:
        for row in rows:
            self.table[row, self.lengths[row]] = self.free.pop()
            self.lengths[row] += 1

    def attended(self, layer: int, query: torch.Tensor, rows: list[int], scale: float) -> torch.Tensor:
        outputs = []
        for q, row in zip(query, rows, strict=True):
            slots = self.table[row, : self.lengths[row]].long()
            k, v = (
                x[layer][slots].repeat_interleave(RUNNING_HEADS // KV_HEADS, 1)
                for x in (self.keys, self.values)
            )
            outputs.append(
                torch.einsum("hk,khd->hd", torch.einsum("hd,khd->hk", q * scale, k).softmax(-1), v)
            )
        return torch.stack(outputs)


def step(batch: RunningBatch, cache: Cache, rows: list[int]) -> bool:
    """One more token for each of `rows`; returns whether the batch attends them, and if so checks the result."""
    cache.grow(rows)
    index = torch.tensor(rows)
    kept = batch.step(index, cache.lengths[index], cache.table)
    for layer in range(LAYERS if kept else 0):
        query = torch.randn(len(rows), RUNNING_HEADS, DIM)
        found = batch.attend(query, cache.keys[layer], cache.values[layer], 0.3)
        torch.testing.assert_close(found, cache.attended(layer, query, rows, 0.3), rtol=1e-5, atol=1e-5)
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_sequences_of_many_lengths_that_end_one_by_one(seed: int) -> None:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    cache = Cache([chosen.choice([20, 21, 30]) for _ in range(12)])
    batch, rows = RunningBatch(BYTES), list(range(12))
    chosen.shuffle(rows)
    assert not step(batch, cache, rows)  # the next step may be of another batch
    for _ in range(2 * ROOM + 10):
        if len(rows) > 1 and chosen.random() < 0.1:
            rows.remove(chosen.choice(rows))
        assert step(batch, cache, rows)
    assert len(rows) < 6 and batch.end > 0


def test_another_batch_is_not_taken_for_the_last_one() -> None:
    torch.manual_seed(0)
    cache = Cache([10, 10, 10, 10])
    batch = RunningBatch(BYTES)
    for rows, kept in (
        ([0, 1, 2], False),
        ([0, 1, 2], True),
        ([0, 1, 2, 3], False),  # one more row
        ([0, 1, 2, 3], True),
        ([1, 0, 2, 3], False),  # another order
        ([1, 0, 3], True),
        ([1, 2, 3], False),
    ):
        assert step(batch, cache, rows) is kept, rows
    assert step(batch, cache, [1, 2, 3])
    cache.grow([2])  # this sequence got a token outside of the batch
    assert not step(batch, cache, [1, 2, 3])
    assert step(batch, cache, [1, 2, 3])
    batch.forget()
    assert not batch.kept and not step(batch, cache, [1, 2, 3])


def test_what_would_be_mostly_padding_or_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache([100, 10, 10, 10])
    batch = RunningBatch(BYTES)
    assert [step(batch, cache, [0, 1, 2, 3]) for _ in range(3)] == [False, False, False]
    assert [step(batch, cache, [1, 2, 3]) for _ in range(2)] == [True, True]
    monkeypatch.setattr(running_batch, "MAX_BYTES", 3 * (12 + ROOM) * BYTES)
    small, again = RunningBatch(BYTES), Cache([10, 10, 10, 10])
    assert [step(small, again, [0, 1, 2]) for _ in range(2)] == [False, True]
    again = Cache([11, 11, 11])
    small.forget()
    assert [step(small, again, [0, 1, 2]) for _ in range(2)] == [False, False]
