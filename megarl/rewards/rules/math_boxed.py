r"""Mathematics: is what the last `\boxed{...}` of a response holds the right answer?

`megarl.rewards.rules.math_answer` says what counts as the same.
"""

import re
from typing import Any

from megarl.rewards.rules.math_equality import equivalent

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    time_limit: float = 5.0,
) -> dict[str, Any]:
    r"""1.0 if the last `\boxed{}` has the right answer, else 0.0; `pred` is its content.

    `overtime` is 1.0 where the comparison took too long or too much memory, which counts as wrong.
    """
    answer = last_boxed(solution_str)
    if answer is None:
        return {"score": 0.0, "pred": None, "overtime": 0.0}
    same = equivalent(answer, bare_truth(ground_truth), time_limit)
    return {"score": float(bool(same)), "pred": answer.strip(), "overtime": float(same is None)}


def bare_truth(ground_truth: str) -> str:
    r"""The answer in a ground truth that is a whole solution, with a `\boxed{}`; else all of it."""
    boxed = last_boxed(ground_truth)
    return ground_truth if boxed is None else boxed


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 7` up to the end of its formula or line) holds; None:
    there is none, or its brace is not closed.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    content = rest.lstrip()
    if not content.startswith("{"):
        return re.split(r"\$|\n|\\[)\]]", rest.strip(" "), maxsplit=1)[0].strip() or None
    depth, escaped = 0, False
    for position, character in enumerate(content):
        if not escaped and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return content[1:position]
        escaped = character == "\\" and not escaped
    return None
