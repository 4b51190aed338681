"""Tables to data parallel ranks and back.

Tables travel by reference: every rank gets the same object of Ray's store, and the numbers of the rows that
are its own. Results come back from one rank of each data parallel rank and are put in the table's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from megarl.algorithms.aggregate import LossCounts, loss_counts
from megarl.data.balance import plan_mini_batches
from megarl.data.trajectories import append_column, ragged, sequence_lengths, take
from megarl.layout.grid import ParallelLayout


@dataclass(frozen=True)
class MicroBatching:
    """How a role's rows are cut; exactly one of the limits is set.

    Attributes:
        mini_batch_size: trajectories of an optimizer step.
        max_tokens, micro_batch_size: the most tokens, or trajectories, of a micro-batch.
    """

    mini_batch_size: int
    max_tokens: int | None
    micro_batch_size: int | None
    epochs: int = 1
    shuffle: bool = False


Plan = list[list[list[list[int]]]]
"""By mini-batch, by data parallel rank, by micro-batch: row numbers."""


def forward_plan(table: pa.Table, layout: ParallelLayout, cut: MicroBatching) -> list[list[list[int]]]:
    """All rows of a table as one batch: by data parallel rank, by micro-batch, row numbers."""
    return plan_rows(sequence_lengths(table), layout, cut.max_tokens, cut.micro_batch_size)


def first_pass_plan(plan: Plan, epochs: int) -> list[list[list[int]]]:
    """The mini-batches of the first of `plan`'s epochs one after the other, as one batch.

    Old log-probs computed in the very micro-batches of the first update equal the new ones bit for bit, so
    that the ratio of an on-policy step is exactly 1.
    """
    first = plan[: len(plan) // epochs]
    return [[micro for shares in first for micro in shares[dp]] for dp in range(len(plan[0]))]


def plan_rows(
    lengths: np.ndarray, layout: ParallelLayout, max_tokens: int | None, micro_batch_size: int | None = None
) -> list[list[list[int]]]:
    """Rows of these lengths as one batch: by data parallel rank, by micro-batch, row numbers."""
    return plan_mini_batches(
        lengths,
        num_dp=layout.dp,
        mini_batch_size=len(lengths),
        max_tokens=max_tokens,
        micro_batch_size=micro_batch_size,
        multiple_of=_schedule_multiple(layout),
    )[0]


def update_plan(
    table: pa.Table, layout: ParallelLayout, cut: MicroBatching, seed: int
) -> tuple[Plan, list[LossCounts]]:
    """The mini-batches of all epochs, and what each holds of tokens and trajectories that are trained on."""
    plan = plan_mini_batches(
        sequence_lengths(table),
        num_dp=layout.dp,
        mini_batch_size=cut.mini_batch_size,
        max_tokens=cut.max_tokens,
        micro_batch_size=cut.micro_batch_size,
        epochs=cut.epochs,
        shuffle=cut.shuffle,
        seed=seed,
        multiple_of=_schedule_multiple(layout),
    )
    counts = []
    for shares in plan:
        rows = [row for share in shares for micro in share for row in micro]
        mask, offsets = ragged(take(table, rows), "response_mask")
        counts.append(loss_counts(torch.tensor(mask), torch.from_numpy(offsets)))
    return plan, counts


def rows_to_share(num_rows: int, layout: ParallelLayout) -> int:
    """The least number of rows, `num_rows` or more, that can always be planned, whatever their lengths."""
    unit = layout.dp * _schedule_multiple(layout)
    return -(-num_rows // unit) * unit


def _schedule_multiple(layout: ParallelLayout) -> int:
    """Megatron's interleaved schedule takes micro-batches in groups of the pipeline's size."""
    return layout.pp if layout.vpp else 1


def merge_columns(table: pa.Table, results: Sequence) -> pa.Table:
    """Append the columns that the ranks computed (`RowColumns` or None each) in the table's row order."""
    parts = [part for part in results if part is not None]
    rows = np.concatenate([np.asarray(part_rows, dtype=np.int64) for part_rows, _ in parts])
    assert np.array_equal(np.sort(rows), np.arange(table.num_rows)), "each row is computed exactly once"
    order = np.argsort(rows)
    for name in parts[0][1]:
        lists = [
            flat[a:b]
            for _, columns in parts
            for flat, offsets in [columns[name]]
            for a, b in itertools.pairwise(offsets)
        ]
        sorted_lists = [lists[index] for index in order]
        offsets = np.concatenate([[0], np.cumsum([len(values) for values in sorted_lists])])
        table = append_column(table, name, (np.concatenate(sorted_lists), offsets.astype(np.int64)))
    return table


def split_requests(requests: pa.Table, num_engines: int) -> list[pa.Table]:
    """Contiguous parts, one an engine, as equal as whole prompts allow: a prompt's samples share its prefix."""
    prompt_uids = requests["prompt_uid"].to_pylist()
    starts = [row for row in range(len(prompt_uids)) if row == 0 or prompt_uids[row] != prompt_uids[row - 1]]
    bounds = [*starts, len(prompt_uids)]
    cuts = [bounds[round(part * len(starts) / num_engines)] for part in range(num_engines + 1)]
    return [requests.slice(a, b - a) for a, b in itertools.pairwise(cuts)]
