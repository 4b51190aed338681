"""Each guarantee that megarl/data/gather.py opens with, under its name."""

import gc

import numpy as np
import pyarrow as pa
import pytest

from megarl.data.gather import Blocks, gather_lists

MANY = 3 << 18  # float32 values of 3 MiB: large enough for a block


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_block_is_given_out_again_only_when_nothing_is_left_of_it():
    blocks = Blocks()
    first = blocks.empty(MANY, np.float32)
    at = address(first)
    column = pa.ListArray.from_arrays(pa.array([0, MANY], pa.int32()), pa.array(first[:]))
    first[:] = 1
    view = first.reshape(2, -1)[1, 5:]
    del first
    for held in ("column", "view"):
        second = blocks.empty(MANY, np.float32)
        assert address(second) != at, held
        second[:] = 2
        if held == "column":
            assert np.all(column.values.to_numpy() == 1)
            column = None
        else:
            assert np.all(view == 1)
            view = None
        gc.collect()
    assert at in {
        address(array) for array in [blocks.empty(MANY - 7, np.int32), blocks.empty(MANY, np.int32)]
    }


def test_blocks_that_are_too_small_are_given_up():
    blocks = Blocks()
    blocks.empty(MANY, np.float32)
    large = blocks.empty(4 * MANY, np.float32)
    assert len(large) == 4 * MANY
    assert not blocks._free


@pytest.mark.parametrize("value", [pa.int32(), pa.float32(), pa.bool_()])
def test_gathered_rows_are_those_of_arrows_own_take(value):
    random = np.random.default_rng(0)
    rows = [random.integers(0, 2, size).tolist() for size in random.integers(0, 9, 40)]
    whole = pa.array([[bool(x) for x in row] for row in rows] if pa.types.is_boolean(value) else rows,
                     pa.list_(value))  # fmt: skip
    chunks = [whole.slice(3, 10), whole.slice(13, 0), whole.slice(13, 20), whole.slice(33)]
    for chosen in (np.arange(37), random.permutation(37), random.integers(0, 37, 90), np.empty(0, np.int64)):
        for blocks in (None, Blocks()):
            found = gather_lists(chunks, chosen, blocks)
            found.validate(full=True)
            assert found.equals(whole.slice(3).take(pa.array(chosen)))
    for row in (-1, 37):
        with pytest.raises(IndexError, match="of a table of 37"):
            gather_lists(chunks, np.array([row]), None)
