"""The first process of a sandbox without a network: listens at the gateway's address and forwards to its Unix socket, runs the agent, and exits as
it does. As a script, by a Python of the sandbox's (3.8 or newer) and its standard library alone:

    python3 -I -S -B first.py SOCKET PORT MEMORY_MB COMMAND...

Its end is the end of all that is in the sandbox. So it also ends when the gateway does: it keeps a connection, which the system closes
then. (uvicorn 0.54.0 limits the time of a connection from its first answer on, and there is none.)
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

_CHUNK = 1 << 16
FAILED = 125  # exit code where there is no sandbox, as of `docker run`


def run(path: str, port: int, memory_mb: int, command: Sequence[str]) -> NoReturn:
    """Forward until the command ends. `memory_mb`: MiB of data of each of its processes; 0: any."""
    gateway = socket.socket(socket.AF_UNIX)
    try:
        gateway.connect(path)
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        fail(f"the gateway: {error}")
    agent = os.fork()
    if not agent:
        if memory_mb:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20,) * 2)
        try:
            os.execvp(command[0], [*command])
        except OSError as error:
            fail(f"{command[0]}: {error.strerror}")
    # A first process has no default action for SIGTERM, and the stop of a container would wait long before it kills this one.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(FAILED))
    threading.Thread(target=_end_with, args=(gateway,), daemon=True).start()
    threading.Thread(target=_forward, args=(listener, path), daemon=True).start()
    while True:  # the first process of a pid namespace also has its orphans
        ended, status = os.wait()
        if ended == agent:
            os._exit(-os.WTERMSIG(status) % 256 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def fail(why: str) -> NoReturn:
    os.write(2, f"no sandbox: {why}\n".encode())
    os._exit(FAILED)


def _end_with(gateway: socket.socket) -> None:
    with contextlib.suppress(OSError):
        gateway.recv(1)
    fail("the gateway has ended")


def _forward(listener: socket.socket, path: str) -> None:
    while True:
        client, _ = listener.accept()
        gateway = socket.socket(socket.AF_UNIX)
        try:
            gateway.connect(path)
        except OSError:  # the gateway has ended, and so will this
            client.close()
            continue
        for source, sink in ((client, gateway), (gateway, client)):
            threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):  # one of the two has left
        while True:
            data = source.recv(_CHUNK)
            if not data:
                break
            sink.sendall(data)
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
