"""The rule reward of GSM8K: is the number after the last `####` the right one?"""

import re
from typing import Any

# An answer stands at the end; looking only there also keeps a runaway response from being searched whole.
_TAIL_CHARACTERS = 300
_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_NUMBER = re.compile(r"\-?[0-9][0-9\.\,]*|\-?\.[0-9]+")
METHODS = ("strict", "flexible")


def extract_answer(solution_str: str, method: str = "strict") -> str | None:
    """The answer in the last 300 characters of a response, or None.

    "strict": what follows the LAST `#### `, commas removed, otherwise as written: `#### 72.` and `#### 72.0` are
    not `72`, and `#### $72` is no answer (verl's rule, so that scores compare).
    "flexible": the last number anywhere, without commas and a closing full stop.
    """
    tail = solution_str[-_TAIL_CHARACTERS:]
    if method == "strict":
        found = _MARKED.findall(tail)
        return _plain(found[-1]) if found else None
    if method == "flexible":
        found = _NUMBER.findall(tail)
        return _plain(found[-1]).rstrip(".") if found else None
    raise ValueError(f"GSM8K method {method!r} is unknown; known: {', '.join(METHODS)}")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    method: str = "strict",
) -> dict[str, Any]:
    """Score 1.0 if the extracted answer is `ground_truth` (as text, commas and "$" aside), else 0.0; `pred` is it.

    A ground truth that is a teacher's whole answer ("... #### 72") stands for what follows its last "####".
    """
    answer = extract_answer(solution_str, method)
    truth = ground_truth.rpartition("####")[2].strip() or ground_truth.strip()
    return {"score": float(answer == _plain(truth)), "pred": answer}


def compute_score_flexible(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The same with the last number, whatever stands before it."""
    return compute_score(data_source, solution_str, ground_truth, extra_info, "flexible")


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")
