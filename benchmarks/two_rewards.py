"""A reward of two parts, for `algorithms.py`: the right number, and the form in which it is asked for."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any
) -> dict[str, float]:
    """1 for the right number behind ####, and as `form` 1 for any number there."""
    _, mark, answer = solution_str.partition("####")
    answer = answer.strip()
    return {"score": float(answer == ground_truth.strip()), "form": float(bool(mark) and answer.isdigit())}
