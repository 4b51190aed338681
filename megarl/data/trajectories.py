"""The trajectory table: the result of a rollout, one row a trajectory, nothing padded.

Guarantees, each asserted by a test:

- rows keep the order of the requests: the samples of a prompt are neighbours, whatever order the engines
  answer in;
- every request has exactly one generation and every generation its request;
- all response-aligned lists of a row (`response_mask`, `rollout_log_probs` and every appended list) have the
  length of its `response_ids`;
- `ragged` gives views of the Arrow buffers, not copies (booleans excepted: Arrow packs them in bits);
- gathered rows are those of Arrow's own `take`, and a block of memory is given out again only when no array and no column
  that was made on it is left.

The experts that tokens were routed to are a column where engines return them (routing.py): one entry for each token but the last. So are the
tokens that each token of a response was drawn from (kept.py): two columns of lists, one with a number for each token of the response.

A token of a response that the policy did not choose, an environment's, is false in `response_mask` and 0 in
`rollout_log_probs`.

Later stages append columns: `score` (float32, one a row) and the lists (float32) `token_level_rewards`,
`old_log_probs`, `ref_log_probs`, `full_kl` (the exact KL to the reference), `values`, `advantages`, `returns`.

`gather_lists` copies rows in another order once, into memory that the next step uses again (`Blocks`): a step's columns are
hundreds of MiB each. Memory that comes from the system is cleared page by page first, which takes longer than the copy, in a
virtual machine many times as long, and allocators give such blocks back at once or, as Arrow 26's does, after seconds.
"""

import itertools
import json
import mmap
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megarl.data.files import open_parquet, write_parquet
from megarl.data.kept import KEPT_COUNTS, KEPT_IDS, KeptTokens, kept_of
from megarl.data.routing import (
    ROUTED_EXPERTS,
    RoutingShape,
    binary_values,
    list_of_binary,
    routing_column,
)

_PAGE = 2 << 20  # bytes of a huge page, which the kernel clears and maps at once
_SPARE = 1.25  # a block is larger than its first array, as the next batch may be


