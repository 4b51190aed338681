"""Starts of shadow ranks in processes that have done their imports, which take as long as a tiny rank: `WarmStarts.start` is
`megarl.shadow.dry_run.start` with forks of `warm_process`. Each start has a fork of its own, so that none sees another's state.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from megarl.shadow.dry_run import ENVIRONMENT, MODULE
from megarl.shadow.requests import Request
from tests.shadow.warm_process import LONGEST, NUMBER

MOST = 4  # processes at a time


class Fork:
    """What `run_ranks` uses of a `subprocess.Popen`. `reads`: the pipe from which its number and then its exit code come."""

    def __init__(self, reads: int) -> None:
        self._reads = reads
        self._number: int | None = None
        self._code: int | None = None

    def wait(self) -> int:
        if self._code is None and self._find():
            self._code = int(os.read(self._reads, NUMBER) or -signal.SIGKILL)  # nothing: it was killed
            os.close(self._reads)
        return self._code

    def kill(self) -> None:
        if self._code is None and self._number is not None:
            os.kill(self._number, signal.SIGKILL)
        elif self._code is None:  # it is not there yet, and will find nobody to tell its number to
            os.close(self._reads)
            self._code = -signal.SIGKILL

    def _find(self) -> int:
        """Raises: RuntimeError: the process that forks has ended; it printed why."""
        if self._number is None:
            told = os.read(self._reads, NUMBER)
            if not told:
                raise RuntimeError("the process that forks shadow ranks has ended")
            self._number = int(told)
        return self._number


class WarmStarts:
    """Keeps a process for each environment, card and choice of layers that its starts ask for."""

    def __init__(self) -> None:
        self._servers: dict[str, tuple[socket.socket, subprocess.Popen]] = {}  # the last one used is last

    def start(
        self,
        requests: Sequence[Request],
        log: Path,
        module: str = MODULE,
        more: Mapping[str, str] | None = None,
    ) -> Fork:
        first = requests[0]
        key = json.dumps([module, more or {}, first.card, first.transformer_engine], sort_keys=True)
        server = self._servers.pop(key, None)
        if server is None or server[1].poll() is not None:
            server = _begin(module, more or {})
        self._servers[key] = server
        if len(self._servers) > MOST:
            _end(self._servers.pop(next(iter(self._servers))))
        reads, writes = os.pipe()
        told = json.dumps([[asdict(request) for request in requests], str(log), os.getcwd()]).encode()
        assert len(told) < LONGEST
        socket.send_fds(server[0], [told], [writes])
        os.close(writes)
        return Fork(reads)

    def close(self) -> None:
        while self._servers:
            _end(self._servers.popitem()[1])


def _begin(module: str, more: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.shadow.warm_process", str(theirs.fileno()), module],
            env={**os.environ, **ENVIRONMENT, **more},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parents[2],
        )
    return ours, process


def _end(server: tuple[socket.socket, subprocess.Popen]) -> None:
    server[0].close()
    server[1].wait()
