"""Rows of list columns in another order, copied once, into memory that the next step uses again.

Guarantees, each asserted by a test of its name:

- a block is given out again only when no array and no column that was made on it is left;
- gathered rows are those of Arrow's own `take`.

A step's columns are hundreds of MiB each. Memory that comes from the system is cleared page by page first, which takes longer than
the copy, in a virtual machine many times as long, and allocators give such blocks back at once or, as Arrow's 26, after
seconds.
"""

import itertools
import mmap
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_PAGE = 2 << 20  # bytes of a huge page, of which the kernel clears and maps 512 pages at once
_SPARE = 1.25  # a block is larger than what it is first asked for, as the next batch may be


class Blocks:
    """Memory of columns that are gone, for those that come."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def empty(self, num_values: int, dtype: npt.DTypeLike) -> np.ndarray:
        """An array [num_values] of arbitrary content; its memory comes back when nothing refers to it any more."""
        num_bytes = num_values * np.dtype(dtype).itemsize
        if num_bytes < _PAGE:
            return np.empty(num_values, dtype)
        block = self._fitting(num_bytes)
        # The base of all views of it: numpy stops there, as what lies below is no array.
        lease = np.frombuffer(block, np.uint8)
        # Not under the lock: the garbage collector may call it while this thread holds that.
        weakref.finalize(lease, self._free.append, block).atexit = False
        return lease[:num_bytes].view(dtype)

    def _fitting(self, num_bytes: int) -> mmap.mmap:
        """The smallest free block of so many bytes, if it is not far too large, or a new one in the place of the free ones
        that are too small."""
        with self._lock:
            free = sorted(self._free, key=len)
            for block in free:
                if num_bytes <= len(block) <= 2 * _SPARE * num_bytes + _PAGE:
                    self._free.remove(block)
                    return block
            for block in free:
                if len(block) < num_bytes:
                    self._free.remove(block)
        block = mmap.mmap(-1, -(-int(_SPARE * num_bytes) // _PAGE) * _PAGE)
        block.madvise(mmap.MADV_HUGEPAGE)
        return block


def gather_lists(chunks: Sequence[pa.ListArray], rows: np.ndarray, blocks: Blocks | None) -> pa.ListArray:
    """Rows of a column of lists without nulls, in the given order, as one chunk.

    Whole rows are copied, once, and neighbours at once, whatever chunks they lie in: Arrow 26 gathers lists value by value,
    ten times slower for rows of thousands.

    Args:
        chunks: one at least, of numbers or booleans.
        rows: int64, counted over all chunks.
        blocks: where numbers are copied to; None: to memory of their own.
    """
    starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    if len(rows) and (rows.min() < 0 or rows.max() >= starts[-1]):
        raise IndexError(f"rows from {rows.min()} to {rows.max()} of a table of {starts[-1]}")
    chunk_of = np.searchsorted(starts, rows, side="right") - 1
    apart = (np.diff(rows) != 1) | (np.diff(chunk_of) != 0)
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)]
    local = rows - starts[chunk_of]
    # of neighbours: (chunk, first row, number of rows)
    runs = [(int(chunk_of[a]), int(local[a]), b - a) for a, b in itertools.pairwise(bounds) if b > a]
    if blocks is None or not runs or pa.types.is_boolean(chunks[0].type.value_type):
        return pa.concat_arrays(
            [chunks[chunk].slice(row, n) for chunk, row, n in runs] or [chunks[0].slice(0, 0)]
        )
    lengths = np.concatenate([np.diff(chunk.offsets) for chunk in chunks])[rows]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if offsets[-1] >= 2**31:
        raise ValueError(f"{offsets[-1]} values in one list column: Arrow's list offsets have 32 bits")
    lists = [(chunk.values.to_numpy(), chunk.offsets.to_pylist()) for chunk in chunks]
    parts = [lists[chunk][0][lists[chunk][1][row] : lists[chunk][1][row + n]] for chunk, row, n in runs]
    flat = np.concatenate(parts, out=blocks.empty(int(offsets[-1]), parts[0].dtype))
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(flat), type=chunks[0].type)
