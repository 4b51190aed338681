"""Signals that tell a job to end: the loop then ends between two steps; before the loop the process ends at once.

Slurm (preemption, time limits), Kubernetes and spot machines send SIGTERM or SIGUSR1 some time before they kill. Only the
controller acts on it (megarl/util/signals.py). The exit code then asks for another run (trainer/run/checkpoints.py).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
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
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # Python sets handlers in the main thread only
        yield preemption
        return
    before = {number: signal.signal(number, preemption.note) for number in JOB_SIGNALS}
    try:
        yield preemption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        _write(f"{signal.Signals(number).name}: {why}\n")
        raise SystemExit(REQUEUE)

    numbers = [
        number for number in JOB_SIGNALS if not keep_handlers or signal.getsignal(number) is signal.SIG_DFL
    ]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(text: str) -> None:
    os.write(2, text.encode())  # the signal may have interrupted print
