"""Which trajectories of a batch have their prompt in common, and how they are kept together.

Guarantees, each asserted by a test:

- a trajectory shares with the one before it or not at all, and never the prompt's last token, whose successor is its own;
- where all prompts have equally many trajectories, these are planned as one, so that they lie in one micro-batch of one rank, within
  the same limits as others; else rows are planned one by one, and share where they happen to meet.
"""

import numpy as np
import numpy.typing as npt

from megarl.data.balance import MiniBatch, plan_mini_batches, sequence_costs


def shared_tokens(prompts: np.ndarray, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many tokens each trajectory leaves to an earlier one: all of its prompt but the last, if the one before has the same prompt.

    Args:
        prompts: the prompts' tokens, end to end.
        lengths: [trajectories], their numbers, at least 1 each.

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
    """As `plan_mini_batches`, with the trajectories of a prompt together; None: they cannot be.

    Args:
        lengths: tokens of each trajectory [rows].
        shared: as `shared_tokens` has it.
        pair_share: as in `sequence_costs`.
        order: epochs, shuffle, seed.
    """
    heads = np.flatnonzero(shared == 0)
    size = len(lengths) // len(heads)
    if size == 1 or not np.array_equal(heads, np.arange(0, len(lengths), size)):
        return None
    own = (lengths - shared).reshape(-1, size).sum(axis=1)
    limits = (
        mini_batch_size % size == 0,
        max_tokens is None or own.max() <= max_tokens,
        micro_batch_size is None or micro_batch_size >= size,
        min(mini_batch_size // size, len(own)) % (num_dp * multiple_of) == 0,
    )
    if not all(limits):
        return None
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
