"""Agents that are copies of a fork server, as the engine's process sees them."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from megarl.gateway.fork_server import Request
from megarl.gateway.sandboxes.local import ROOT
from megarl.gateway.sandboxes.processes import ended_within
from megarl.rollout.engine import EngineError

# A Python other than the run's gets megarl's modules, but not the packages that are installed next to them.
_BOOT = (
    "import sys; root = sys.argv.pop(1); sys.path.append(root); from megarl.gateway.{module} import main; "
    "sys.path.remove(root); main()"
)
_LOG_END = 1000  # characters


def python_command(python: str | None, module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this room as a script.

    Args:
        python: the interpreter; None: that of this process.
    """
    return [python or sys.executable, "-c", _BOOT.format(module=module), ROOT, *arguments]


class ForkServer:
    """A fork server and its copies; see `megarl.gateway.fork_server`."""

    def __init__(
        self,
        file: str,
        function: str,
        modules: Sequence[str],
        environment: Mapping[str, str],
        python: str | None = None,
    ) -> None:
        """Starts it, and does not wait for its imports.

        Args:
            file, function: the agent.
            environment: of its imports; it has no HOME.
            python: its interpreter; None: that of this process.
        """
        self._file, self._function = file, function
        self._folder = folder = Path(tempfile.mkdtemp(prefix="agents-"))
        self._path, self._log = str(folder / "socket"), folder / "log"
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(self._path)
            listener.listen(4096)  # requests before the imports are done are kept
            number = listener.fileno()
            self._process = subprocess.Popen(
                python_command(python, "fork_server", str(number), str(Path(file).parent), *modules),
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[number],
                start_new_session=True,
            )

    async def start(self, environment: Mapping[str, str], folder: Path, log: Path) -> Copy:
        """A copy that calls the agent.

        Raises:
            EngineError: the server has ended.
        """
        request = Request(self._file, self._function, dict(environment), str(folder), str(log))
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
            writer.write(json.dumps(asdict(request)).encode() + b"\n")
        except OSError as error:
            raise self.ended() from error
        return Copy(self, reader, writer)

    def ended(self) -> EngineError:
        """The error of a server that has ended."""
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return EngineError(f"the agents' fork server (rollout.gateway.preload) has ended: {text[-_LOG_END:]}")

    def close(self) -> None:
        """End it and its copies, and remove its folder."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder)


class Copy:
    """An agent's process."""

    def __init__(
        self, server: ForkServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server, self._writer = server, writer
        self._answer = asyncio.ensure_future(reader.read())

    async def wait(self) -> int:
        """Its exit code.

        Raises:
            EngineError: the server has ended.
        """
        with suppress(ConnectionError):
            if answer := await asyncio.shield(self._answer):
                return int(answer)
        raise self._server.ended()

    async def end(self) -> None:
        """Kill it and what it has started, and wait for its end."""
        with suppress(OSError):  # the server has closed the connection, or has ended
            self._writer.write_eof()
            await self._answer
        self._writer.close()


async def run_copy(copy: Copy, seconds: float) -> int | None:
    """Wait for the end of a copy, as `run_agent` does for that of a program.

    Raises:
        EngineError: the server has ended.
    """
    try:
        return await ended_within(copy, seconds)
    finally:
        await copy.end()
