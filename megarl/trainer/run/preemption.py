"""Signals that tell a job to end: the loop then ends between two steps; before the loop the process ends at once.

Slurm (preemption, time limits), Kubernetes and spot machines send SIGTERM or SIGUSR1 some time before they kill. Only the
controller acts on it (megarl/util/signals.py). The exit code then asks for another run (trainer/run/checkpoints.py).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megarl.util.signals import JOB_SIGNALS

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: tools that requeue jobs go by it


@dataclass
class Preemption:
    """Whether the job was told to end: `requested` is the name of the first signal that said so, None if none has."""

    requested: str | None = None
    num_terms: int = 0

    def note(self, number: int, frame: object) -> None:
        """The handler. A second SIGTERM ends the run at once; SIGTERM after SIGUSR1, the early warning, does not.

        Raises:
            SystemExit: with REQUEUE.
        """
        name = signal.Signals(number).name
        self.num_terms += number == signal.SIGTERM
        if self.num_terms > 1:
            _write(f"{name} again: ending at once\n")
            raise SystemExit(REQUEUE)
        if self.requested is None:
            self.requested = name
            _write(f"{name}: the run ends after this step; a second SIGTERM ends it at once\n")


@contextmanager
def noting_signals() -> Iterator[Preemption]:
    """Record SIGTERM and SIGUSR1 during the block instead of their earlier handlers; outside the main thread do nothing."""
    preemption = Preemption()
    with _handled_by(preemption.note, JOB_SIGNALS):
        yield preemption


BEFORE_THE_FIRST_STEP = "ending before the first step, to be started again"


@contextmanager
def ending_at_once(why: str = BEFORE_THE_FIRST_STEP, *, keep_handlers: bool = False) -> Iterator[None]:
    """SIGTERM and SIGUSR1 end this process with REQUEUE and one line during the block: while a run reads inputs and starts
    processes, and in a user's own program. Otherwise Ray's handler would write stacks and abort.

    Outside the main thread it does nothing.

    Args:
        why: the line, after the signal's name.
        keep_handlers: leave alone a signal for which the program has a handler of its own.
    """

    def end(number: int, frame: object) -> None:
        _write(f"{signal.Signals(number).name}: {why}\n")
        raise SystemExit(REQUEUE)

    unhandled = [number for number in JOB_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    with _handled_by(end, unhandled if keep_handlers else JOB_SIGNALS):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, object], None], numbers: Sequence[int]) -> Iterator[None]:
    """Handle signals during the block; Python sets handlers in the main thread only, elsewhere nothing is done.

    The block ends with the handler's exit code also where that has ended a call of Ray: Ray 2.60 then raises another SystemExit, with
    the code 1.
    """
    codes: list[str | int | None] = []

    def handle(number: int, frame: object) -> None:
        try:
            handler(number, frame)
        except SystemExit as end:
            codes.append(end.code)
            raise

    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in (numbers if in_main else ())}
    try:
        yield
    except SystemExit as end:
        if codes and hasattr(end, "ray_terminate_msg"):
            raise SystemExit(codes[-1]) from None
        raise
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _write(text: str) -> None:
    os.write(2, text.encode())  # the signal may have interrupted print
