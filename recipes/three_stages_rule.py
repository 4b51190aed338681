"""The rule that judges the answers of the three stages (`megarl make-task --preferences`); nothing is trained with it."""

from typing import Any

from megarl.util.packages import example

judge = example("preference_task").judge


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None
) -> dict[str, float]:
    """The mean of the answer's qualities as `score`, and each of them."""
    return judge(solution_str, ground_truth)