class Blocks:
    """Memory that columns use again once earlier columns are gone."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def empty(self, num_values: int, dtype: npt.DTypeLike) -> np.ndarray:
        """An array [num_values] of arbitrary content; its memory comes back when nothing refers to it any more."""
        num_bytes = num_values * np.dtype(dtype).itemsize
        if num_bytes < _PAGE:
            return np.empty(num_values, dtype)
        block = self._fitting(num_bytes)
        # The base of all views of the block: numpy stops here, because the block below is no array.
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

    Whole rows are copied, once, and neighbours together, whatever chunks they lie in: Arrow 26 gathers lists value by value,
    ten times slower for rows of thousands.

    Args:
        chunks: one at least, of numbers, booleans or binary values of fixed size.
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
    binary = pa.types.is_fixed_size_binary(chunks[0].type.value_type)
    read = binary_values if binary else pa.Array.to_numpy
    lists = [(read(chunk.values), chunk.offsets.to_pylist()) for chunk in chunks]
    parts = [lists[chunk][0][lists[chunk][1][row] : lists[chunk][1][row + n]] for chunk, row, n in runs]
    flat = np.concatenate(parts, out=blocks.empty(int(offsets[-1]), parts[0].dtype))
    if binary:
        return list_of_binary(flat, offsets)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(flat), type=chunks[0].type)


_TEXT_BYTES = 2**30  # of a chunk of texts, but for the last one of them; Arrow's string offsets have 32 bits


def gather_texts(column: pa.ChunkedArray, rows: np.ndarray) -> pa.Array | pa.ChunkedArray:
    """Rows of a column of texts, in the given order: as one chunk or, of more bytes than that can have, as several.

    A program's tests may have megabytes, which all samples of its prompt repeat. Arrow 26's own `take` fails where the rows, or all chunks of
    the column together, have 2 GiB.

    Args:
        rows: int64, counted over all chunks.
    """
    ends = np.cumsum(pc.fill_null(pc.binary_length(column), 0).to_numpy()[rows].astype(np.int64))
    if max(column.nbytes, ends[-1] if len(rows) else 0) < 2 * _TEXT_BYTES:
        return column.take(pa.array(rows)).combine_chunks()
    starts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
    chunk_of = np.searchsorted(starts, rows, side="right") - 1
    places = list(zip(chunk_of.tolist(), (rows - starts[chunk_of]).tolist(), strict=True))
    bounds = [0, *(np.flatnonzero(np.diff(ends // _TEXT_BYTES)) + 1).tolist(), len(rows)]
    parts = [
        pa.concat_arrays([column.chunk(chunk).slice(row, 1) for chunk, row in places[begin:end]])
        for begin, end in itertools.pairwise(bounds)
        if end > begin
    ]
    return pa.chunked_array(parts, column.type)


PROMPT_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("extra_info", pa.string()),  # JSON
        ("prompt_ids", pa.list_(pa.int32())),
    ]
)
TRAJECTORY_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),  # "<prompt uid>/<sample number>", of sessions of agents as in sessions.py
        ("prompt_uid", pa.string()),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("extra_info", pa.string()),  # JSON
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),  # with the end token, if the response has one
        ("response_mask", pa.list_(pa.bool_())),  # true on tokens that the policy chose
        ("rollout_log_probs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("weight_version", pa.int64()),  # of the weights that chose the first token
        ("last_weight_version", pa.int64()),  # that chose the last one
        ("num_turns", pa.int64()),  # of the policy: 1 without an environment
        ("environment_score", pa.float32()),  # NaN: the environment gave none, or there is none
        # JSON: {"numbers": {...}, "error": text or null, "turns": [[first token of the response, state], ...]}; {} without one
        ("environment_notes", pa.string()),
    ]
)
# a prompt table whose prompts are repeated, one row for each sample to be generated
REQUEST_SCHEMA = pa.schema(
    [PROMPT_SCHEMA.field("uid"), ("prompt_uid", pa.string()), *list(PROMPT_SCHEMA)[1:]]
)
FINISH_REASONS = ("stop", "length")
MESSAGES = (
    "messages"  # prompts' chat messages as JSON: a column of all these tables if the prompt table has it
)
# the prompt's keywords for the chat template (tools and others) as JSON: another such column
TEMPLATE_KWARGS = "template_kwargs"
REF_PROMPT_IDS = (
    "ref_prompt_ids"  # the prompt that the reference reads in its place (int32 lists): another one
)
REF_TOP_TOKENS = "ref_top_tokens"
"""A column that learning appends: of each response token the log-probabilities of the reference's k most likely tokens, and their numbers,
float32 [2 k], as bytes."""
TEACHER = "teacher"  # the name of the teacher that judges the prompt's responses: another such column
CARRIED = (MESSAGES, TEMPLATE_KWARGS, REF_PROMPT_IDS, TEACHER)
POSITIONS = "positions"  # of texts: the tokens at which a model's outputs are wanted
SCORED_MASK = "scored_mask"  # `response_mask` before tokens were rejected, 1 on live tokens
GIVEN_RESPONSES = (
    "given_responses"  # of prompts: token ids of responses that are given (lists of int32 lists)
)
GIVEN = "given"
"""A column of trajectories, true where the response is a given one and not the policy's; missing where none is. Such a row has no score, and 0
as its `rollout_log_probs`."""

Ragged = tuple[np.ndarray, np.ndarray]
"""(flat values [total], offsets int64 [rows + 1]): row i is flat[offsets[i] : offsets[i + 1]]."""


@dataclass(frozen=True)
class Generation:
    """An engine's answer to one request. Fields with a default are set for trajectories with an environment."""

    uid: str
    response_ids: Sequence[int] | np.ndarray  # [response]
    log_probs: Sequence[float] | np.ndarray  # [response], of the chosen tokens by the engine
    finish_reason: str  # "stop" or "length"
    weight_version: int  # that chose the first token
    response_mask: Sequence[bool] | np.ndarray | None = None  # [response]; None: the policy chose every token
    num_turns: int = 1
    environment_score: float | None = None
    environment_notes: str = "{}"  # JSON
    prompt_ids: Sequence[int] | None = None  # None: the request's
    last_weight_version: int | None = None  # that chose the last token; None: the same
    routed_experts: np.ndarray | None = (
        None  # [prompt and response - 1, layers, top_k], see routing.py; None: unknown
    )
    kept: KeptTokens | None = None  # of the response's tokens; None: unknown, or no token was left out
    player: str | None = None  # of a session that has some; its uid says it, too (sessions.py)


