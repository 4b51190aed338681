"""Packed (THD) micro-batches: ragged sequences laid end to end on the host, sharded over context-parallel ranks, copied to the device.

Promises:
- No padding but alignment. With context parallelism every sequence is lengthened to a multiple of 2*cp; with
  sequence parallelism the last sequence is lengthened further, until every rank's tokens divide by tp; for
  products in float8, until they are multiples of what these need. Added tokens have id 0, a false mask and zero fields; `PackedBatch.num_padding` counts them. Attention is causal,
  so tokens at a sequence's end change nothing before them.
- Context-parallel sharding is Transformer Engine's for THD: of each sequence's 2*cp equal chunks, rank r
  holds chunk r and then chunk 2*cp-1-r.
- Tokens further ahead (`LaterTokens`) are of the same sequence, whichever context parallel rank has them.
- Predictor alignment: everything that belongs to a predicted token (label, mask, fields) lies at the position
  before it, where the hidden state that predicts it is.
- `unpack` inverts it: one array a sequence, in the order in which the sequences were packed.
- A micro-batch is one buffer, filled by numpy: on a GPU it is page-locked, and one copy brings it to the device while the host goes on.
- `MicroBatches` packs each micro-batch in a thread while the one before it is computed; a consumer gets the same batches
  as if all had been packed before.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl import platform
from megarl.data.balance import aligned_lengths, shared_tokens
from megarl.data.kept import KEPT_COUNTS, KEPT_IDS
from megarl.data.routing import RoutingShape, binary_values, routings
from megarl.data.trajectories import POSITIONS


@dataclass(frozen=True, eq=False)
class OtherHead:
    """The head of another model, for its logits at a batch's live positions, in the layout of the model that is run.

    Attributes:
        hidden: [live, hidden]; its last hidden states.
        weight: [padded vocab/tp, its hidden]; this rank's rows of its output weight.
        beta: which divergence of the two is computed (`heads.divergence.token_divergence`).
    """

    hidden: Tensor
    weight: Tensor
    beta: float = 1.0


@dataclass(frozen=True, eq=False)
class LaterTokens:
    """The tokens after the one that each position predicts, for layers of multi-token prediction.

    Attributes:
        ids: int64 [depth, tokens]; row k has the token k + 2 places later, 0 where the sequence has ended.
        live: int64 [sum of `counts`]; row by row, the positions whose token is of the sequence and counts in losses.
        counts: how many positions of each row count.
    """

    ids: Tensor
    live: Tensor
    counts: tuple[int, ...]

    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """The tokens [live] and the positions [live] of each row that count."""
        return [(ids[live], live) for ids, live in zip(self.ids, self.live.split(self.counts), strict=True)]


@dataclass(frozen=True, eq=False)
class KeptVocabulary:
    """The tokens that the token at each live position was drawn from (data/kept.py).

    Attributes:
        ids: int32 [sum of counts]; of one position after the other.
        counts: int64 [live].
        bounds: int64 [live + 1]; where each position's tokens begin in `ids`, on the host.
    """

    ids: Tensor
    counts: Tensor
    bounds: np.ndarray


@dataclass
class PackedBounds(PackedSeqParams):
    """Megatron's bounds of packed sequences, and the facts of a batch that layers need in addition.

    Attributes:
        live: this rank's positions that the last layer's MLP is asked for (`LiveLayer`); None: all.
        lengths: of the aligned sequences, which layers would otherwise have to ask the device for.
        shared: as `PackedBatch.shared`.
        experts, is_routed: the experts that routers are to choose, and where (router_replay.py).
        mask: the positions whose experts are counted (expert_load.py).
        later, later_live: the tokens that each layer of multi-token prediction is given, [tokens] each, and the positions at which its
            prediction counts.
        texts: the true lengths of the sequences.
        choices: of keys, which later layers take, by the number of the layer whose indexer made them (sparse/attention.py).
    """

    live: Tensor | None = None
    lengths: list[int] | None = None
    shared: list[int] | None = None
    experts: Tensor | None = None
    is_routed: Tensor | None = None
    mask: Tensor | None = None
    later: list[Tensor] | None = None
    later_live: list[Tensor] | None = None
    texts: list[int] | None = None
    choices: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One rank's share of a packed micro-batch; `tokens` counts this rank's tokens.

    Attributes:
        input_ids, position_ids: int64 [1, tokens].
        labels: int64 [tokens]; the token that each position predicts, 0 where it predicts none.
        mask: bool [tokens]; where the predicted token counts in losses.
        live: int64; the positions where `mask` is true (known here without asking the device).
        fields: further values of predicted tokens, float32 or bool [tokens] or [tokens, n], by column name.
        cu_seqlens: int32 [sequences + 1]; bounds of the aligned sequences over all context-parallel ranks. Its attribute `positions` is
            `position_ids` [tokens], since Megatron hands its rotary embedding these bounds and nothing else of a batch.
        aligned: int64 [sequences]; lengths of the aligned sequences, on the host.
        max_seqlen: tokens of the longest aligned sequence.
        lengths: int64 [sequences]; true lengths.
        first, counts: int64 [sequences]; sequence i's predicted tokens belong to the `counts[i]` packed
            positions (over all context-parallel ranks) from `first[i]`.
        cp, cp_rank: context-parallel size and this rank in it.
        other: another model's head on the live positions, to be compared with; None: there is none.
        shared: int64 [sequences]; how many tokens before its own a sequence has in common with the nearest earlier one that
            shares none, which alone holds them; None: each sequence holds all its tokens.
        experts: uint8 or int16 [tokens, this rank's layers with experts, top_k]; the experts that routers are to choose; None: their own.
        is_routed: bool [tokens]; where `experts` has some. At others, such as a sequence's last token, routers choose themselves.
        later: what layers of multi-token prediction predict; None: they are not run.
        kept: the kept tokens of live positions, over which their log-probs are computed; None: all tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    mask: Tensor
    live: Tensor
    fields: dict[str, Tensor]
    cu_seqlens: Tensor
    aligned: np.ndarray
    max_seqlen: int
    lengths: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    cp: int
    cp_rank: int
    other: OtherHead | None = None
    shared: np.ndarray | None = None
    experts: Tensor | None = None
    is_routed: Tensor | None = None
    later: LaterTokens | None = None
    kept: KeptVocabulary | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank, alignment included."""
        return self.input_ids.shape[1]

    @property
    def num_padding(self) -> int:
        """Tokens over all context-parallel ranks that are there for alignment only."""
        return self.num_tokens * self.cp - int(self.lengths.sum())

    def packed_seq_params(self, live_only: bool = False) -> PackedBounds:
        """The sequences' bounds, as Megatron's attention and rotary embedding need them.

        Args:
            live_only: whether the last hidden states are asked for at the live positions alone. Where the last layer can do so
                (`LiveLayer`) they are then [live, 1, hidden], elsewhere [tokens, 1, hidden]: `live_rows` takes both.
        """
        # Aligned lengths serve as the true ones: attention then runs over the alignment tokens at each
        # end, which costs a few tokens and spares the kernels the case of gaps between sequences.
        return PackedBounds(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            cu_seqlens_q_padded=self.cu_seqlens,
            cu_seqlens_kv_padded=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
            pad_between_seqs=False,
            live=self.live if live_only else None,
            lengths=self.aligned.tolist(),
            shared=None if self.shared is None else self.shared.tolist(),
            experts=self.experts,
            is_routed=self.is_routed,
            mask=self.mask,
            later=None if self.later is None else [self.labels, *self.later.ids[:-1]],
            later_live=None if self.later is None else [live for _, live in self.later.rows()],
            texts=self.lengths.tolist(),
        )

    def live_rows(self, hidden: Tensor) -> Tensor:
        """`hidden` at the live positions, [live, ...], of hidden states of these or of all positions."""
        if hidden.shape[0] == self.live.shape[0]:  # they are, or all positions are live
            return hidden
        assert hidden.shape[0] == self.num_tokens, (hidden.shape, self.num_tokens)
        return hidden.index_select(0, self.live)


