"""Prompts that are read when they are needed: no more than a window of a data set is in memory.

Files are cut into pieces: row groups of Parquet (or parts of them), and runs of JSON lines. An epoch goes
through the pieces in a new order; pieces that follow each other in it make up a window, whose rows are shuffled
among each other. Both orders depend on (seed, epoch) alone, so a position is a number of rows, and to resume there one
window is read.

Guarantees, each asserted by a test: an epoch has every row once; no more rows than a window's (and one more piece's)
are in memory; a row that is wrong raises before its batch is handed out, and names file and row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.data.files import (
    DataFile,
    is_parquet,
    open_lines,
    open_parquet,
    parquet_rows,
    parse_line,
    read_group,
    unique_stems,
)
from megarl.data.loader import check_identity
from megarl.data.prompts import PromptReader, Row


@dataclass(frozen=True)
class Piece:
    """Rows of a file that are read together."""

    file: DataFile
    prefix: str  # of the rows' uids, which end with their number
    first: int  # the number of its first row in the file
    num_rows: int
    place: int  # the row group (Parquet), or the byte at which the first row begins (JSON lines)
    skip: int = 0  # rows of the row group before the first one


def cut_pieces(
    files: Sequence[DataFile], max_rows: int, max_samples: int | None = None, uid_prefix: str = ""
) -> list[Piece]:
    """The rows of some files as pieces of at most `max_rows`, in file order.

    Of Parquet files only the footers are read; JSON lines, which have none, are read through once to count them.

    Args:
        max_samples: cut this many rows at most; None: all.

    Raises:
        ValueError: a file of an unknown suffix, or one that cannot be read.
    """
    pieces: list[Piece] = []
    left = max_samples
    for file, name in zip(files, unique_stems(files), strict=True):
        cut = _cut_parquet if is_parquet(file) else _cut_lines
        for piece in cut(file, f"{uid_prefix}{name}:", max_rows):
            num_rows = piece.num_rows if left is None else min(piece.num_rows, left)
            if num_rows == 0:
                return pieces
            left = None if left is None else left - num_rows
            pieces.append(Piece(file, piece.prefix, piece.first, num_rows, piece.place, piece.skip))
    return pieces


def _cut_parquet(file: DataFile, prefix: str, max_rows: int) -> Iterator[Piece]:
    with open_parquet(file) as parquet:
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    begin = 0
    for group, size in enumerate(sizes):
        for skip in range(0, size, max_rows):
            yield Piece(file, prefix, begin + skip, min(max_rows, size - skip), group, skip)
        begin += size


def _cut_lines(file: DataFile, prefix: str, max_rows: int) -> Iterator[Piece]:
    first = number = place = here = 0
    with open_lines(file) as lines:
        for line in lines:
            if line.strip():
                if number == first + max_rows:
                    yield Piece(file, prefix, first, max_rows, place)
                    first, place = number, here
                number += 1
            here += len(line)
    if number > first:
        yield Piece(file, prefix, first, number - first, place)


def read_piece(piece: Piece, columns: Sequence[str]) -> list[Row]:
    """The rows of a piece. ValueError: a line that is no JSON object, or columns that pyarrow cannot read."""
    values = _read_parquet(piece, columns) if is_parquet(piece.file) else _read_lines(piece)
    numbers = range(piece.first, piece.first + piece.num_rows)
    return [
        Row(piece.file, number, f"{piece.prefix}{number}", row)
        for number, row in zip(numbers, values, strict=True)
    ]


def _read_parquet(piece: Piece, columns: Sequence[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    begin, end = piece.skip, piece.skip + piece.num_rows
    with open_parquet(piece.file) as file:
        at = 0
        for block in read_group(file, piece.file, piece.place, columns):
            low, high = max(begin - at, 0), min(end - at, block.num_rows)
            if low < high:
                rows += parquet_rows(block.slice(low, high - low))
            at += block.num_rows
            if at >= end:
                break
    return rows


def _read_lines(piece: Piece) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with open_lines(piece.file) as lines:
        lines.seek(piece.place)
        for line in lines:
            if line.strip():
                rows.append(parse_line(line, piece.file, piece.first + len(rows)))
                if len(rows) == piece.num_rows:
                    break
    return rows


class StreamFeed:
    """Prompts of pieces (see `megarl.data.loader.Feed`). An epoch ends when all its rows have been read.

    Rows that the reader leaves out are not replaced: an epoch gives fewer prompts than it has rows.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        reader: PromptReader,
        *,
        shuffle: bool,
        seed: int,
        window_rows: int,
        check: Callable[[pa.Table], None] | None = None,
    ) -> None:
        """
        Args:
            shuffle: a new order each epoch; else file order.
            seed: non-negative.
            window_rows: pieces are put together until they have this many rows.
            check: raises a ValueError for prompts that the run cannot use.

        Raises:
            ValueError: there are no rows.
        """
        assert seed >= 0 and window_rows >= 1, (seed, window_rows)
        if not pieces:
            raise ValueError("no prompts: the data files have no rows")
        self.num_rows = sum(piece.num_rows for piece in pieces)
        self.epoch = 0
        self._pieces = list(pieces)
        self._reader = reader
        self._shuffle = shuffle
        self._seed = seed
        self._window_rows = window_rows
        self._check = check
        self._begin_epoch(0)

    def _begin_epoch(self, read: int) -> None:
        """Go to the place in the epoch behind its first `read` rows."""
        self._read = read
        self._windows = self._cut_windows()
        self._rows: list[Row] = []  # the rows of the current window that are left, the next one last
        while self._windows and read >= (size := sum(piece.num_rows for piece in self._windows[0])):
            read -= size
            del self._windows[0]
        if read:
            self._open_window()
            del self._rows[len(self._rows) - read :]

    def _cut_windows(self) -> list[list[Piece]]:
        """The epoch's pieces in their order; pieces that are shuffled together are one list."""
        order = np.arange(len(self._pieces))
        if self._shuffle:
            order = np.random.default_rng((self._seed, self.epoch)).permutation(order)
        windows: list[list[Piece]] = []
        size = self._window_rows
        for number in order.tolist():
            if size >= self._window_rows:
                windows.append([])
                size = 0
            windows[-1].append(self._pieces[number])
            size += self._pieces[number].num_rows
        return windows

    def _open_window(self) -> None:
        window = self._windows.pop(0)
        rows = [row for piece in window for row in read_piece(piece, self._reader.columns)]
        if self._shuffle:
            number = len(self._windows)  # of windows after it: no two of an epoch have the same
            order = np.random.default_rng((self._seed, self.epoch, number)).permutation(len(rows))
            rows = [rows[position] for position in order.tolist()]
        self._rows = rows[::-1]

    @property
    def left(self) -> int:
        return self.num_rows - self._read

    def take(self, count: int) -> pa.Table | None:
        """ValueError: a row is wrong."""
        tables, num_prompts = [], 0
        while num_prompts < count and self.left:
            if not self._rows:
                self._open_window()
            size = min(count - num_prompts, len(self._rows))
            rows = [self._rows.pop() for _ in range(size)]
            self._read += size
            tables.append(self._reader.table(rows))
            self._reader.errors.raise_if_any()
            num_prompts += tables[-1].num_rows
        if num_prompts < count:
            return None
        table = pa.concat_tables(tables).combine_chunks()
        if self._check is not None:
            self._check(table)
        return table

    def next_epoch(self) -> None:
        self.epoch += 1
        self._begin_epoch(0)

    def report(self, uids: Sequence[str], scores: np.ndarray) -> None:
        """Streams do not learn from scores."""

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "num_pieces": len(self._pieces),
            "shuffle": self._shuffle,
            "seed": self._seed,
            "window_rows": self._window_rows,
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity(), "epoch": self.epoch, "read": self._read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(state, self._identity())
        self.epoch = state["epoch"]
        self._begin_epoch(state["read"])
