"""Signals that announce the end of a job to all of its processes, to which the controller alone reacts.

Slurm, spot machines of clouds and systemd send them to all processes of a job. The controller then saves the run's state, for which it
needs the other processes: ranks, engines, rewards and Ray's servers live on until it ends them.
"""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager

JOB_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def job_signals_blocked() -> Iterator[None]:
    """Processes that this thread starts within the block never get the signals, nor do their children unless they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_job_signals() -> None:
    """Let this process survive the signals; to be called in its main thread. Its child processes get them as usual.

    At SIGUSR1 it writes the Python stacks of all its threads to stderr, also from within C code.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGTERM, _do_nothing)  # child processes would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def _do_nothing(signum: int, frame: object) -> None:
    pass
