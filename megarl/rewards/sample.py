"""A sample to score, and its score."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, SupportsFloat, SupportsIndex


@dataclass(frozen=True)
class Sample:
    """A finished trajectory as rewards see it; `extra_info` is JSON text."""

    uid: str
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    extra_info: str | None


@dataclass(frozen=True)
class Score:
    """`score` is None where the reward failed; `error` then says how.

    `numbers`: other numbers that the reward function gave; `notes`: texts, `pred` among them: the extracted answer.
    `seconds`: the time that it took, without queueing. `steps`: scores of the response's steps, each with the characters of the response up to
    the step's end.
    """

    uid: str
    score: float | None
    numbers: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()


def read_result(uid: str, result: Any, seconds: float, length: int | None = None) -> Score:
    """The Score from a reward function's result: a number, or a dict with a number under "score" and perhaps "steps".

    Args:
        length: characters of the response, in which steps end; None: any.

    ValueError: anything else, NaN and infinity included.
    """
    value, numbers, notes = result, {}, {}
    steps: tuple[tuple[int, float], ...] = ()
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(
                f"the reward is a dict without 'score'; it has {', '.join(map(str, result)) or 'no keys'}"
            )
        value = result["score"]
        for key, entry in result.items():
            name = str(key)
            if name == "pred":
                if entry is not None:
                    notes[name] = str(entry)
            elif name == "steps" and isinstance(entry, Sequence) and not isinstance(entry, str):
                steps = _steps(entry, length)
            elif isinstance(entry, str):
                # Other kinds of text, such as enumerations, may have no meaning in the process that the score is sent to.
                notes[name] = str.__str__(entry)
            elif name != "score" and _is_number(entry):
                numbers[name] = float(entry)
    if not _is_number(value):
        raise ValueError(f"the reward is {value!r} ({type(value).__name__}), not a number")
    if not math.isfinite(float(value)):
        raise ValueError(f"the reward is {float(value)}, not a finite number")
    return Score(uid, float(value), numbers, notes, None, seconds, steps)


def _steps(entries: Sequence[Any], length: int | None) -> tuple[tuple[int, float], ...]:
    """Pairs of a step's end and its score, in order. ValueError: an entry is no such pair, or out of order."""
    steps: list[tuple[int, float]] = []
    for number, entry in enumerate(entries):
        pair = tuple(entry) if isinstance(entry, Sequence) and not isinstance(entry, str) else ()
        if len(pair) != 2 or not isinstance(pair[0], SupportsIndex) or not _is_number(pair[1]):
            raise ValueError(
                f"steps[{number}] is {entry!r}; it must be (characters up to the step's end, score)"
            )
        end, score = index(pair[0]), float(pair[1])
        if not math.isfinite(score):
            raise ValueError(f"the score of steps[{number}] is {score}, not a finite number")
        if end <= (steps[-1][0] if steps else 0) or (length is not None and end > length):
            raise ValueError(
                f"steps[{number}] ends at character {end}; ends must grow, from 1 to the response's {length} characters"
            )
        steps.append((end, score))
    return tuple(steps)


def _is_number(value: Any) -> bool:
    """Python and numpy numbers, booleans, and array or tensor scalars (shape ()); not text."""
    return isinstance(value, SupportsFloat) and getattr(value, "shape", ()) == ()
