"""The Scorer's side of a worker: starts it, talks to it, and says how it ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Hashable
from multiprocessing.connection import Connection
from typing import Any

import psutil

from megarl.rewards.functions import RewardSpec
from megarl.rewards.processes.worker import Setup
from megarl.rewards.sample import Sample, Score

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
# `-c`, not `-m`: the worker imports from where this process does, and never this process's own main file.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megarl.rewards.processes.worker import main; main(*map(int, sys.argv[2:]))"
)
_REPORT_BYTES = 4000
_MAX_FRAMES = 8
_WORKER = "megarl/rewards/processes/worker.py"


class WorkerProcess:
    """A worker that can be started again after its end. Used by one thread."""

    def __init__(self, spec: RewardSpec, timeout: float) -> None:
        self._setup = Setup(spec, timeout)
        self._process: subprocess.Popen | None = None
        self._count = 0
        self.is_ready = False
        self.jobs: dict[Any, float] = {}  # what it is at -> when it was sent (time.monotonic)
        self._stopped_since: float | None = None

    @property
    def is_running(self) -> bool:
        """Started, and not yet found to have ended."""
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    @property
    def was_hit(self) -> bool:
        """It has ended, and what it was at was not the reason: killed (by hand, for want of memory), or stopped before."""
        assert self._process is not None
        return self._overdue or self._stopped_since is not None or self._process.returncode == -signal.SIGKILL

    @property
    def oldest(self) -> float:
        """When the oldest of its jobs was sent; it has one."""
        return min(self.jobs.values())

    @property
    def waitables(self) -> list[Any]:
        """What becomes readable when it says something or ends."""
        return [self._connection, self._ended]

    def start(self) -> None:
        here, there = socket.socketpair()
        self._report = os.memfd_create("megarl_reward_report")
        arguments = [json.dumps(sys.path), str(there.fileno()), str(self._report), str(os.getpid())]
        with there:
            # A session of its own: Ctrl-C is for the controller, and everything that rewards start dies at once.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(), self._report),
                start_new_session=True,
            )
        # A pidfd beside the socket: children of a reward may hold the socket open after the worker's end.
        self._ended = os.pidfd_open(self._process.pid)
        self._connection = Connection(here.detach())
        self._numbers: dict[int, Any] = {}
        self.is_ready, self._overdue, self._stopped_since = False, False, None
        self.jobs = {}
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # it is dead already, which `has_ended` tells
            self._connection.send(self._setup)

    def send(self, job: Hashable, sample: Sample) -> bool:
        """Hand over a sample; False if the worker has ended."""
        assert self.is_ready
        try:
            self._connection.send((self._count, sample))
        except (BrokenPipeError, ConnectionResetError):
            return False
        self._numbers[self._count] = job
        self.jobs[job] = time.monotonic()
        self._count += 1
        return True

    def receive(self) -> list[tuple[Any, Score]]:
        """The scores that have come. RuntimeError: the worker cannot set up what it needs."""
        scores = []
        if self.has_ended:
            self._kill_group()  # whoever else holds the socket, so that reading it comes to an end
        try:
            while self._connection.poll():
                message = self._connection.recv()
                if self.is_ready:
                    job = self._numbers.pop(message[0])
                    del self.jobs[job]
                    scores.append((job, message[1]))
                elif message is None:
                    self.is_ready = True
                else:
                    raise RuntimeError(message)
        except (EOFError, ConnectionResetError):
            # The socket is closed, so it is ending: its exit code is of interest, a moment's delay is not.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
            self.kill()
        return scores

    def stopped_seconds(self) -> float:
        """For how long it has been stopped (SIGSTOP, a debugger), as far as it was looked at meanwhile; 0: it is not."""
        assert self._process is not None
        if self.has_ended:
            return 0.0
        if psutil.Process(self._process.pid).status() not in _STOPPED:
            self._stopped_since = None
            return 0.0
        if self._stopped_since is None:
            self._stopped_since = time.monotonic()
        return time.monotonic() - self._stopped_since

    def kill_overdue(self) -> None:
        """Kill it because it is over time and has not ended by itself."""
        self._overdue = True
        self.kill()

    def kill(self) -> None:
        """Kill it and all that it started; `has_ended` is true afterwards."""
        assert self._process is not None
        self._kill_group()
        self._process.kill()
        self._process.wait()

    def end(self) -> str:
        """Kill what is left of it; returns how it ended."""
        if self._process is None:
            return ""
        self.kill()
        reason = self._reason()
        self._connection.close()
        os.close(self._ended)
        os.close(self._report)
        self._process, self.is_ready, self.jobs = None, False, {}
        return reason

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # its number is its group's: it began a session
            os.killpg(self._process.pid, signal.SIGKILL)

    def _reason(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        report = os.pread(self._report, _REPORT_BYTES, 0).decode(errors="replace").strip()
        if report.startswith("Timeout"):
            return "\n".join([f"no result within {self._setup.timeout:g} s; it was at", *_stack(report)])
        if self._stopped_since is not None:
            return f"its process was stopped, and killed after {time.monotonic() - self._stopped_since:.0f} s of that"
        if self._overdue:
            return f"no result within {self._setup.timeout:g} s, and its process did not end by itself"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return "\n".join([f"its process {how}", *_stack(report)])


def _stack(report: str) -> list[str]:
    """The frames in faulthandler's report that are the reward's own, innermost first."""
    frames = [line for line in report.splitlines() if line.startswith("  File ")]
    own = list(itertools.takewhile(lambda frame: _WORKER not in frame and "/asyncio/" not in frame, frames))
    return own[:_MAX_FRAMES]