# Fields that become a column each.
_COPIED = (
    "finish_reason",
    "weight_version",
    "last_weight_version",
    "num_turns",
    "environment_score",
    "environment_notes",
)


def expand_prompts(prompts: pa.Table, n: int) -> pa.Table:
    """Repeat each prompt n times, as neighbours: `uid` becomes "<uid>/<k>", `prompt_uid` the prompt's."""
    assert n >= 1, n
    check_schema(prompts, PROMPT_SCHEMA)
    prompt_uids = [uid for uid in prompts["uid"].to_pylist() for _ in range(n)]
    expanded = take(prompts, np.repeat(np.arange(prompts.num_rows), n))
    uids = [f"{uid}/{row % n}" for row, uid in enumerate(prompt_uids)]
    columns = {name: expanded[name] for name in PROMPT_SCHEMA.names} | {
        "uid": uids,
        "prompt_uid": prompt_uids,
    }
    requests = pa.table([columns[name] for name in REQUEST_SCHEMA.names], schema=REQUEST_SCHEMA)
    return with_carried(requests, expanded)


def build_trajectories(
    requests: pa.Table,
    generations: Iterable[Generation],
    routing: RoutingShape | None = None,
    keeps: bool = False,
) -> pa.Table:
    """Join requests (from `expand_prompts`) with their generations, which may come in any order.

    Args:
        routing: the shape of the experts that the generations name; a trajectory that failed before the policy's first turn
            has any experts, since no token of it counts. None: they name none.
        keeps: whether the table has the columns of kept tokens; a generation without them has none.

    Returns:
        A table of `TRAJECTORY_SCHEMA`, validated, rows in the order of the requests.

    Raises:
        ValueError: a request without generation or with two, a generation without request, or a bad
            generation (see `validate_trajectories`).
    """
    check_schema(requests, REQUEST_SCHEMA)
    by_uid: dict[str, Generation] = {}
    for generation in generations:
        if generation.uid in by_uid:
            raise ValueError(f"two generations for request {generation.uid}")
        by_uid[generation.uid] = generation
    uids = requests["uid"].to_pylist()
    missing = [uid for uid in uids if uid not in by_uid]
    unknown = sorted(set(by_uid) - set(uids))
    if missing or unknown:
        raise ValueError(
            f"{len(uids)} requests got {len(by_uid)} generations: no answer to {missing[:5]}, "
            f"no request for {unknown[:5]}"
        )
    # From here on everything is in the order of the requests.
    ordered = [by_uid[uid] for uid in uids]
    ids = from_lists([generation.response_ids for generation in ordered], np.int32)
    log_probs = from_lists([generation.log_probs for generation in ordered], np.float32)
    masks = from_lists([_response_mask(generation) for generation in ordered], np.bool_)
    columns = {name: requests[name] for name in REQUEST_SCHEMA.names} | {
        "prompt_ids": _prompts(requests, ordered),
        "response_ids": from_ragged(*ids),
        "response_mask": from_ragged(*masks),
        "rollout_log_probs": from_ragged(*log_probs),
    }
    for name in _COPIED:
        columns[name] = [getattr(generation, name) for generation in ordered]
    versions, scores = columns["last_weight_version"], columns["environment_score"]
    columns["last_weight_version"] = [
        first if last is None else last
        for first, last in zip(columns["weight_version"], versions, strict=True)
    ]
    columns["environment_score"] = [float("nan") if score is None else score for score in scores]
    table = pa.table([columns[name] for name in TRAJECTORY_SCHEMA.names], schema=TRAJECTORY_SCHEMA)
    if routing is not None:
        sizes = sequence_lengths(table) - 1
        routed = [
            routing.any_experts(size) if generation.routed_experts is None else generation.routed_experts
            for generation, size in zip(ordered, sizes, strict=True)
        ]
        table = table.append_column(ROUTED_EXPERTS, routing_column(routed, routing))
    if keeps:
        kept = [kept_of(generation.kept, len(generation.response_ids)) for generation in ordered]
        lists = {KEPT_IDS: [one.ids for one in kept], KEPT_COUNTS: [one.counts for one in kept]}
        for name, values in lists.items():
            table = table.append_column(name, from_ragged(*from_lists(values, np.int32)))
    # The users of log-probs decide about values that are not finite.
    validate_trajectories(table, finite=False)
    return with_carried(table, requests)


