"""The score of a session whose requests belong to several players, all of them the policy.

A player is a name that requests call as their model (`rollout.gateway.players`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

SessionScore = float | Mapping[str, float]
"""One for all players, or one for each."""


def is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def checked_scores(
    scores: Mapping[Any, object], known: Sequence[str], asked: Sequence[str | None]
) -> dict[str, float]:
    """Check scores, and return them by player.

    Args:
        known: the players that there may be.
        asked: the players that have trajectories.

    Raises:
        ValueError: there are no players, or no such one; one that has trajectories has no score; a score is no finite number.
    """
    if not known:
        raise ValueError(
            "the score is by player, and there are no players: give one number, or name them (gateway.players)"
        )
    for name, value in scores.items():
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"there is no player {name!r}; {hint}the players are {', '.join(known)}")
        if not is_finite_number(value):
            raise ValueError(f"the score of player {name!r} must be a finite number, found {value!r}")
    refuse_missing(scores, asked)
    return {name: float(value) for name, value in scores.items()}  # type: ignore[arg-type]


def refuse_missing(scores: Mapping[str, object], asked: Sequence[str | None]) -> None:
    """ValueError: a player that has trajectories has no score, or requests that called no player have trajectories."""
    if None in asked:
        raise ValueError(
            "some requests have called no player as their model, and have no score: give one number for all, or have each request call a player"
        )
    missing = [str(name) for name in asked if name not in scores]
    if missing:
        raise ValueError(
            f"no score of player {', '.join(missing)}, who has asked the policy; there are scores of {', '.join(scores) or 'nobody'}"
        )


def score_of(score: SessionScore | None, player: str | None) -> float | None:
    """The score of a player's trajectories; None: there is none."""
    if not isinstance(score, Mapping):
        return score
    return None if player is None else score.get(player)
