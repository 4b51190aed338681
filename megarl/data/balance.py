"""Plans which rows form which micro-batch on which data parallel rank: pack first, distribute second.

Guarantees, each asserted by a test of its name:

- exactly once: every row is in exactly one micro-batch of one rank of one mini-batch, in each epoch;
- within budget: a micro-batch has at most `max_tokens` tokens (or `micro_batch_size` rows), and one row at least;
- same count: all ranks of a mini-batch have the same number of micro-batches, a multiple of `multiple_of` (a
  pipeline runs the same schedule on all data parallel ranks, and an interleaved one needs multiples of its
  stages);
- few: micro-batches are no more than first-fit-decreasing packing needs, rounded up to that multiple;
- balanced: what sequences cost, attention included, is levelled over micro-batches and ranks (Karmarkar-Karp, and then
  exchanges between the costliest and the cheapest ones);
- deterministic: the same arguments give the same plan;
- always possible: a mini-batch whose rows are a multiple of num_dp * multiple_of can be planned, whatever its
  lengths.
- shared prompts (`plan_groups`): a trajectory shares its prompt with the one before it or not at all, and never the prompt's
  last token, whose successor is its own; where all prompts have equally many trajectories, these are planned as one, so that
  they lie in one micro-batch of one rank, within the same limits as others; else rows are planned one by one, and share
  where they happen to meet.

`plan_figures` counts the tokens that a plan packs, and how even its ranks and micro-batches are. Rows are planned by their lengths and costs alone; nothing here knows tokens, tensors or ranks' addresses.
"""

import heapq
import itertools
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MiniBatch = list[list[list[int]]]
"""[data parallel rank][micro-batch] -> row indices."""

_LEVEL = 1e-3  # micro-batches that differ by a smaller part of their mean cost are level
_FEW = 8  # parts that are put in their places one by one; more are sorted with all others
_LEVEL_WITH = 4  # how many of the cheapest micro-batches the costliest one tries to exchange rows with

_Bin = tuple[int, int, list[int]]  # (-sum of lengths, first item, items): sorts by falling sum, then by item


