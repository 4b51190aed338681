"""A controller that waits in a call of Ray for a server that is gone or stopped, which no exception reaches.

Guarantee: while `ending_when_stuck` is open, the process ends if a server of its Ray cluster on this machine has ended, or has
been stopped for `STOPPED_SECONDS`, and a thread of megarl's is within calls of Ray for `STUCK_SECONDS` after that: Ray 2.60 waits for its raylet
(`ray.put`) and its GCS server (`ray.init`, `ray.put`, new actors, placement groups, `ray.kill`) within C++, for ever, or for a minute
until it aborts the process with exit code 1. Whoever started the run is asked to start it again.

A controller that does something else is left alone: it may be telling of that very failure, or compute; the next time that it
waits for a rank it learns of it (see watch.py).
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
import ray

import megarl
from megarl.cluster.failures.watch import STOPPED_SECONDS
from megarl.cluster.guard import process_state

STUCK_SECONDS = 8.0
_LOOK_SECONDS = 1.0
_BEGIN_SECONDS = 0.1  # between looks until all servers were seen, so that none ends before
_SERVERS = ("gcs_server", "raylet")
_RAY, _OURS = (f"{Path(package.__file__).parent}{os.sep}" for package in (ray, megarl))


@contextmanager
def ending_when_stuck(exit_code: int, servers: Mapping[str, int] | None = None) -> Iterator[None]:
    """Watch servers of Ray, from a thread.

    Args:
        exit_code: of this process, if it has to end.
        servers: process ids by name; None: those that this process starts meanwhile.
    """
    over = threading.Event()
    # Those of an earlier cluster, which may be about to end, are not of this one.
    before = {child.pid for child in psutil.Process().children()}
    watcher = threading.Thread(
        target=_watch, args=(exit_code, before, servers, over), name="ray-watch", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(exit_code: int, before: set[int], known: Mapping[str, int] | None, over: threading.Event) -> None:
    servers = dict(known or {})
    complete = known is not None
    stopped, stuck, last = 0.0, 0.0, time.monotonic()
    while not over.wait(_LOOK_SECONDS if complete else _BEGIN_SECONDS):
        if not complete:
            servers |= _servers(before)
            complete = len(servers) == len(_SERVERS)
        # This process may have been stopped itself: a long time since the last look counts as a short one.
        now = time.monotonic()
        passed, last = min(now - last, 2 * _LOOK_SECONDS), now
        states = {name: process_state(pid) for name, pid in servers.items()}
        gone = [name for name, state in states.items() if state is None]
        still = [name for name, state in states.items() if state == "T"]
        stopped = stopped + passed if still else 0.0
        lost = bool(gone) or stopped >= STOPPED_SECONDS
        stuck = stuck + passed if lost and any(map(_is_in_ray, sys._current_frames().values())) else 0.0
        if stuck >= STUCK_SECONDS:
            name = (gone or still)[0]
            what = f"Ray's {name} (process {servers[name]}) {'has ended' if gone else 'is stopped'}"
            sys.stderr.write(
                f"error: {what}, and this process waits for it; ending, to be started again. It is at\n"
            )
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
            os._exit(exit_code)  # the guards of this process and of the ranks end and remove the rest


def _is_in_ray(frame: FrameType | None) -> bool:
    """Whether a thread is in a function of Ray's that megarl has called, and in none of megarl's that this has called."""
    in_ray = False
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OURS):
            return in_ray
        in_ray = in_ray or path.startswith(_RAY)
        frame = frame.f_back
    return False


def _servers(before: set[int]) -> dict[str, int]:
    found = {}
    for child in psutil.Process().children():
        try:
            if child.pid not in before and child.name() in _SERVERS:
                found[child.name()] = child.pid
        except psutil.NoSuchProcess:
            continue
    return found
