r"""Mathematics: is the last `\boxed{...}` of a response the right answer?

Answers are the same if they are the same text but for spacing and the like, or if math-verify (a library over sympy)
finds them equivalent: 1/2 and 0.5, (x+1)^2 and x^2+2x+1, {1,2} and {2,1}. That runs in a child process, because an
answer such as 9^{9^{9^9}} would take all time and memory, inside of C code that no signal interrupts.
"""

import faulthandler
import functools
import logging
import os
import re
import resource
import select
import signal
from fractions import Fraction
from typing import Any

_MEMORY_BYTES = 1 << 30
# The limit is of processor time, so that a busy machine makes no right answer wrong.
_WALL_PER_CPU = 10
_MAX_CHARACTERS = 2000  # a formula; what is longer is no answer
_NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?")
_SPACING = re.compile(r"\\[,;:! ]|\\quad|\\left|\\right|\\displaystyle|\s+|\$")


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
    truth = last_boxed(ground_truth)
    same = equivalent(answer, ground_truth if truth is None else truth, time_limit)
    return {"score": float(bool(same)), "pred": answer.strip(), "overtime": float(same is None)}


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` (or `\fbox{...}`) holds; None: there is none, or its brace is not closed."""
    begin = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if begin < 0:
        return None
    begin = text.index("{", begin) + 1
    depth = 1
    for position in range(begin, len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[begin:position]
    return None


def equivalent(answer: str, truth: str, time_limit: float = 5.0) -> bool | None:
    """Whether two formulas (LaTeX or plain) say the same; None: not found out within `time_limit` seconds of
    processor time and 1 GiB of memory.
    """
    plain = _plain(answer), _plain(truth)
    if plain[0] == plain[1]:
        return plain[0] != ""
    if all(_NUMBER.fullmatch(text) for text in plain):  # most answers; the rest takes a hundred times as long
        ours, theirs = (Fraction(text.replace(",", "")) for text in plain)
        return ours == theirs
    if max(len(answer), len(truth)) > _MAX_CHARACTERS:
        return False
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
    """Import the library and let it build its tables, once: seconds that each child would spend anew."""
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that limits are ours to set, which they are
    for truth, answer in ((r"\frac{1}{2}", "0.5"), ("(x+1)^2", "x^2+2x+1"), (r"\{1,2\}", "2,1")):
        _library_says(answer, truth)


def _library_says(answer: str, truth: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    settings = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    # The library's own limits rest on alarms, which do not reach into C; the process is killed instead.
    ours, theirs = (
        parse(f"\\boxed{{{text}}}", settings, parsing_timeout=None, raise_on_error=True)
        for text in (answer, truth)
    )
    return verify(theirs, ours, timeout_seconds=None)


def _plain(formula: str) -> str:
    return _SPACING.sub("", formula).rstrip(".")


def _compare_and_exit(answer: str, truth: str, write: int, seconds: float) -> None:
    """In the child: write 1 or 0; nothing where it cannot be found out."""
    try:
        faulthandler.disable()  # it would write to the report of the worker
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which kills, in the middle of C code too
        signal.setitimer(signal.ITIMER_PROF, seconds)
        os.write(write, b"1" if _library_says(answer, truth) else b"0")
    except MemoryError:
        pass
    except BaseException:  # what cannot be parsed is no formula, and so no right answer
        os.write(write, b"0")
    finally:
        os._exit(0)
