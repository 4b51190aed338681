"""Keys and values that are kept from step to step, against each sequence's own softmax(q k^T) v from the cache."""

import random

import pytest
import torch

from megarl.sglang_cpu import running_batch
from megarl.sglang_cpu.running_batch import ROOM, RunningBatch

LAYERS, HEADS, KV_HEADS, DIM, VALUE_DIM, CONTEXT = 2, 8, 4, 16, 12, 400
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
            k, v = (x[layer][slots].repeat_interleave(HEADS // KV_HEADS, 1) for x in (self.keys, self.values))
            outputs.append(
                torch.einsum("hk,khd->hd", torch.einsum("hd,khd->hk", q * scale, k).softmax(-1), v)
            )
        return torch.stack(outputs)


def step(batch: RunningBatch, cache: Cache, rows: list[int]) -> bool:
    """One token more of each of `rows`; whether the batch attends them, which is then as it should be."""
    cache.grow(rows)
    index = torch.tensor(rows)
    kept = batch.step(index, cache.lengths[index], cache.table)
    for layer in range(LAYERS if kept else 0):
        query = torch.randn(len(rows), HEADS, DIM)
        found = batch.attend(query, cache.keys[layer], cache.values[layer], 0.3)
        torch.testing.assert_close(found, cache.attended(layer, query, rows, 0.3), rtol=1e-5, atol=1e-5)
    return kept


@pytest.mark.parametrize("seed", range(6))
def test_sequences_of_many_lengths_that_end_one_by_one(seed: int) -> None:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    cache = Cache([chosen.choice([20, 21, 30]) for _ in range(12)])
    batch, rows = RunningBatch(BYTES), list(range(12))
    chosen.shuffle(rows)
    assert not step(batch, cache, rows)  # it may be another one by the next step
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
        ([0, 1, 2, 3], False),  # one more
        ([0, 1, 2, 3], True),
        ([1, 0, 2, 3], False),  # another order
        ([1, 0, 3], True),
        ([1, 2, 3], False),
    ):
        assert step(batch, cache, rows) is kept, rows
    assert step(batch, cache, [1, 2, 3])
    cache.grow([2])  # it was computed elsewhere meanwhile
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