def _response_mask(generation: Generation) -> Sequence[bool] | np.ndarray:
    if generation.response_mask is None:
        return np.ones(len(generation.response_ids), dtype=np.bool_)
    return generation.response_mask


def _prompts(requests: pa.Table, generations: Sequence[Generation]) -> pa.ChunkedArray | pa.ListArray:
    """The column prompt_ids: the requests', unless an environment has added to a prompt."""
    if all(generation.prompt_ids is None for generation in generations):
        return requests["prompt_ids"]
    asked = requests["prompt_ids"].to_pylist()
    ids = [ids if g.prompt_ids is None else g.prompt_ids for ids, g in zip(asked, generations, strict=True)]
    return from_ragged(*from_lists(ids, np.int32))


@dataclass(frozen=True)
class EnvironmentNotes:
    """The numbers that the environment of a trajectory gave, and the error, if any, that cost the trajectory.

    Attributes:
        turns: of each turn of the policy the place of its first token in the response, and the environment's state before it.
    """

    numbers: dict[str, float]
    error: str | None
    turns: tuple[tuple[int, str], ...] = ()


def environment_notes(table: pa.Table) -> list[EnvironmentNotes]:
    """The notes of each row; empty where no environment took part."""
    if "environment_notes" not in table.column_names:
        return [EnvironmentNotes({}, None)] * table.num_rows
    notes = [json.loads(text) for text in table["environment_notes"].to_pylist()]
    return [
        EnvironmentNotes(note.get("numbers", {}), note.get("error"), tuple(map(tuple, note.get("turns", ()))))
        for note in notes
    ]


def with_carried(table: pa.Table, source: pa.Table) -> pa.Table:
    """`table` with those columns of CARRIED that `source`, which has the same rows, has."""
    for name in CARRIED:
        if name in source.column_names:
            table = table.append_column(name, source[name])
    return table


def validate_trajectories(table: pa.Table, *, finite: bool = True) -> None:
    """Check a trajectory table, appended columns included.

    Args:
        finite: whether log-probs must be finite.

    Raises:
        ValueError: a column is missing, of another type or has nulls; uids repeat; a prompt or response is
            empty; a response-aligned list has another length than its response; log-probs are not finite; an
            unknown finish reason; there are experts for more or fewer than all tokens but the last, or more or fewer kept tokens than
            counted. The first offending trajectory is named.
    """
    check_schema(table, TRAJECTORY_SCHEMA)
    uids = table["uid"].to_pylist()
    if len(set(uids)) != len(uids):
        raise ValueError(
            f"trajectory {next(uid for uid in uids if uids.count(uid) > 1)} occurs more than once"
        )
    lengths = list_lengths(table, "response_ids")
    for name, sizes in (("prompt_ids", list_lengths(table, "prompt_ids")), ("response_ids", lengths)):
        _refuse_rows(sizes == 0, uids, f"{name} is empty")
    for name in response_columns(table):
        _refuse_rows(
            list_lengths(table, name) != lengths, uids, f"{name} has another length than response_ids"
        )
    if ROUTED_EXPERTS in table.column_names:
        wrong = list_lengths(table, ROUTED_EXPERTS) != sequence_lengths(table) - 1
        _refuse_rows(wrong, uids, f"{ROUTED_EXPERTS} has no entry for each token but the last")
    if KEPT_IDS in table.column_names:
        counts, bounds = ragged(table, KEPT_COUNTS)
        totals = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])[bounds]
        wrong = list_lengths(table, KEPT_IDS) != np.diff(totals)
        _refuse_rows(wrong, uids, f"{KEPT_IDS} has another number of tokens than {KEPT_COUNTS} says")
    log_probs, offsets = ragged(table, "rollout_log_probs")
    wrong = np.flatnonzero(~np.isfinite(log_probs)) if finite else []
    bad_rows = np.zeros(len(uids), dtype=np.bool_)
    bad_rows[np.searchsorted(offsets, wrong, side="right") - 1] = True
    _refuse_rows(bad_rows, uids, "rollout_log_probs has values that are not finite")
    reasons = table["finish_reason"].to_pylist()
    unknown = np.array([reason not in FINISH_REASONS for reason in reasons], dtype=np.bool_)
    _refuse_rows(unknown, uids, f"finish_reason is none of {', '.join(FINISH_REASONS)}")


