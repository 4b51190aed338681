"""Turns of trajectories with an environment, and GiGPO, which compares those that began in the same state."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.comparisons import grpo
from megarl.algorithms.ragged import reverse_scan, segment_ids, segment_sum


@dataclass(frozen=True)
class Turns:
    """The policy's turns of all trajectories of a batch, one trajectory after the other. The environment's words after a turn belong to it.

    Attributes:
        starts: int64 [turns], ascending; first tokens in flat tensors. The first token of a trajectory is one of them.
        states: [turns]; the state of the environment before each turn: equal texts, equal states.
    """

    starts: Tensor
    states: Sequence[str]


def gigpo(
    rewards: Tensor,
    mask: Tensor,
    offsets: Tensor,
    turns: Turns,
    group_ids: Sequence[str],
    gamma: float,
    step_weight: float,
    norm_by_std: bool,
) -> Tensor:
    """GiGPO (arXiv:2505.10978): A = A_E + step_weight A_S on every live token of a turn (equation 8).

    A_E compares the sums of rewards of a group's trajectories as `grpo` does (equation 3). A_S compares in the same way the returns of
    turns of the group that began in the same state, an anchor state (equations 6 and 7); the return of turn t is r_t + gamma r_{t+1} + ...,
    r being the sum of a turn's rewards (equation 5). The equations' numbers are those in the authors' code. A state that only one turn of the
    group began in says nothing: A_S is 0. So is A_E in a group of one.

    Turns without a live token are no turns, and trajectories without one take no part.

    Args: rewards [tokens], 0 on masked tokens; mask: bool [tokens]; offsets: int64 [n + 1]; group_ids [n].
    Returns: [tokens], the rewards' dtype, 0 on masked tokens.
    """
    live, owner, bounds = _live_turns(mask, offsets, turns)
    groups = [group_ids[row] for row in owner.tolist()]
    anchors = _anchors(groups, turns, live)
    sums = segment_sum(rewards.double(), bounds)[live]
    # Trajectories with live turns, and the offsets of each one's live turns.
    rows, counts = owner.unique_consecutive(return_counts=True)
    trajectories = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    of_episode = grpo(segment_sum(sums, trajectories), [group_ids[row] for row in rows.tolist()], norm_by_std)
    of_step = grpo(reverse_scan(sums, trajectories, gamma), anchors, norm_by_std)
    per_turn = torch.zeros(len(turns.starts), dtype=torch.float64)
    per_turn[live] = of_episode.repeat_interleave(counts) + step_weight * of_step
    spread = per_turn.repeat_interleave(bounds.diff()).to(rewards.dtype)
    return torch.where(mask, spread, 0.0)


def shared_states(mask: Tensor, offsets: Tensor, turns: Turns, group_ids: Sequence[str]) -> float:
    """The share of turns with a live token whose state another such turn of the group began in; 0 without any turn."""
    live, owner, _ = _live_turns(mask, offsets, turns)
    anchors = _anchors([group_ids[row] for row in owner.tolist()], turns, live)
    times = Counter(anchors)
    return sum(times[anchor] > 1 for anchor in anchors) / max(1, len(anchors))


def _live_turns(mask: Tensor, offsets: Tensor, turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of the turns with a live token, the trajectory of each of these, and the bounds of all turns in flat tensors."""
    starts = turns.starts
    first = torch.isin(offsets[:-1][offsets.diff() > 0], starts)
    assert bool(first.all()) and bool((starts.diff() > 0).all()), "turns cover the trajectories, in order"
    bounds = torch.cat([starts, offsets[-1:]])
    live = (segment_sum(mask, bounds) > 0).nonzero().squeeze(1)
    return live, segment_ids(offsets)[starts[live]], bounds


def _anchors(groups: Sequence[str], turns: Turns, live: Tensor) -> list[str]:
    """The group and the state of each turn `live`, as one text."""
    states = (turns.states[turn] for turn in live.tolist())
    return [f"{group}\n{state}" for group, state in zip(groups, states, strict=True)]
