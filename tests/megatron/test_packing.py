"""Micro-batches that are laid out one ahead: the same as if made at once, each once, and no earlier than that."""

import threading
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pytest
import torch

from megarl.megatron.packed import PackedBatch
from megarl.megatron.packing import HostBatch, MicroBatches, arrange_trajectories, pack_trajectories


def _table(rows: int) -> pa.Table:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 30, (rows, 2))
    columns = {
        "prompt_ids": [random.integers(0, 99, prompt) for prompt, _ in lengths],
        "response_ids": [random.integers(0, 99, response) for _, response in lengths],
        "response_mask": [random.integers(0, 2, response).astype(bool) for _, response in lengths],
        "advantages": [random.normal(size=response).astype(np.float32) for _, response in lengths],
    }
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def assert_equal(found: PackedBatch, wanted: PackedBatch) -> None:
    for field in fields(PackedBatch):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        values = (one.items(), other.items()) if isinstance(one, dict) else ([("", one)], [("", other)])
        for (name, a), (same, b) in zip(*values, strict=True):
            assert name == same
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(a, b), field.name
            else:
                np.testing.assert_array_equal(a, b)


def test_each_is_the_one_that_is_packed_by_itself() -> None:
    table, rows = _table(6), [[4, 0], [1], [2, 3, 5]]
    ahead = MicroBatches(
        lambda micro=micro: arrange_trajectories(table, micro, ["advantages"]) for micro in rows
    )
    assert len(ahead) == 3
    seen = list(ahead)
    for found, micro in zip(seen, rows, strict=True):
        assert_equal(found, pack_trajectories(table, micro, ["advantages"]))
    # A second pass, as of a further chunk of the pipeline's stage, and one that begins at the end.
    assert all(again is first for again, first in zip(ahead, seen, strict=True)) and ahead[-1] is seen[-1]
    with pytest.raises(IndexError):
        ahead[3]


def test_one_is_laid_out_ahead_in_a_thread_and_no_more() -> None:
    table, begun, threads = _table(4), [threading.Event() for _ in range(4)], []

    def arrange(number: int) -> HostBatch:
        begun[number].set()
        threads.append(threading.current_thread())
        return arrange_trajectories(table, [number])

    ahead = MicroBatches((lambda number=number: arrange(number)) for number in range(4))
    assert not begun[0].is_set()
    assert ahead[0].lengths.size == 1
    assert begun[1].wait(60)  # while the first one would be computed
    assert not begun[2].is_set()
    assert len(list(ahead)) == 4 and all(event.is_set() for event in begun)
    assert threads[0] is threading.current_thread() and len(threads) == 4
    assert len(set(threads[1:])) == 1 and threads[1] is not threads[0]


def test_what_is_wrong_with_one_is_raised_when_it_is_asked_for() -> None:
    table = _table(2)
    ahead = MicroBatches(
        [lambda: arrange_trajectories(table, [0]), lambda: arrange_trajectories(table, [1], ["values"])]
    )
    assert ahead[0].lengths.size == 1
    with pytest.raises(ValueError, match="column 'values' is missing"):
        ahead[1]


def test_all_tensors_of_a_micro_batch_are_in_one_buffer() -> None:
    """On a GPU one copy brings them there."""
    batch = pack_trajectories(_table(3), [0, 1, 2], ["advantages"])
    tensors = [batch.input_ids, batch.position_ids, batch.labels, batch.mask, batch.live, batch.cu_seqlens]
    storages = {tensor.untyped_storage().data_ptr() for tensor in [*tensors, *batch.fields.values()]}
    assert len(storages) == 1
    assert torch.equal(batch.cu_seqlens.positions, batch.position_ids[0])
    assert batch.packed_seq_params().lengths == batch.cu_seqlens.diff().tolist()
