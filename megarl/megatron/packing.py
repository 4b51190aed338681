"""Packs micro-batches: their arrays are laid out on the host by numpy, and copied to the device at once.

Promises:
- A micro-batch is one buffer: on a GPU it is page-locked, and one copy brings it to the device while the host goes on.
- `MicroBatches` lays out each micro-batch while the one before it is computed, in a thread; what a consumer gets is the same
  as if all had been made before.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from megarl import platform
from megarl.data.balance import aligned_lengths, shared_tokens
from megarl.megatron.packed import PackedBatch, spans, zigzag

_ALIGNMENT = 64  # bytes: of each array's start in a micro-batch's buffer
_FIELD = "fields."
_TORCH = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bool": torch.bool}


@dataclass(frozen=True, eq=False)
class HostBatch:
    """A `PackedBatch` before it is on the device.

    Attributes:
        buffer: the bytes of all its tensors.
        tensors: where each begins, its type and its shape, by name; those of fields as "fields.<name>".
        facts: the rest of it.
    """

    buffer: np.ndarray
    tensors: dict[str, tuple[int, np.dtype, tuple[int, ...]]]
    facts: dict[str, Any]

    def on_device(self, device: torch.device | None = None) -> PackedBatch:
        """
        Args:
            device: where the tensors are put; None: this process's device.
        """
        device, whole = device or platform.device(), torch.from_numpy(self.buffer)
        if device.type == "cuda":
            # Torch keeps page-locked memory until the copies from it have been made.
            whole = whole.pin_memory().to(device, non_blocking=True)
        tensors, fields = {}, {}
        for name, (start, dtype, shape) in self.tensors.items():
            stop = start + math.prod(shape) * dtype.itemsize
            tensor = whole[start:stop].view(_TORCH[dtype.name]).view(shape)
            target, key = (fields, name.removeprefix(_FIELD)) if name.startswith(_FIELD) else (tensors, name)
            target[key] = tensor
        batch = PackedBatch(fields=fields, **tensors, **self.facts)
        batch.cu_seqlens.positions = batch.position_ids[0]
        return batch


class MicroBatches(Sequence[PackedBatch]):
    """Micro-batches that are laid out one ahead of the one that was asked for last, and kept."""

    def __init__(self, arrangements: Iterable[Callable[[], HostBatch]]) -> None:
        """
        Args:
            arrangements: one for each micro-batch; called in a thread, once, in their order.
        """
        self._arrangements = list(arrangements)
        self._made: list[PackedBatch] = []
        self._next: Future[HostBatch] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._arrangements)

    def __getitem__(self, index: int) -> PackedBatch:
        """Raises what laying it out raises."""
        number = range(len(self))[index]
        while len(self._made) <= number:
            self._made.append(self._take())
        return self._made[number]

    def _take(self) -> PackedBatch:
        """The first one that has not been made; the one after it is begun."""
        number = len(self._made)
        found = self._arrangements[number]() if self._next is None else self._next.result()
        self._next = None
        if number + 1 < len(self):
            self._thread = self._thread or ThreadPoolExecutor(1, "packing")
            self._next = self._thread.submit(self._arrangements[number + 1])
        elif self._thread is not None:
            self._thread.shutdown(wait=False)
        return found.on_device()


def pack_trajectories(*args: Any, device: torch.device | None = None, **options: Any) -> PackedBatch:
    """As `arrange_trajectories`, on the device (None: this process's)."""
    return arrange_trajectories(*args, **options).on_device(device)


def pack_sequences(*args: Any, device: torch.device | None = None, **options: Any) -> PackedBatch:
    """As `arrange_sequences`, on the device (None: this process's)."""
    return arrange_sequences(*args, **options).on_device(device)


def pack_texts(*args: Any, device: torch.device | None = None, **options: Any) -> PackedBatch:
    """As `arrange_texts`, on the device (None: this process's)."""
    return arrange_texts(*args, **options).on_device(device)


def arrange_trajectories(
    table: pa.Table,
    rows: Sequence[int],
    fields: Sequence[str] = (),
    *,
    tp: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    sequence_parallel: bool = False,
    share_prompts: bool = False,
) -> HostBatch:
    """Arrange the trajectories `rows` of `table`; the mask is `response_mask`, predicted are the response tokens.

    Args:
        table: columns `prompt_ids`, `response_ids`, `response_mask` and those in `fields`, one list a row.
        fields: names of columns with one value a response token.
        share_prompts: pack a prompt once for all neighbours that have it (`shared_tokens`).

    Raises:
        ValueError: a column is missing, has nulls, or does not fit the responses; an empty prompt (its first
            response token would have no position that predicts it).
    """
    prompts, prompt_lengths = _ragged(table, rows, "prompt_ids")
    responses, counts = _ragged(table, rows, "response_ids")
    if not prompt_lengths.all():
        raise ValueError(f"row {rows[int(np.argmin(prompt_lengths))]} has an empty prompt_ids")
    shared = None
    if share_prompts:
        shared = shared_tokens(prompts, prompt_lengths)
        ends = np.cumsum(prompt_lengths)
        prompt_lengths = prompt_lengths - shared
        prompts = prompts[spans(ends - prompt_lengths, prompt_lengths)]
    places = _place(prompt_lengths + counts, prompt_lengths - 1, counts, tp, cp, sequence_parallel)
    ids = np.zeros(places.size, np.int64)
    ids[spans(places.starts, prompt_lengths)] = prompts
    ids[spans(places.starts + prompt_lengths, counts)] = responses
    where = spans(places.first, counts)
    columns = {}
    for name in ("response_mask", *fields):
        values, lengths = _ragged(table, rows, name)
        if not np.array_equal(lengths, counts):
            row = int(np.argmax(lengths != counts))
            raise ValueError(
                f"row {rows[row]}: column {name!r} has {lengths[row]} values for {counts[row]} response tokens"
            )
        columns[name] = np.zeros(places.size, bool if values.dtype == bool else np.float32)
        columns[name][where] = values
    mask = columns.pop("response_mask").astype(bool)
    return _shard(ids, mask, columns, places, cp, cp_rank, shared)


def arrange_sequences(
    table: pa.Table,
    rows: Sequence[int],
    *,
    tp: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    sequence_parallel: bool = False,
) -> HostBatch:
    """Arrange the sequences `rows` of `table`; position t predicts token t+1, whose `loss_mask` is its mask.

    Args:
        table: columns `input_ids` and `loss_mask` (bool, one value a token), one list a row.

    Raises:
        ValueError: a column is missing, has nulls or does not fit the other; an empty sequence.
    """
    tokens, lengths = _ragged(table, rows, "input_ids")
    values, mask_lengths = _ragged(table, rows, "loss_mask")
    if not np.array_equal(lengths, mask_lengths):
        row = int(np.argmax(lengths != mask_lengths))
        raise ValueError(
            f"row {rows[row]}: column 'loss_mask' has {mask_lengths[row]} values for {lengths[row]} input_ids"
        )
    if not lengths.all():
        raise ValueError(f"row {rows[int(np.argmin(lengths))]} has an empty input_ids")
    places = _place(lengths, np.zeros_like(lengths), lengths - 1, tp, cp, sequence_parallel)
    ids = np.zeros(places.size, np.int64)
    ids[spans(places.starts, lengths)] = tokens
    # A sequence's first token is predicted by none: its value in the mask is the one that falls away.
    predicted = np.ones(len(values), bool)
    predicted[np.cumsum(lengths) - lengths] = False
    mask = np.zeros(places.size, bool)
    mask[spans(places.first, places.counts)] = values[predicted]
    return _shard(ids, mask, {}, places, cp, cp_rank)


def arrange_texts(
    table: pa.Table,
    rows: Sequence[int],
    *,
    tp: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    sequence_parallel: bool = False,
) -> HostBatch:
    """Arrange the sequences `rows` of `table` for one number each, at its last token: the mask is true there alone, and
    `unpack` gives that one value.

    Args:
        table: column `input_ids`, one list a row.

    Raises:
        ValueError: the column is missing or has nulls; an empty sequence.
    """
    tokens, lengths = _ragged(table, rows, "input_ids")
    if not lengths.all():
        raise ValueError(f"row {rows[int(np.argmin(lengths))]} has an empty input_ids")
    places = _place(lengths, lengths - 1, np.ones_like(lengths), tp, cp, sequence_parallel)
    ids, mask = np.zeros(places.size, np.int64), np.zeros(places.size, bool)
    ids[spans(places.starts, lengths)] = tokens
    mask[places.first] = True
    return _shard(ids, mask, {}, places, cp, cp_rank)


def _ragged(table: pa.Table, rows: Sequence[int], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The lists of column `name` at `rows`, end to end, and their lengths (int64)."""
    if name not in table.column_names:
        raise ValueError(f"column {name!r} is missing; the table has {', '.join(table.column_names)}")
    column = table.column(name).take(pa.array(rows, pa.int64())).combine_chunks()
    flat = column.flatten()
    if column.null_count or flat.null_count:
        raise ValueError(f"column {name!r} has nulls")
    lengths = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return flat.to_numpy(zero_copy_only=False), lengths


@dataclass(frozen=True, eq=False)
class _Places:
    """Where sequences lie among all packed positions; int64 arrays, one value a sequence."""

    starts: np.ndarray
    ends: np.ndarray  # of the aligned sequences
    lengths: np.ndarray
    first: np.ndarray
    counts: np.ndarray

    @property
    def size(self) -> int:
        return int(self.ends[-1])


def _place(
    lengths: np.ndarray, before: np.ndarray, counts: np.ndarray, tp: int, cp: int, sequence_parallel: bool
) -> _Places:
    """Lay sequences of `lengths` tokens end to end, aligned; `before` tokens precede the first predictor."""
    assert len(lengths) > 0, "a packed batch holds at least one sequence"
    aligned = aligned_lengths(lengths, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    ends = np.cumsum(aligned)
    starts = ends - aligned
    return _Places(starts, ends, lengths, starts + before, counts)


def _shard(
    ids: np.ndarray,
    mask: np.ndarray,
    fields: Mapping[str, np.ndarray],
    places: _Places,
    cp: int,
    cp_rank: int,
    shared: np.ndarray | None = None,
) -> HostBatch:
    """The arrays of context-parallel rank `cp_rank`, from arrays over all packed positions."""
    sizes = places.ends - places.starts
    before = np.zeros_like(sizes) if shared is None else shared
    assert cp == 1 or not before.any(), "prompts are shared on one context parallel rank"
    labels = np.zeros_like(ids)
    where = spans(places.starts, places.lengths - 1)
    labels[where] = ids[where + 1]
    bounds = np.concatenate([[0], places.ends])
    local = zigzag(bounds, cp)[cp_rank]
    arrays = {
        "input_ids": ids[None, local],
        "position_ids": spans(before, sizes)[None, local],
        "labels": labels[local],
        "mask": mask[local],
        "live": np.flatnonzero(mask[local]),
        "cu_seqlens": bounds.astype(np.int32),
        **{f"{_FIELD}{name}": values[local] for name, values in fields.items()},
    }
    facts = {
        "aligned": sizes,
        "max_seqlen": int((before + sizes).max()),
        "lengths": places.lengths,
        "first": places.first,
        "counts": places.counts,
        "cp": cp,
        "cp_rank": cp_rank,
        "shared": before if before.any() else None,
    }
    buffer, starts = _buffer(arrays)
    tensors = {name: (starts[name], array.dtype, array.shape) for name, array in arrays.items()}
    return HostBatch(buffer, tensors, facts)


def _buffer(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, int]]:
    """The bytes of all arrays, and where each begins."""
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name], end = end, -(-(end + array.nbytes) // _ALIGNMENT) * _ALIGNMENT
    buffer = np.zeros(end, np.uint8)
    for name, array in arrays.items():
        buffer[starts[name] : starts[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
    return buffer, starts