def unpack(batch: PackedBatch, values: Tensor, cp_group: dist.ProcessGroup | None = None) -> list[np.ndarray]:
    """Split per-token `values` [tokens, ...] into one array a sequence: the values of its predicted tokens.

    Args:
        cp_group: the context-parallel group; needed with cp > 1, where it is a collective over that group.

    Returns: for each sequence an array [counts[i], ...] (the response, for trajectories) of the values' dtype.
    """
    assert values.shape[0] == batch.num_tokens, (values.shape, batch.num_tokens)
    whole = _all_positions(batch, values, cp_group)
    return np.split(whole[spans(batch.first, batch.counts)], np.cumsum(batch.counts)[:-1])


def unpack_tokens(
    batch: PackedBatch, values: Tensor, cp_group: dist.ProcessGroup | None = None
) -> list[np.ndarray]:
    """As `unpack`, but values [tokens, ...] of all tokens of each sequence, predicted or not: [lengths[i], ...]."""
    assert values.shape[0] == batch.num_tokens, (values.shape, batch.num_tokens)
    whole, starts = _all_positions(batch, values, cp_group), np.cumsum(batch.aligned) - batch.aligned
    return [whole[start : start + length] for start, length in zip(starts, batch.lengths, strict=True)]


def _all_positions(batch: PackedBatch, values: Tensor, cp_group: dist.ProcessGroup | None) -> np.ndarray:
    """The values [tokens, ...] of all context-parallel ranks, in the order of the packed sequences."""
    local = values.detach().contiguous()
    if batch.cp == 1:
        return local.cpu().numpy()
    assert cp_group is not None and cp_group.size() == batch.cp
    shards = [torch.empty_like(local) for _ in range(batch.cp)]
    dist.all_gather(shards, local, group=cp_group)
    stacked = torch.stack(shards).cpu().numpy()
    whole = np.empty((stacked.shape[0] * stacked.shape[1], *stacked.shape[2:]), stacked.dtype)
    whole[zigzag(np.cumsum([0, *batch.aligned]), batch.cp)] = stacked
    return whole


