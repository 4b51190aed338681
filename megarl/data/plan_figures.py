"""What a plan of micro-batches comes to: how many tokens are packed, and how even its ranks and micro-batches are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.data.balance import MiniBatch


def aligned_lengths(
    lengths: npt.ArrayLike, *, tp: int = 1, cp: int = 1, sequence_parallel: bool = False
) -> npt.NDArray[np.int64]:
    """Packed tokens of each sequence of a micro-batch [rows], those that ranks need for even shares included.

    Context parallelism cuts a sequence into 2 cp equal chunks (Transformer Engine's for THD); sequence parallelism all
    tokens of a context parallel rank into tp parts, for which the last sequence is lengthened.
    """
    unit, total_unit = _units(tp, cp, sequence_parallel)
    aligned = -(-np.asarray(lengths, dtype=np.int64) // unit) * unit
    aligned[-1] += -aligned.sum() % total_unit
    return aligned


def aligned_total(
    lengths: npt.NDArray[np.int64],
    parts: Sequence[Sequence[int]],
    *,
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """The sum of `aligned_lengths` of micro-batches, given as rows of `lengths`."""
    unit, total_unit = _units(tp, cp, sequence_parallel)
    sums = sums_of(-(-lengths // unit) * unit, parts)
    return int((-(-sums // total_unit) * total_unit).sum())


def _units(tp: int, cp: int, sequence_parallel: bool) -> tuple[int, int]:
    """What the tokens of a sequence, and of a micro-batch, are multiples of."""
    unit = 2 * cp if cp > 1 else 1
    if not sequence_parallel:
        return unit, 1
    return unit, cp * int(np.lcm(tp, 2)) if cp > 1 else tp


def sums_of(values: np.ndarray, parts: Sequence[Sequence[int]]) -> np.ndarray:
    """The sum of each part, given as positions of `values`; all at once, since a plan may have thousands."""
    sizes = np.array([len(part) for part in parts])
    filled, starts = sizes > 0, np.cumsum(sizes) - sizes
    chosen = values[np.array([at for part in parts for at in part], dtype=np.int64)]
    sums = np.zeros(len(parts), values.dtype)
    sums[filled] = np.add.reduceat(chosen, starts[filled])  # which has no empty parts
    return sums


@dataclass(frozen=True)
class PlanFigures:
    """How even a plan is; each figure is the mean over its mini-batches.

    Attributes:
        rank_imbalance: cost of the costliest data parallel rank over the ranks' mean, less 1: what the others wait.
        micro_imbalance: the same of all micro-batches of all ranks: what pipeline stages wait for each other.
        num_micro: micro-batches of a rank.
    """

    rank_imbalance: float
    micro_imbalance: float
    num_micro: float


def plan_figures(plan: Sequence[MiniBatch], costs: npt.ArrayLike) -> PlanFigures:
    """Of a plan of at least one mini-batch; `costs`: of each row of the table."""
    costs, found = np.asarray(costs, dtype=np.float64), []
    for shares in plan:
        micros = [rows for share in shares for rows in share]
        micro = sums_of(costs, micros).reshape(len(shares), -1)  # [dp, micro-batches]
        ranks = micro.sum(axis=1)
        found.append((ranks.max() / ranks.mean() - 1, micro.max() / micro.mean() - 1, micro.shape[1]))
    return PlanFigures(*np.mean(found, axis=0).tolist())
