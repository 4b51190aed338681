"""Control channels: where a trainer rank and an engine rank share memory, they tell each other over a Unix socket that the packets of a
bucket are complete, or were taken.

If one end dies or is silent for too long, the other end raises a `LinkError` that names it.
"""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

_TOKEN = struct.Struct("<qq")
Token = tuple[int, int]
"""(version, bucket)."""


class LinkError(RuntimeError):
    """A rank that takes part in a weight sync is gone, silent, or at another bucket or version."""


class ControlChannel:
    """One end of a control connection, which carries tokens and open files."""

    def __init__(self, connection: socket.socket, peer: str, timeout: float) -> None:
        self.peer, self.timeout = peer, timeout
        self._socket = connection

    def send_token(self, token: Token) -> None:
        self.send(_TOKEN.pack(*token))

    def expect_token(self, token: Token) -> None:
        """Wait for the token.

        Raises:
            LinkError: the peer ended, was silent for `timeout` seconds, or sent another token.
        """
        found = _TOKEN.unpack(self.receive(_TOKEN.size))
        if found != token:
            raise LinkError(
                f"{self.peer} is at {describe_token(found)} where {describe_token(token)} was due"
            )

    def send(self, data: bytes) -> None:
        with naming_peer(self.peer, self.timeout):
            self._socket.settimeout(self.timeout)
            self._socket.sendall(data)

    def receive(self, size: int) -> bytes:
        data = bytearray()
        deadline = time.monotonic() + self.timeout
        with naming_peer(self.peer, self.timeout):
            while len(data) < size:
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                part = self._socket.recv(size - len(data))
                if not part:
                    raise ConnectionResetError
                data += part
        return bytes(data)

    def send_files(self, descriptors: list[int]) -> None:
        """Pass open files to the peer, which gets descriptors of its own."""
        with naming_peer(self.peer, self.timeout):
            socket.send_fds(self._socket, [b"f"], descriptors)

    def receive_files(self, count: int) -> list[int]:
        with naming_peer(self.peer, self.timeout):
            self._socket.settimeout(self.timeout)
            data, files, _, _ = socket.recv_fds(self._socket, 1, count)
            if not data:
                raise ConnectionResetError
        assert len(files) == count, (files, count)
        return files

    def close(self) -> None:
        self._socket.close()


def describe_token(token: Token) -> str:
    return f"bucket {token[1]} of version {token[0]}"


@contextmanager
def naming_peer(peer: str, timeout: float) -> Iterator[None]:
    """Turn exceptions of a connection into a LinkError that names the peer."""
    try:
        yield
    except TimeoutError:
        raise LinkError(f"{peer} said nothing for {timeout:g} s") from None
    except OSError:
        raise LinkError(f"{peer} closed its connection: it has died or given up") from None
