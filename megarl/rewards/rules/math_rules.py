r"""The rules `math` and `math_dapo`: is the answer in a response the right one?

`math` takes the last `\boxed{...}`; `math_dapo` is DAPO's rule, `Answer: x` near the end, +1 or -1 (arXiv:2503.14476, equation 7).
`megarl.rewards.rules.math_answer` says which answers are the same; here they are compared within limits of time and memory.
Numbers are compared in this process. All else goes to a child process, because an answer such as 9^{9^{9^9}} would take all
time and memory, inside of C code that no signal interrupts.
"""

import faulthandler
import functools
import os
import re
import resource
import select
import signal
from typing import Any

from megarl.rewards.rules.math_text import clean, closing, folded, number

_MEMORY_BYTES = 1 << 30
# The limit is of processor time, so that a busy machine makes no right answer wrong.
_WALL_PER_CPU = 10
_MAX_CHARACTERS = 2000  # a longer text is no answer


def equivalent(answer: str, truth: str, time_limit: float = 5.0) -> bool | None:
    """Whether two answers (LaTeX or plain) say the same, as `megarl.rewards.rules.math_answer` tells; None: undecided
    within `time_limit` seconds of processor time and 1 GiB of memory.
    """
    if max(len(answer), len(truth)) > _MAX_CHARACTERS:
        return answer.strip() == truth.strip()
    ours, theirs = clean(answer), clean(truth)
    if folded(ours) == folded(theirs):
        return folded(theirs) != ""
    numbers = number(ours), number(theirs)
    # Most answers; the rest takes a hundred times as long.
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    _warm_up()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _compare_and_exit(answer, truth, write, time_limit)
    os.close(write)
    in_time = bool(select.select([read], [], [], _WALL_PER_CPU * time_limit)[0])
    said = os.read(read, 1) if in_time else b""
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {b"1": True, b"0": False}.get(said)


@functools.cache
def _warm_up() -> None:
    """Import the libraries and let them build their tables, once: seconds that each child would spend anew."""
    from megarl.rewards.rules.math_answer import same_answer

    for answer, truth in ((r"\sqrt{\frac{1}{4}}", "0.5"), ("(x+1)^2", "x^2+2x+1"), ("x<1", r"(-\infty, 1)")):
        same_answer(answer, truth)


def _compare_and_exit(answer: str, truth: str, write: int, seconds: float) -> None:
    """In the child: write 1 or 0; nothing where time or memory runs out."""
    from megarl.rewards.rules.math_answer import same_answer

    try:
        faulthandler.disable()  # it would write to the report of the worker
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which kills, in the middle of C code too
        signal.setitimer(signal.ITIMER_PROF, seconds)
        os.write(write, b"1" if same_answer(answer, truth) else b"0")
    except MemoryError:
        pass
    except BaseException:  # answers that sympy cannot compare are not shown to be equal
        os.write(write, b"0")
    finally:
        os._exit(0)


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def boxed_score(
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
    r"""The content of the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 7` up to the end of its formula or line); None:
    there is none, or its brace is not closed.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    content = rest.lstrip()
    if not content.startswith("{"):
        return re.split(r"\$|\n|\\[)\]]", rest.strip(" "), maxsplit=1)[0].strip() or None
    end = closing(content, "{", "}")
    return None if end is None else content[1:end]


_TAIL_CHARACTERS = 300
# `Answer:`, `**Answer**:`, `**Answer:**`, `\textbf{Answer:}`, with the colon of any width; the answer may be on a later line.
_ANNOUNCED = re.compile(r"answer[\s*_`}]*[:\uff1a][\s*_`}]*", re.IGNORECASE)
_OPENERS = frozenset(("", "$", "$$", "\\[", "\\("))
_CLOSED_FORMULA = re.compile(r"[^$]*\$\$?([^$]+)\$\$?")


def dapo_score(
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
    r"""The answer behind the last `Answer:` that has one, without Markdown, `$`, `\boxed{}` and a full stop;
    without one, the last `\boxed{}` (as in verl since 0.9).
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