def zigzag(bounds: np.ndarray, cp: int) -> np.ndarray:
    """Packed positions that each context-parallel rank holds, in its order: int64 [cp, tokens / cp].

    Args:
        bounds: int64 [sequences + 1], starts of the sequences and the end; lengths are multiples of 2*cp.
    """
    if cp == 1:
        return np.arange(bounds[-1])[None]
    chunk = np.diff(bounds) // (2 * cp)
    starts = bounds[:-1]
    ranks = [
        spans(
            np.stack([starts + rank * chunk, starts + (2 * cp - 1 - rank) * chunk], axis=1).reshape(-1),
            np.repeat(chunk, 2),
        )
        for rank in range(cp)
    ]
    return np.stack(ranks)


def spans(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers starts[i], starts[i] + 1, ... (counts[i] of them) for each i, end to end."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


_ALIGNMENT = 64  # bytes: of each array's start in a micro-batch's buffer
_FIELD = "fields."
_TORCH = {
    **{"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bool": torch.bool},
    **{"uint8": torch.uint8, "int16": torch.int16},
}


@dataclass(frozen=True, eq=False)
class HostBatch:
    """A `PackedBatch` before it is on the device.

    Attributes:
        buffer: the bytes of all its tensors.
        tensors: start, type and shape of each, by name; fields are called "fields.<name>".
        facts: its other attributes.
        later_counts: of its `LaterTokens`.
        kept_bounds: of its `KeptVocabulary`.
    """

    buffer: np.ndarray
    tensors: dict[str, tuple[int, np.dtype, tuple[int, ...]]]
    facts: dict[str, Any]
    later_counts: tuple[int, ...] = ()
    kept_bounds: np.ndarray | None = None

    def on_device(self, device: torch.device | None = None) -> PackedBatch:
        """The batch, with its tensors on a device.

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
        later = None
        if "later_ids" in tensors:
            later = LaterTokens(tensors.pop("later_ids"), tensors.pop("later_live"), self.later_counts)
        kept = None
        if self.kept_bounds is not None:
            kept = KeptVocabulary(tensors.pop("kept_ids"), tensors.pop("kept_counts"), self.kept_bounds)
        batch = PackedBatch(fields=fields, later=later, kept=kept, **tensors, **self.facts)
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
        """Raises the errors of its packing function."""
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


@dataclass(frozen=True)
class Routing:
    """Which layers' experts of trajectories are packed: this rank's layers, by their numbers among the layers with experts."""

    shape: RoutingShape
    layers: tuple[int, ...]


class Alignment(TypedDict, total=False):
    """How sequences are aligned and cut over ranks; sizes are 1, and the others 0 and false, where they are not given.

    tp, cp: tensor and context parallel sizes.
    cp_rank: the context parallel rank whose part is arranged.
    sequence_parallel: whether tensor parallel ranks share a rank's tokens.
    multiple: divides the tokens of each rank's part (`MegatronConfig.token_multiple`).
    """

    tp: int
    cp: int
    cp_rank: int
    sequence_parallel: bool
    multiple: int


def arrange_trajectories(
    table: pa.Table,
    rows: Sequence[int],
    fields: Sequence[str] = (),
    *,
    share_prompts: bool = False,
    routing: Routing | None = None,
    depth: int = 0,
    keeps: bool = False,
    **alignment: Unpack[Alignment],
) -> HostBatch:
    """Arrange the trajectories `rows` of `table`; the mask is `response_mask`, and the response tokens are predicted.

    Args:
        table: columns `prompt_ids`, `response_ids`, `response_mask` and all in `fields`, one list a row.
        fields: names of columns with one value a response token, a number or the bytes of several in float32.
        share_prompts: pack a prompt once for all neighbours that have it (`shared_tokens`).
        routing: which experts of the trajectories are packed; None: none.
        depth: rows of `LaterTokens`; 0: the batch has none.
        keeps: pack the tokens that response tokens were drawn from (`KeptVocabulary`), if the table has them.

    Raises:
        ValueError: a column is missing, has nulls, or does not fit the responses; an empty prompt (its first
            response token would have no position that predicts it); a live token was not drawn from its kept tokens.
    """
    prompts, prompt_lengths = _ragged(table, rows, "prompt_ids")
    responses, counts = _ragged(table, rows, "response_ids")
    _refuse_empty(prompt_lengths, rows, "prompt_ids")
    shared = None
    if share_prompts:
        # The first sequence of a prompt holds all of it; the others keep the end that they do not share.
        shared = shared_tokens(prompts, prompt_lengths)
        ends = np.cumsum(prompt_lengths)
        prompt_lengths = prompt_lengths - shared
        prompts = prompts[spans(ends - prompt_lengths, prompt_lengths)]
    columns = {}
    for name in ("response_mask", *fields):
        columns[name], lengths = _ragged(table, rows, name)
        if not np.array_equal(lengths, counts):
            row = int(np.argmax(lengths != counts))
            raise ValueError(
                f"row {rows[row]}: column {name!r} has {lengths[row]} values for {counts[row]} response tokens"
            )
    lengths = prompt_lengths + counts
    starts = np.cumsum(lengths) - lengths
    tokens = np.empty(lengths.sum(), np.int64)
    tokens[spans(starts, prompt_lengths)] = prompts
    tokens[spans(starts + prompt_lengths, counts)] = responses
    mask, experts = columns.pop("response_mask"), None
    if routing is not None:
        assert not share_prompts, "models with experts do not share prompts"
        experts, routed = routings(table, rows, routing.shape, routing.layers)
        if not np.array_equal(routed, lengths - 1):
            row = int(np.argmax(routed != lengths - 1))
            raise ValueError(
                f"row {rows[row]}: {lengths[row]} tokens have {routed[row]} entries of experts, not one less"
            )
    assert not (depth and share_prompts), "layers of multi-token prediction have sequences of their own"
    kept = _kept(table, rows, responses, mask) if keeps and KEPT_IDS in table.column_names else None
    given = (tokens, lengths, prompt_lengths - 1, counts, mask, columns, shared, experts, depth, kept)
    return _arrange(*given, **alignment)


def _kept(
    table: pa.Table, rows: Sequence[int], responses: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The kept tokens of all response tokens of `rows`, end to end, and how many each has (int64)."""
    ids, _ = _ragged(table, rows, KEPT_IDS)
    counts = _ragged(table, rows, KEPT_COUNTS)[0].astype(np.int64)
    if len(counts) != len(responses) or counts.sum() != len(ids):
        raise ValueError(
            f"columns {KEPT_COUNTS!r} and {KEPT_IDS!r} have {len(counts)} counts for {len(responses)} response tokens and {len(ids)} tokens for "
            f"{counts.sum()} that are counted"
        )
    drawn = np.repeat(np.arange(len(counts)), counts)[ids == np.repeat(responses, counts)]
    missing = np.array(mask, dtype=bool)
    missing[drawn] = False
    if missing.any():
        raise ValueError(
            f"column {KEPT_IDS!r}: {missing.sum()} of {np.sum(mask)} live tokens are not among their own, such as token "
            f"{responses[int(missing.argmax())]}: they were drawn otherwise"
        )
    return ids, counts


def arrange_sequences(
    table: pa.Table, rows: Sequence[int], *, depth: int = 0, **alignment: Unpack[Alignment]
) -> HostBatch:
    """Arrange the sequences `rows` of `table`; position t predicts token t+1, whose `loss_mask` is its mask.

    Args:
        table: columns `input_ids` and `loss_mask` (bool, one value a token), one list a row.
        depth: rows of `LaterTokens`; 0: the batch has none.

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
    _refuse_empty(lengths, rows, "input_ids")
    # No position predicts a sequence's first token: its value in the mask is dropped.
    mask = np.delete(values, np.cumsum(lengths) - lengths)
    return _arrange(tokens, lengths, np.zeros_like(lengths), lengths - 1, mask, depth=depth, **alignment)


def arrange_texts(table: pa.Table, rows: Sequence[int], **alignment: Unpack[Alignment]) -> HostBatch:
    """Arrange the sequences `rows` of `table` for one number each, at its last token: the mask is true there alone, and
    `unpack` gives that one value. With the column POSITIONS the mask is true at these, and `unpack` gives the values from the first to the
    last of them.

    Args:
        table: column `input_ids`, one list a row; optionally POSITIONS, ascending numbers of its tokens, at least one a row.

    Raises:
        ValueError: the column is missing or has nulls; an empty sequence.
    """
    tokens, lengths = _ragged(table, rows, "input_ids")
    _refuse_empty(lengths, rows, "input_ids")
    if POSITIONS not in table.column_names:
        ones = np.ones_like(lengths)
        return _arrange(tokens, lengths, lengths - 1, ones, ones, **alignment)
    positions, numbers = _ragged(table, rows, POSITIONS)
    _refuse_empty(numbers, rows, POSITIONS)
    ends = np.cumsum(numbers)
    first, last = positions[ends - numbers].astype(np.int64), positions[ends - 1].astype(np.int64)
    assert (last < lengths).all(), "positions are those of tokens"
    counts = last - first + 1
    mask = np.zeros(counts.sum(), np.bool_)
    mask[np.repeat(np.cumsum(counts) - counts - first, numbers) + positions] = True
    return _arrange(tokens, lengths, first, counts, mask, **alignment)


def _refuse_empty(lengths: np.ndarray, rows: Sequence[int], name: str) -> None:
    if not lengths.all():
        raise ValueError(f"row {rows[int(np.argmin(lengths))]} has an empty {name}")


def _ragged(table: pa.Table, rows: Sequence[int], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The lists of column `name` at `rows`, end to end, and their lengths (int64)."""
    if name not in table.column_names:
        raise ValueError(f"column {name!r} is missing; the table has {', '.join(table.column_names)}")
    column = table.column(name).take(pa.array(rows, pa.int64())).combine_chunks()
    flat = column.flatten()
    if column.null_count or flat.null_count:
        raise ValueError(f"column {name!r} has nulls")
    lengths = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_fixed_size_binary(flat.type):
        return binary_values(flat).view(np.float32).reshape(len(flat), -1), lengths
    return flat.to_numpy(zero_copy_only=False), lengths


def _arrange(
    tokens: np.ndarray,
    lengths: np.ndarray,
    before: np.ndarray,
    counts: np.ndarray,
    mask: np.ndarray,
    fields: Mapping[str, np.ndarray] | None = None,
    shared: np.ndarray | None = None,
    experts: np.ndarray | None = None,
    depth: int = 0,
    kept: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    tp: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    sequence_parallel: bool = False,
    multiple: int = 1,
) -> HostBatch:
    """Lay sequences end to end, aligned, and take this context parallel rank's part.

    Args:
        tokens: [sum of lengths]; of all sequences.
        lengths, before, counts: one value a sequence: its tokens, the ones before the first predictor, and the predicted ones.
        mask, fields: [sum of counts]; values of the predicted tokens.
        shared: see `PackedBatch`.
        experts: [sum of lengths - 1, layers, top_k]; of all tokens but each sequence's last.
        depth: rows of `LaterTokens`.
        kept: [sum of the second], [sum of counts]; kept tokens of all predicted tokens, and how many each has.
    """
    assert len(lengths) > 0, "a packed batch holds at least one sequence"
    aligned = aligned_lengths(lengths, tp=tp, cp=cp, sequence_parallel=sequence_parallel, multiple=multiple)
    bounds = np.concatenate([[0], np.cumsum(aligned)])
    starts, local = bounds[:-1], zigzag(bounds, cp)[cp_rank]
    earlier = np.zeros_like(aligned) if shared is None else shared
    assert cp == 1 or not earlier.any(), "prompts are shared on one context parallel rank"

    def spread(values: np.ndarray, dtype: npt.DTypeLike, places: np.ndarray) -> np.ndarray:
        """The values at these packed positions, 0 elsewhere: this rank's part."""
        full = np.zeros((bounds[-1], *values.shape[1:]), dtype)
        full[places] = values
        return full[local]

    not_first = np.delete(tokens, np.cumsum(lengths) - lengths)
    predictors = spans(starts + before, counts)
    own_mask = spread(mask, bool, predictors)
    arrays = {
        "input_ids": spread(tokens, np.int64, spans(starts, lengths))[None],
        "position_ids": spans(earlier, aligned)[None, local],
        "labels": spread(not_first, np.int64, spans(starts, lengths - 1)),
        "mask": own_mask,
        "live": np.flatnonzero(own_mask),
        "cu_seqlens": bounds.astype(np.int32),
    }
    if experts is not None:
        places = spans(starts, lengths - 1)
        arrays["experts"] = spread(experts, np.uint8 if experts.itemsize == 1 else np.int16, places)
        arrays["is_routed"] = spread(np.ones(len(places), bool), bool, places)
    later_counts: tuple[int, ...] = ()
    if depth:
        # A sequence's token at j counts where the mask of position j - 1 is set, whichever layer predicts it.
        counts_at = np.zeros(bounds[-1], bool)
        counts_at[predictors] = mask
        rows = [_later(tokens, lengths, starts, counts_at, ahead) for ahead in range(2, depth + 2)]
        arrays["later_ids"] = np.stack([ids[local] for ids, _ in rows])
        lives = [np.flatnonzero(live[local]) for _, live in rows]
        arrays["later_live"], later_counts = np.concatenate(lives), tuple(map(len, lives))
    kept_bounds = None
    if kept is not None:
        ids, sizes = kept
        own = spread(np.arange(len(sizes)), np.int64, predictors)[arrays["live"]]
        arrays["kept_counts"] = sizes[own]
        arrays["kept_ids"] = ids[spans((np.cumsum(sizes) - sizes)[own], sizes[own])].astype(np.int32)
        kept_bounds = np.concatenate([[0], np.cumsum(sizes[own])])
    for name, values in (fields or {}).items():
        dtype = bool if values.dtype == bool else np.float32
        arrays[f"{_FIELD}{name}"] = spread(values, dtype, predictors)
    facts = {
        "aligned": aligned,
        "max_seqlen": int((earlier + aligned).max()),
        "lengths": lengths,
        "first": starts + before,
        "counts": counts,
        "cp": cp,
        "cp_rank": cp_rank,
        "shared": earlier if earlier.any() else None,
    }
    # One buffer for all arrays.
    tensors, end = {}, 0
    for name, array in arrays.items():
        tensors[name] = (end, array.dtype, array.shape)
        end = -(-(end + array.nbytes) // _ALIGNMENT) * _ALIGNMENT
    buffer = np.zeros(end, np.uint8)
    for name, array in arrays.items():
        start = tensors[name][0]
        buffer[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return HostBatch(buffer, tensors, facts, later_counts, kept_bounds)


def _later(
    tokens: np.ndarray, lengths: np.ndarray, starts: np.ndarray, counts_at: np.ndarray, ahead: int
) -> tuple[np.ndarray, np.ndarray]:
    """At each packed position the token `ahead` places later in its sequence, 0 where there is none, and whether it counts.

    Args:
        starts: packed positions at which sequences begin.
        counts_at: bool [packed positions]; whether the token after a position counts.
    """
    ids, live = np.zeros(len(counts_at), np.int64), np.zeros(len(counts_at), bool)
    reach = np.maximum(lengths - ahead, 0)
    places = spans(starts, reach)
    ids[places] = tokens[spans(np.cumsum(lengths) - lengths + np.minimum(ahead, lengths), reach)]
    live[places] = counts_at[places + ahead - 1]
    return ids, live
