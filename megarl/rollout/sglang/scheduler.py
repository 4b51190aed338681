"""How a scheduler's process begins: on a GPU as a new one, before SGLang is imported there; on a CPU as a copy of its owner, which has
imported it.

A copy spares the imports, which are most of a start's time (`python benchmarks/imports.py`). CUDA does not survive one, so that a GPU's
schedulers begin anew.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import stat
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from megarl.util.imports import without_collection

_SCHEDULER = "megarl.rollout.sglang.process"  # imported in the scheduler's process alone: it imports SGLang
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
        if multiprocessing.get_start_method() == "fork":
            let_go_of_sockets()
            _share_title()
            multiprocessing.set_start_method("spawn", force=True)  # what SGLang expects
        with without_collection():
            run_scheduler = import_module(_SCHEDULER).run_scheduler
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


@contextmanager
def forked() -> Iterator[None]:
    """Processes that are started meanwhile by multiprocessing's own functions are copies of this one.

    Only the calling thread is copied. Locks that others hold at that moment stay taken in the copy: Python and the C library see to
    theirs; Ray's are not used there.
    """
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def let_go_of_sockets() -> None:
    """Let the owner's connections end with the owner: who is at their other ends (Ray's raylet) would else think that it lives on
    here. Their numbers stay taken, since the owner's objects, copied too, may close them at any time."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (int(name) for name in os.listdir("/proc/self/fd")):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:  # the listing's own, which is closed by now
            continue
        if is_socket:
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _share_title() -> None:
    """Ray has written this process's title over where the package setproctitle, which SGLang calls, would look for it (Ray 2.60)."""
    ray = sys.modules.get("ray")
    if ray is not None:
        import setproctitle

        setproctitle.setproctitle = ray._raylet.setproctitle
