"""Scores of a batch of trajectories.

Guarantees
- Scores come in the order of the trajectories, each a finite number.
- A reward function that raises, or returns anything but a number or a dict with a number under "score", ends in
  a ValueError with the trajectory's uid, its data_source and the cause. Nothing is scored 0 instead.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from megarl.rewards.registry import RewardFunction, reward_functions


@dataclass(frozen=True)
class Scores:
    scores: list[float]  # one a trajectory
    metrics: dict[str, list[float]]  # other numbers that the function returned; NaN where it gave none


def score_trajectories(
    *,
    uids: Sequence[str],
    data_sources: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[str | None],
    custom: RewardFunction | None = None,
) -> Scores:
    """Score each decoded response with `custom` or the rule of its data source.

    Args: columns of the trajectory table, one entry a trajectory; extra_infos are its JSON texts, which the
    function gets as Python values (None for a null).
    ValueError: see the module's guarantees; also a data source without a rule, before anything is scored.
    """
    columns = (uids, data_sources, responses, ground_truths, extra_infos)
    assert len({len(column) for column in columns}) == 1, f"columns of {[len(c) for c in columns]} entries"
    functions = reward_functions(data_sources, custom)

    scores: list[float] = []
    metrics: dict[str, list[float]] = {}
    for row, (uid, source, response, truth, extra) in enumerate(zip(*columns, strict=True)):
        score, numbers = _score_one(functions[source], uid, source, response, truth, extra)
        scores.append(score)
        for name, value in numbers.items():
            metrics.setdefault(name, [math.nan] * len(uids))[row] = value
    return Scores(scores, metrics)


def _score_one(
    function: RewardFunction, uid: str, source: str, response: str, truth: str, extra: str | None
) -> tuple[float, dict[str, float]]:
    where = f"the reward of trajectory {uid!r} (data_source {source!r})"
    try:
        result = function(
            data_source=source,
            solution_str=response,
            ground_truth=truth,
            extra_info=None if extra is None else json.loads(extra),
        )
    except Exception as error:
        raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error
    numbers: dict[str, float] = {}
    score: Any = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(
                f"{where} is a dict without 'score'; it has {', '.join(map(str, result)) or 'no keys'}"
            )
        score = result["score"]
        # Entries that are not numbers (the extracted answer, say) are the function's own notes.
        numbers = {str(k): float(v) for k, v in result.items() if k != "score" and _is_number(v)}
    if not _is_number(score):
        raise ValueError(f"{where} is {score!r} ({type(score).__name__}), not a number")
    if not math.isfinite(float(score)):
        raise ValueError(f"{where} is {float(score)}, not a finite number")
    return float(score), numbers


def _is_number(value: Any) -> bool:
    """Python and numpy numbers, booleans, and array or tensor scalars (shape ()); not text."""
    return isinstance(value, SupportsFloat) and getattr(value, "shape", ()) == ()
