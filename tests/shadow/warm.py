"""Starts shadow ranks in forks of processes that have done their imports, since imports take as long as a tiny rank:
`WarmStarts.start` replaces `megarl.shadow.dry_run.start`. Each start has a fork of its own, so that none sees another's state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from megarl.shadow.dry_run import ENVIRONMENT, MODULE
from megarl.shadow.requests import Request
from tests.fixtures.forks import Fork, Server

MOST = 4  # processes at a time


class WarmStarts:
    """Keeps a process for each environment, card and choice of layers that starts ask for."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}  # the most recently used is last

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
        if server is None or server.has_ended:
            environment = {**os.environ, **ENVIRONMENT, **(more or {})}
            server = Server("tests.shadow.warm_process", [module], environment)
        self._servers[key] = server
        if len(self._servers) > MOST:
            self._servers.pop(next(iter(self._servers))).close()
        return server.fork(json.dumps([[asdict(request) for request in requests], str(log), os.getcwd()]))

    def close(self) -> None:
        while self._servers:
            self._servers.popitem()[1].close()
