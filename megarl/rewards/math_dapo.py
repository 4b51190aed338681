"""DAPO's rule for mathematics: `Answer: x` near the end, +1 or -1 (arXiv:2503.14476, equation 7)."""

import re
from typing import Any

from megarl.rewards.math_boxed import equivalent, last_boxed

_TAIL_CHARACTERS = 300
_ANSWER = re.compile(r"answer[ \t]*:[ \t]*([^\n]+)", re.IGNORECASE)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    time_limit: float = 5.0,
) -> dict[str, Any]:
    """1.0 if the last `Answer:` of the last 300 characters is right, else -1.0; `acc` is 1.0 or 0.0, `pred` the answer."""
    answer = extract_answer(solution_str)
    right = answer is not None and bool(equivalent(answer, ground_truth, time_limit))
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}


def extract_answer(response: str) -> str | None:
    r"""What follows the last `Answer:` on its line, without Markdown, `$`, `\boxed{}` and a full stop."""
    found = _ANSWER.findall(response[-_TAIL_CHARACTERS:])
    if not found:
        return None
    answer = found[-1].strip(" \t*`$.")
    boxed = last_boxed(answer)
    return (answer if boxed is None else boxed).strip()
