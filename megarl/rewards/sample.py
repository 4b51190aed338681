"""A sample to score, and its score."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat


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
    `seconds`: the time that it took, without queueing.
    """

    uid: str
    score: float | None
    numbers: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


def read_result(uid: str, result: Any, seconds: float) -> Score:
    """The Score from a reward function's result: a number, or a dict with a number under "score".

    ValueError: anything else, NaN and infinity included.
    """
    value, numbers, notes = result, {}, {}
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
            elif isinstance(entry, str):
                notes[name] = entry
            elif name != "score" and _is_number(entry):
                numbers[name] = float(entry)
    if not _is_number(value):
        raise ValueError(f"the reward is {value!r} ({type(value).__name__}), not a number")
    if not math.isfinite(float(value)):
        raise ValueError(f"the reward is {float(value)}, not a finite number")
    return Score(uid, float(value), numbers, notes, None, seconds)


def _is_number(value: Any) -> bool:
    """Python and numpy numbers, booleans, and array or tensor scalars (shape ()); not text."""
    return isinstance(value, SupportsFloat) and getattr(value, "shape", ()) == ()
