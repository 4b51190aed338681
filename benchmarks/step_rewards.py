"""A reward with scores of steps, for `algorithms.py`: for the form of an answer where it is written, for the right number at the end."""

from typing import Any

MARK = "####"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any
) -> dict[str, float | list[tuple[int, float]]]:
    """1 for the right number behind ####; steps: 0.2 for the mark at its end, -0.2 for what is no number behind it at the end."""
    before, mark, answer = solution_str.partition(MARK)
    steps = [(len(before) + len(MARK), 0.2)] if mark else []
    if mark and answer and not answer.strip().isdigit():
        steps.append((len(solution_str), -0.2))
    return {"score": float(bool(mark) and answer.strip() == ground_truth.strip()), "steps": steps}
