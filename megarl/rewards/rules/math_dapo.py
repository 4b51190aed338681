r"""DAPO's rule for mathematics: `Answer: x` near the end, +1 or -1 (arXiv:2503.14476, equation 7)."""

import re
from typing import Any

from megarl.rewards.rules.math_boxed import bare_truth, last_boxed
from megarl.rewards.rules.math_equality import equivalent

_TAIL_CHARACTERS = 300
# `Answer:`, `**Answer**:`, `**Answer:**`, `\textbf{Answer:}`, with the colon of any width; the answer may be on a later line.
_ANNOUNCED = re.compile(r"answer[\s*_`}]*[:\uff1a][\s*_`}]*", re.IGNORECASE)
_OPENERS = frozenset(("", "$", "$$", "\\[", "\\("))
_CLOSED_FORMULA = re.compile(r"[^$]*\$\$?([^$]+)\$\$?")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    time_limit: float = 5.0,
) -> dict[str, Any]:
    """1.0 if the answer in the last 300 characters is right, else -1.0; `acc` is 1.0 or 0.0, `pred` the answer.

    `overtime` is 1.0 where the comparison took too long or too much memory, which counts as wrong.
    """
    answer = extract_answer(solution_str)
    same = answer is not None and equivalent(answer, bare_truth(ground_truth), time_limit)
    return {
        "score": 1.0 if same else -1.0,
        "acc": float(bool(same)),
        "pred": answer,
        "overtime": float(same is None),
    }


def extract_answer(response: str) -> str | None:
    r"""What follows the last `Answer:` that has something behind it, without Markdown, `$`, `\boxed{}` and a full stop;
    where there is no such, the last `\boxed{}` (as in verl since 0.9).
    """
    tail = response[-_TAIL_CHARACTERS:]
    for announced in reversed(list(_ANNOUNCED.finditer(tail))):
        rest = tail[announced.end() :]
        line = next((line for line in map(_bare, rest.splitlines()) if line not in _OPENERS), None)
        if line is not None:
            return _content(line, rest)
    return last_boxed(tail)


def _content(line: str, rest: str) -> str:
    if "\\boxed" in line or "\\fbox" in line:
        boxed = last_boxed(line) or last_boxed(rest)  # a box may go over several lines
        return line if boxed is None else boxed.strip()
    formula = _CLOSED_FORMULA.fullmatch(line)
    return line if formula is None else formula[1].strip()


def _bare(line: str) -> str:
    return line.strip().strip("*`_ ").rstrip(".").strip("*`_ ")
