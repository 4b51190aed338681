"""Whether two mathematical answers are the same, found out within limits of time and memory.

Numbers are compared here. All else goes to a child process, because an answer such as 9^{9^{9^9}} would take all time
and memory, inside of C code that no signal interrupts.
"""

import faulthandler
import functools
import os
import resource
import select
import signal

from megarl.rewards.rules.math_text import clean, folded, number

_MEMORY_BYTES = 1 << 30
# The limit is of processor time, so that a busy machine makes no right answer wrong.
_WALL_PER_CPU = 10
_MAX_CHARACTERS = 2000  # a formula; what is longer is no answer


def equivalent(answer: str, truth: str, time_limit: float = 5.0) -> bool | None:
    """Whether two answers (LaTeX or plain) say the same, as `megarl.rewards.rules.math_answer` tells; None: not found out
    within `time_limit` seconds of processor time and 1 GiB of memory.
    """
    if max(len(answer), len(truth)) > _MAX_CHARACTERS:
        return answer.strip() == truth.strip()
    ours, theirs = clean(answer), clean(truth)
    if folded(ours) == folded(theirs):
        return folded(theirs) != ""
    numbers = number(ours), number(theirs)
    if (
        numbers[0] is not None and numbers[1] is not None
    ):  # most answers; the rest takes a hundred times as long
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
    """In the child: write 1 or 0; nothing where it cannot be found out."""
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
    except BaseException:  # what sympy cannot compare was not shown to be equal
        os.write(write, b"0")
    finally:
        os._exit(0)
