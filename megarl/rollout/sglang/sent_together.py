"""Requests that SGLang's scheduler receives together: it computes what is there when it looks."""

import asyncio
import pickle
from typing import Any

import zmq


class SentTogether:
    """SGLang's socket to its schedulers. What is sent while the loop goes through the tasks that are ready is sent at the end of that,
    as parts of one message: SGLang receives each part as a message, but ZeroMQ gives it none before all are there.

    Else the first of many requests is computed alone, while the others are still being prepared, or on their way.
    """

    def __init__(self, socket: zmq.Socket, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._loop = socket, loop
        self._waiting: list[tuple[bytes, int]] = []

    def send(self, message: bytes, flags: int = 0) -> asyncio.Future:
        self._waiting.append((message, flags))
        if not self._loop.is_running():
            self._flush()
        elif len(self._waiting) == 1:
            self._loop.call_soon(self._flush)
        sent = self._loop.create_future()  # as SGLang's own socket returns one
        sent.set_result(None)
        return sent

    def send_pyobj(self, message: Any, flags: int = 0, protocol: int | None = None) -> asyncio.Future:
        """Pickled at once: SGLang changes what it has sent."""
        return self.send(pickle.dumps(message, protocol), flags)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for number, (message, flags) in enumerate(waiting, start=1):
            self._socket.send(message, flags=flags if number == len(waiting) else flags | zmq.SNDMORE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