def sequence_costs(lengths: npt.ArrayLike, pair_share: float) -> npt.NDArray[np.int64]:
    """The cost of sequences of these lengths: L tokens through the matrices, L (L + 1) / 2 pairs through causal attention.

    Args:
        pair_share: operations of attention for a pair of tokens, as a share of a token's operations in all matrices.

    Returns:
        Thousandths of a token's cost in all matrices [rows].
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    return np.rint(1000 * (tokens + pair_share * tokens * (tokens + 1) / 2)).astype(np.int64)


def partition_balanced(lengths: Sequence[int] | np.ndarray, k: int, equal_size: bool) -> list[list[int]]:
    """Divide items into k parts of about equal sums, by the largest differencing method for k parts
    (Karmarkar and Karp, "The Differencing Method of Set Partitioning", 1982): the two partial solutions of
    largest spread are merged, the fullest parts of one with the emptiest of the other, until one is left.

    Args:
        lengths: positive length of each item; there must be at least k.
        equal_size: let the parts' numbers of items differ by one at most.

    Returns:
        k non-empty lists of item indices, each ascending, by falling sum.
    """
    sizes = [int(length) for length in lengths]
    assert 1 <= k <= len(sizes), (k, len(sizes))
    assert min(sizes) > 0, "lengths must be positive"
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    if equal_size:
        # Each solution has one item in every part, so all parts grow alike; only the solution of the smallest
        # items may have parts without an item.
        groups = [order[start : start + k] for start in range(0, len(order), k)]
    else:
        groups = [[item] for item in order]
    solutions = [[(-sizes[item], item, [item]) for item in group] for group in groups]
    heap = [(-_spread(solution, k), number, solution) for number, solution in enumerate(solutions)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = _merge(first, second, k)
        heapq.heappush(heap, (-_spread(merged, k), number, merged))
        number += 1
    return [sorted(items) for _, _, items in heap[0][2]]


def _spread(solution: list[_Bin], k: int) -> int:
    """Fullest minus emptiest part; parts that are not listed are empty."""
    emptiest = -solution[-1][0] if len(solution) == k else 0
    return -solution[0][0] - emptiest


def _merge(first: list[_Bin], second: list[_Bin], k: int) -> list[_Bin]:
    """Merge two solutions, lists of their non-empty parts by falling sum: the fullest with the emptiest.

    Neither of them may be used afterwards: the larger one becomes the result.
    """
    num_joined = max(0, len(first) + len(second) - k)
    few, many = sorted((first, second), key=len)
    joined = zip(few[len(few) - num_joined :], reversed(many[len(many) - num_joined :]), strict=True)
    new = [(a[0] + b[0], min(a[1], b[1]), a[2] + b[2]) for a, b in joined]
    new += few[: len(few) - num_joined]
    del many[len(many) - num_joined :]
    if len(new) > _FEW:
        many += new
        many.sort()
        return many
    # Mostly it is a single item that joins a thousand parts: no need to look at all of them.
    for part in new:
        insort(many, part)
    return many


def micro_batches(
    lengths: npt.ArrayLike, max_tokens: int, multiple_of: int = 1, costs: npt.ArrayLike | None = None
) -> list[list[int]]:
    """Pack rows into few micro-batches of at most max_tokens tokens, balanced.

    Args:
        lengths: tokens of each row.
        multiple_of: the number of micro-batches is a multiple of this.
        costs: the positive whole numbers to balance; None: the lengths.

    Returns:
        Non-empty lists of row indices. Their number is the smallest multiple for which Karmarkar-Karp or
        first-fit-decreasing finds a packing.

    Raises:
        ValueError: a row is longer than max_tokens, or there are fewer rows than micro-batches needed (never
            where the number of rows is a multiple of `multiple_of`).
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    weights = sizes if costs is None else np.asarray(costs, dtype=np.int64)
    _check_longest(sizes, max_tokens)
    packed: list[list[int]] | None = None  # made where Karmarkar-Karp finds nothing
    # No two rows of more than half the budget fit into one.
    least = max(-(-int(sizes.sum()) // max_tokens), int((2 * sizes > max_tokens).sum()))
    num = _round_up(least, multiple_of)
    while num <= len(sizes):
        bins = _partition_within(sizes, weights, num, max_tokens)
        if bins is None:
            packed = packed or _first_fit_decreasing(sizes.tolist(), max_tokens)
            bins = _split_to(packed, num) if num >= len(packed) else None
        if bins is not None:
            return _levelled(bins, sizes, weights, max_tokens)
        num += multiple_of
    raise ValueError(
        f"{len(sizes)} rows need {num} micro-batches (a multiple of {multiple_of}, at most {max_tokens} tokens "
        f"each), more than there are rows: raise the token budget, or make the rows a multiple of {multiple_of}"
    )


def _check_longest(lengths: np.ndarray, max_tokens: int) -> None:
    row = int(lengths.argmax())
    if lengths[row] > max_tokens:
        raise ValueError(
            f"row {row} has {lengths[row]} tokens, more than the {max_tokens} tokens that a micro-batch may have: "
            f"raise the token budget (ppo_max_token_len_per_gpu) to {lengths[row]} at least"
        )


def _partition_within(
    sizes: np.ndarray, weights: np.ndarray, num: int, max_tokens: int
) -> list[list[int]] | None:
    """Karmarkar-Karp by cost or, where that exceeds the budget, by tokens; None: both exceed it."""
    for balanced in (weights,) if weights is sizes else (weights, sizes):
        bins = partition_balanced(balanced, num, equal_size=False)
        if max(int(sizes[part].sum()) for part in bins) <= max_tokens:
            return bins
    return None


def _levelled(
    bins: list[list[int]], sizes: np.ndarray, weights: np.ndarray, max_tokens: int
) -> list[list[int]]:
    """Exchange rows between the costliest micro-batch and a cheap one, as long as that brings them nearer to each
    other; all stay within budget, and none becomes empty."""
    bins = [list(part) for part in bins]
    loads = np.array([sizes[part].sum() for part in bins])
    costs = np.array([weights[part].sum() for part in bins])
    for _ in range(4 * len(bins)):
        high = int(costs.argmax())
        if costs[high] - costs.min() <= _LEVEL * costs.mean():
            break
        for low in np.argsort(costs, kind="stable")[:_LEVEL_WITH].tolist():
            room = max_tokens - loads[low], max_tokens - loads[high]
            found = _exchange(bins[high], bins[low], sizes, weights, int(costs[high] - costs[low]), room)
            if found is not None:
                break
        else:
            break
        given, taken = found
        bins[high] = sorted({*bins[high], *taken} - {*given})
        bins[low] = sorted({*bins[low], *given} - {*taken})
        for part in (high, low):
            loads[part], costs[part] = sizes[bins[part]].sum(), weights[bins[part]].sum()
    return bins


def _exchange(
    high: list[int], low: list[int], sizes: np.ndarray, weights: np.ndarray, gap: int, room: tuple[int, int]
) -> tuple[list[int], list[int]] | None:
    """The exchange of a row of `high` for one of `low`, or for none, that comes nearest to halving their gap of cost.

    Args:
        room: tokens that still fit into `low`, and into `high`.

    Returns:
        The rows that `high` gives and takes; None: no exchange makes the gap smaller.
    """
    tokens, cost = np.append(sizes[low], 0), np.append(weights[low], 0)
    moved = weights[high][:, None] - cost  # [high, low + 1]: the last column takes nothing in return
    longer = sizes[high][:, None] - tokens
    fits = (longer <= room[0]) & (-longer <= room[1]) & (moved > 0) & (moved < gap)
    if len(high) == 1:
        fits[:, -1] = False
    if not fits.any():
        return None
    best = int(np.where(fits, np.abs(2 * moved - gap), np.iinfo(np.int64).max).argmin())
    row, other = divmod(best, len(tokens))
    return [high[row]], low[other : other + 1]


def _round_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def _first_fit_decreasing(sizes: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = np.empty(len(sizes), dtype=np.int64)
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        fits = np.flatnonzero(room[: len(bins)] >= sizes[row])
        if len(fits):
            target = int(fits[0])
            bins[target].append(row)
            room[target] -= sizes[row]
        else:
            room[len(bins)] = max_tokens - sizes[row]
            bins.append([row])
    return bins


def _split_to(bins: list[list[int]], num: int) -> list[list[int]]:
    """Split the bins with the most rows in two until there are num; splitting keeps every bin within budget."""
    bins = [sorted(part) for part in bins]
    while len(bins) < num:
        largest = max(range(len(bins)), key=lambda index: len(bins[index]))
        part = bins[largest]
        bins[largest] = part[::2]
        bins.append(part[1::2])
    return bins


def plan_mini_batches(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_dp: int,
    mini_batch_size: int,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    num_mini_batches: int | None = None,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    multiple_of: int = 1,
    costs: npt.ArrayLike | None = None,
) -> list[MiniBatch]:
    """Plan the updates of one batch of rows.

    Args:
        lengths: tokens of each row of the table (prompt and response).
        num_dp: data parallel ranks.
        mini_batch_size: rows of an optimizer step, over all ranks. Rows are taken in table order, or in an
            order drawn from (seed, epoch) with `shuffle`; the last mini-batch of an epoch may be smaller.
        max_tokens: tokens of a micro-batch, at most. Exactly one of this and micro_batch_size is given.
        micro_batch_size: rows of a micro-batch, at most.
        num_mini_batches: how many there are, of about equal size, in place of mini_batch_size. The table's rows
            must be a multiple of num_dp * multiple_of; so are the rows of each, so that each can be planned.
        epochs: how often all rows are gone through.
        multiple_of: number of micro-batches of a rank is a multiple of this.
        costs: the positive whole numbers to balance (`sequence_costs`); None: the lengths.

    Returns:
        `plan[mini-batch][rank][micro-batch]` -> row indices, the mini-batches of all epochs one after the
        other. A rank's micro-batches come costliest first, so that micro-batches that run at the same time are alike
        and the largest memory peak comes first.

    Raises:
        ValueError: a row exceeds max_tokens, or a mini-batch has fewer rows than micro-batches; names the
            numbers.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    costs = lengths if costs is None else np.asarray(costs, dtype=np.int64)
    assert costs.shape == lengths.shape, (costs.shape, lengths.shape)
    assert lengths.ndim == 1 and len(lengths) > 0, lengths.shape
    assert min(lengths.min(), costs.min()) > 0, "lengths and costs must be positive"
    assert min(num_dp, mini_batch_size, epochs, multiple_of) >= 1
    assert (max_tokens is None) != (micro_batch_size is None), (
        "exactly one of max_tokens and micro_batch_size"
    )
    if max_tokens is not None:
        _check_longest(lengths, max_tokens)  # `micro_batches` would name a row of the mini-batch
    plan = []
    # Mini-batches are cut from the epoch's order first, then each is planned by itself.
    for epoch in range(epochs):
        rows = np.arange(len(lengths))
        if shuffle:
            rows = np.random.default_rng((seed, epoch)).permutation(len(lengths))
        for start, end in itertools.pairwise(
            _bounds(len(rows), mini_batch_size, num_mini_batches, num_dp * multiple_of)
        ):
            chosen = np.sort(rows[start:end])
            local = _plan_one(
                lengths[chosen], costs[chosen], num_dp, max_tokens, micro_batch_size, multiple_of
            )
            plan.append([[[int(chosen[row]) for row in micro] for micro in rank] for rank in local])
    return plan


def _bounds(num_rows: int, size: int, number: int | None, unit: int) -> list[int]:
    """Where the mini-batches of an epoch begin, and the number of rows."""
    if number is None:
        return [*range(0, num_rows, size), num_rows]
    assert num_rows % unit == 0 and num_rows >= number * unit, (num_rows, number, unit)
    return [unit * (num_rows // unit * part // number) for part in range(number + 1)]


def _plan_one(
    lengths: np.ndarray,
    costs: np.ndarray,
    num_dp: int,
    max_tokens: int | None,
    micro_batch_size: int | None,
    multiple_of: int,
) -> MiniBatch:
    """The plan of one mini-batch, in row numbers of its own."""
    step = num_dp * multiple_of
    if len(lengths) < step:
        raise ValueError(
            f"a mini-batch of {len(lengths)} rows cannot give each of {num_dp} data parallel ranks "
            f"{multiple_of} micro-batches: at least {step} rows are needed"
        )
    if max_tokens is not None:
        bins = micro_batches(lengths, max_tokens, multiple_of=step, costs=costs)
    else:
        assert micro_batch_size is not None
        num = _round_up(-(-len(lengths) // micro_batch_size), step)
        if num > len(lengths):
            raise ValueError(
                f"a mini-batch of {len(lengths)} rows in micro-batches of {micro_batch_size} needs {num} of them "
                f"on {num_dp} data parallel ranks (a multiple of {step}), more than there are rows: raise "
                f"ppo_micro_batch_size_per_gpu, or make the rows of a mini-batch a multiple of {step}"
            )
        bins = partition_balanced(costs, num, equal_size=True)
    sums = [int(costs[part].sum()) for part in bins]
    ranks = partition_balanced(sums, num_dp, equal_size=True)
    return [
        [bins[index] for index in sorted(rank, key=lambda index: (-sums[index], index))] for rank in ranks
    ]


def aligned_lengths(
    lengths: npt.ArrayLike, *, tp: int = 1, cp: int = 1, sequence_parallel: bool = False, multiple: int = 1
) -> npt.NDArray[np.int64]:
    """Packed tokens of each sequence of a micro-batch [rows], with the padding that gives ranks even shares.

    Context parallelism cuts a sequence into 2 cp equal chunks (Transformer Engine's for THD); sequence parallelism all
    tokens of a context parallel rank into tp parts, for which the last sequence is lengthened. It is lengthened for `multiple`, too, which
    divides the tokens of each rank's part.
    """
    unit, total_unit = _units(tp, cp, sequence_parallel, multiple)
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
    multiple: int = 1,
) -> int:
    """The sum of `aligned_lengths` of micro-batches, given as rows of `lengths`."""
    unit, total_unit = _units(tp, cp, sequence_parallel, multiple)
    sums = sums_of(-(-lengths // unit) * unit, parts)
    return int((-(-sums // total_unit) * total_unit).sum())


def _units(tp: int, cp: int, sequence_parallel: bool, multiple: int) -> tuple[int, int]:
    """The units to which the tokens of a sequence, and of a micro-batch, are padded."""
    own = tp * multiple if sequence_parallel else multiple  # of a context parallel rank
    if cp == 1:
        return 1, own
    return 2 * cp, cp * int(np.lcm(own, 2))


def sums_of(values: np.ndarray, parts: Sequence[Sequence[int]]) -> np.ndarray:
    """The sum of each part, given as positions of `values`; all at once, since a plan may have thousands."""
    sizes = np.array([len(part) for part in parts])
    filled, starts = sizes > 0, np.cumsum(sizes) - sizes
    chosen = values[np.array([at for part in parts for at in part], dtype=np.int64)]
    sums = np.zeros(len(parts), values.dtype)
    sums[filled] = np.add.reduceat(chosen, starts[filled])  # it gives no zero for an empty part
    return sums


@dataclass(frozen=True)
class PlanFigures:
    """How even a plan is; each figure is the mean over its mini-batches.

    Attributes:
        rank_imbalance: cost of the costliest data parallel rank over the ranks' mean, less 1: the part that the others wait.
        micro_imbalance: the same over all micro-batches of all ranks: the waiting of pipeline stages for each other.
        num_micro: micro-batches of a rank.
    """

    rank_imbalance: float
    micro_imbalance: float
    num_micro: float


def plan_figures(plan: Sequence[MiniBatch], costs: npt.ArrayLike) -> PlanFigures:
    """The figures of a plan of at least one mini-batch; `costs`: of each row of the table."""
    costs, found = np.asarray(costs, dtype=np.float64), []
    for shares in plan:
        micros = [rows for share in shares for rows in share]
        micro = sums_of(costs, micros).reshape(len(shares), -1)  # [dp, micro-batches]
        ranks = micro.sum(axis=1)
        found.append((ranks.max() / ranks.mean() - 1, micro.max() / micro.mean() - 1, micro.shape[1]))
    return PlanFigures(*np.mean(found, axis=0).tolist())


def shared_tokens(prompts: np.ndarray, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many tokens each trajectory leaves to an earlier one: all of its prompt but the last, if the one before has the same prompt.

    Args:
        prompts: the prompts' tokens, end to end.
        lengths: [trajectories], the tokens of each prompt, at least 1.

    Returns:
        [trajectories]; 0: it has all its tokens.
    """
    ends = np.cumsum(lengths)
    shared = np.zeros_like(lengths)
    for row in range(1, len(lengths)):
        length, end = int(lengths[row]), int(ends[row])
        if length == lengths[row - 1] and np.array_equal(
            prompts[end - length : end], prompts[end - 2 * length : end - length]
        ):
            shared[row] = length - 1
    return shared


def plan_groups(
    lengths: npt.NDArray[np.int64],
    shared: npt.NDArray[np.int64],
    *,
    pair_share: float,
    num_dp: int,
    mini_batch_size: int,
    max_tokens: int | None,
    micro_batch_size: int | None,
    multiple_of: int,
    **order: int | bool,
) -> list[MiniBatch] | None:
    """As `plan_mini_batches`, with the trajectories of a prompt together; None: they cannot be planned so.

    Args:
        lengths: tokens of each trajectory [rows].
        shared: as `shared_tokens` returns it.
        pair_share: as in `sequence_costs`.
        order: epochs, shuffle, seed.
    """
    # All prompts must have equally many trajectories, as neighbours ...
    heads = np.flatnonzero(shared == 0)
    size = len(lengths) // len(heads)
    if size == 1 or not np.array_equal(heads, np.arange(0, len(lengths), size)):
        return None
    own = (lengths - shared).reshape(-1, size).sum(axis=1)
    # ... and a group must fit into a micro-batch, and groups into mini-batches and ranks.
    limits = (
        mini_batch_size % size == 0,
        max_tokens is None or own.max() <= max_tokens,
        micro_batch_size is None or micro_batch_size >= size,
        min(mini_batch_size // size, len(own)) % (num_dp * multiple_of) == 0,
    )
    if not all(limits):
        return None
    # A group is planned as one row, without the tokens and the cost of the prompts that it does not repeat.
    spared = np.where(shared > 0, sequence_costs(shared, pair_share), 0)
    plan = plan_mini_batches(
        own,
        num_dp=num_dp,
        mini_batch_size=mini_batch_size // size,
        max_tokens=max_tokens,
        micro_batch_size=None if micro_batch_size is None else micro_batch_size // size,
        multiple_of=multiple_of,
        costs=(sequence_costs(lengths, pair_share) - spared).reshape(-1, size).sum(axis=1),
        **order,
    )
    return [
        [
            [[group * size + sample for group in micro for sample in range(size)] for micro in rank]
            for rank in shares
        ]
        for shares in plan
    ]