def _refuse_rows(bad: np.ndarray, uids: list[str], problem: str) -> None:
    if bad.any():
        first = uids[int(np.flatnonzero(bad)[0])]
        raise ValueError(f"trajectory {first}: {problem} ({int(bad.sum())} of {len(uids)} trajectories)")


def check_schema(table: pa.Table, schema: pa.Schema) -> None:
    """Check that a table has at least the columns of a schema, of these types and without nulls.

    Raises:
        ValueError: naming the column.
    """
    for field in schema:
        if field.name not in table.column_names:
            raise ValueError(
                f"column {field.name!r} is missing; the table has {', '.join(table.column_names)}"
            )
        found = table.schema.field(field.name).type
        if not found.equals(field.type):
            raise ValueError(f"column {field.name!r} has type {found}, expected {field.type}")
        if table[field.name].null_count:
            raise ValueError(f"column {field.name!r} has {table[field.name].null_count} nulls")


def response_columns(table: pa.Table) -> list[str]:
    """Names of the response-aligned list columns: all list columns but those of prompt or whole sequence."""
    others = ("prompt_ids", REF_PROMPT_IDS, ROUTED_EXPERTS, KEPT_IDS)
    return [field.name for field in table.schema if pa.types.is_list(field.type) and field.name not in others]


def list_lengths(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    """Length of each list of a column [rows]."""
    lengths = pc.list_value_length(table[name]).to_numpy()
    return lengths.astype(np.int64)


def sequence_lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    """Tokens of each trajectory, prompt and response [rows]."""
    return list_lengths(table, "prompt_ids") + list_lengths(table, "response_ids")


def ragged(table: pa.Table, name: str) -> Ragged:
    """Flat values and offsets of a list column.

    The values are a read-only view of the Arrow buffer where the column is one chunk (as tables of this
    module are, also from Ray's object store), and not boolean.
    """
    column = table[name]
    assert pa.types.is_list(column.type), f"{name} has type {column.type}, not a list"
    if column.num_chunks == 0:
        return np.empty(0, dtype=column.type.value_type.to_pandas_dtype()), np.zeros(1, dtype=np.int64)
    return _ragged_of(column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks), name)


def _ragged_of(array: pa.ListArray, name: str) -> Ragged:
    assert array.null_count == 0, f"{name} has null lists"
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    assert values.null_count == 0, f"{name} has null values"
    flat = values.to_numpy(zero_copy_only=not pa.types.is_boolean(values.type))
    return flat, offsets - offsets[0]


def from_ragged(flat: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    """List column of flat values [total] and offsets [rows + 1], which are not copied unless boolean."""
    assert flat.ndim == offsets.ndim == 1, (flat.shape, offsets.shape)
    assert offsets[0] == 0 and offsets[-1] == len(flat), (offsets, len(flat))
    assert len(flat) < 2**31, f"{len(flat)} values in one list column: Arrow's list offsets have 32 bits"
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(flat))


