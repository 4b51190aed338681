"""The first lines of a scheduler's process, before SGLang is imported there."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.imports import without_collection

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class SchedulerMain:
    """A scheduler's main function, for multiprocessing to pickle.

    It pickles its target before its arguments, whose classes are SGLang's: what this does when it is unpickled comes before
    the import of SGLang.
    """

    def __reduce__(self) -> tuple:
        return _begin, ()

    def __call__(self, *args, **kwargs) -> None:
        """Arguments are those of SGLang's `run_scheduler_process`."""
        die_with_parent()
        with without_collection():
            from megarl.rollout.sglang_process import run_scheduler
        gc.enable()
        run_scheduler(*args, **kwargs)


def _begin() -> SchedulerMain:
    die_with_parent()
    gc.disable()  # as `without_collection`, which ends it
    return SchedulerMain()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends.

    SGLang asks for the same, but only after seconds of imports: an owner that died before that
    leaves a scheduler behind. Whether it has died already is known as soon as multiprocessing has said whose child this is.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that are spawned meanwhile do not import this one's main module, nor what that imports: for an engine's owner all of
    Ray (Python's multiprocessing/spawn.py, get_preparation_data)."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
