"""Signals that every process of a job gets when the job shall end, on which the controller alone acts.

Slurm, a cloud's spot machines and systemd send them to all processes of a job. The controller saves what is to be saved,
for which it needs the others: ranks, engines, rewards and Ray's servers live on until it ends them.
"""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager

JOB_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def job_signals_blocked() -> Iterator[None]:
    """What is started meanwhile by this thread never gets them, nor do its children unless they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_job_signals() -> None:
    """Make this process live on; to be called in its main thread. What it starts gets them as if this was never called.

    At SIGUSR1 it writes the Python stacks of all its threads to stderr, also from within C code.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGTERM, _do_nothing)  # SIG_IGN would be inherited by what it starts
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def _do_nothing(signum: int, frame: object) -> None:
    pass