def from_lists(lists: Sequence[Sequence[float] | np.ndarray], dtype: npt.DTypeLike) -> Ragged:
    """Flat values and offsets of one sequence a row."""
    offsets = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(item) for item in lists], out=offsets[1:])
    flat = np.concatenate([np.empty(0, dtype=dtype), *(np.asarray(item, dtype=dtype) for item in lists)])
    return flat.astype(dtype, copy=False), offsets


def append_column(table: pa.Table, name: str, values: Ragged | np.ndarray | pa.ListArray) -> pa.Table:
    """Append a float32 column: response-aligned lists, also as (flat, offsets), or one value a row [rows].

    The rows must be the table's, in its order.
    """
    assert name not in table.column_names, f"column {name} is there already"
    if isinstance(values, tuple):
        values = from_ragged(np.asarray(values[0], dtype=np.float32), values[1])
    if isinstance(values, pa.ListArray):
        longer = table.append_column(name, values)
        aligned = np.array_equal(list_lengths(longer, name), list_lengths(table, "response_ids"))
        assert aligned, f"{name} is not aligned with response_ids"
        return longer
    assert values.shape == (table.num_rows,), (name, values.shape, table.num_rows)
    return table.append_column(name, pa.array(np.asarray(values, dtype=np.float32)))


def replace_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """The table with other values, of the same type, in a column."""
    at = table.schema.get_field_index(name)
    assert at >= 0 and values.type.equals(table.schema.field(name).type), (name, values.type)
    return table.set_column(at, table.schema.field(name), values)


def take(table: pa.Table, indices: Sequence[int] | np.ndarray, blocks: Blocks | None = None) -> pa.Table:
    """Rows of a table in the given order, each column one chunk, but for texts of gigabytes; `blocks`: where lists are copied to."""
    rows = np.asarray(indices, dtype=np.int64)
    columns = {
        field.name: gather_texts(table[field.name], rows)
        for field in table.schema
        if pa.types.is_string(field.type)
    }
    plain = [
        field.name
        for field in table.schema
        if field.name not in columns and not _is_ragged(table[field.name])
    ]
    chosen = table.select(plain).take(pa.array(rows)).combine_chunks() if plain else None
    columns |= {name: chosen[name] for name in plain}
    columns |= {
        field.name: gather_lists(table[field.name].chunks, rows, blocks)
        for field in table.schema
        if field.name not in columns
    }
    return pa.table([columns[field.name] for field in table.schema], schema=table.schema)


def combined(table: pa.Table) -> pa.Table:
    """The table with each column as one chunk, or, of more values than a chunk can have, as few."""
    try:
        return table.combine_chunks()
    except pa.ArrowInvalid:  # of lists alone: Arrow makes several chunks of texts by itself
        if table.num_rows < 2:
            raise
        middle = table.num_rows // 2
        return pa.concat_tables([combined(table.slice(0, middle)), combined(table.slice(middle))])


def _is_ragged(column: pa.ChunkedArray) -> bool:
    """Whether a column has lists of numbers, booleans or binary values without nulls, as `gather_lists` needs them."""
    if not pa.types.is_list(column.type) or column.num_chunks == 0 or column.null_count:
        return False
    kind = column.type.value_type
    known = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_fixed_size_binary)
    if not any(is_kind(kind) for is_kind in known):
        return False
    return not any(chunk.values.null_count for chunk in column.chunks)


def write_trajectories(table: pa.Table, path: str | Path) -> Path:
    """Write a trajectory table as Parquet, completely or not at all."""
    validate_trajectories(table)
    return write_parquet(table, path)


def read_trajectories(path: str | Path, *, finite: bool = True) -> pa.Table:
    """Read a table that `write_trajectories` wrote; `finite`: whether its log-probs must be finite.

    Raises:
        ValueError: the file is missing, no Parquet, or no valid trajectory table.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"trajectory file {path} does not exist")
    open_parquet(path).close()
    table = pq.read_table(path).combine_chunks()
    try:
        validate_trajectories(table, finite=finite)
    except ValueError as error:
        raise ValueError(f"{path} holds no valid trajectories: {error}") from error
    return table
