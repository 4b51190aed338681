"""A stand-in for the gateway behind a Unix socket: it answers each request with one word."""

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.environment import Task
from megarl.gateway.sandboxes.interface import AgentProcess, Sandbox, SandboxSettings, new_name
from megarl.gateway.sandboxes.processes import run_agent
from megarl.gateway.server import listen, listen_locally


@dataclass
class Gateway:
    path: Path
    listener: socket.socket
    connections: list[socket.socket] = field(default_factory=list)

    def answer(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(client)
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        if client.recv(1 << 16):
            client.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")
            client.close()

    def end(self) -> None:
        for one in (self.listener, *self.connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    path = tmp_path / "g" / "socket"
    path.parent.mkdir()
    made = Gateway(path, listen_locally(path))
    threading.Thread(target=made.answer, daemon=True).start()
    yield made
    made.end()


@pytest.fixture
def settings(gateway: Gateway) -> SandboxSettings:
    with listen("127.0.0.1", 0) as free:
        return SandboxSettings(str(gateway.path), free.getsockname()[1])


Play = Callable[..., tuple[int | None, str]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """play(sandbox, code of Python, extra_info, meanwhile, python, variables) -> the agent's exit code, and its output.

    `meanwhile` is called until it returns true; then the agent is cancelled, and its exit code is None.
    """

    def run(
        sandbox: Sandbox,
        code: str,
        extra: dict[str, Any] | None = None,
        meanwhile: Callable[[], Any] = bool,
        python: str = sys.executable,
        **variables: str,
    ) -> tuple[int | None, str]:
        name = new_name()
        folder = tmp_path / name
        (folder / "work").mkdir(parents=True)
        task = Task("p/0", "", None, "", None, extra or {})
        command = (python, "-I", "-S", "-c", code)
        agent = AgentProcess(name, task, command, folder, folder / "work", variables)
        log = folder / "log"

        async def played() -> int | None:
            with log.open("wb") as output:
                running = asyncio.create_task(run_agent(sandbox, agent, output, 60.0))
                while not running.done() and not meanwhile():
                    await asyncio.wait({running}, timeout=0.05)
                running.cancel()
                (ended,) = await asyncio.gather(running, return_exceptions=True)
            if isinstance(ended, Exception):
                raise ended
            return None if isinstance(ended, BaseException) else ended

        return asyncio.run(played()), log.read_text()

    return run
