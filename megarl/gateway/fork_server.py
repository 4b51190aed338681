"""The fork server of agents that are Python functions: it makes the imports that they share once, and each agent is a copy (fork) of it.

    python -c BOOT <folder of megarl> <file number of a Unix listener> <folder of the agents' file> MODULE...

A request is a connection with a line of JSON (`Request`). Its answer is the exit code, once the copy and its process group have ended; a
client that closes its end for writing has the copy killed. The server ends with its standard input, and its copies with it.

This file needs the standard library only: the Python that runs it may be another one than the run's.

Guarantees, each asserted by a test:

- a copy has the environment, folder and log of its own task, random numbers of its own, and imports the agent's file itself;
- modules that start threads are refused: a copy would not have them.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megarl.gateway.call import call


@dataclass(frozen=True)
class Request:
    """An agent's process.

    Attributes:
        environment: all of its variables.
        folder: its working directory.
        log: file that gets its output.
    """

    file: str
    function: str
    environment: dict[str, str]
    folder: str
    log: str


@dataclass(frozen=True)
class _Copy:
    pid: int
    end: int  # a file descriptor that can be read when it has ended
    connection: socket.socket


def main() -> None:
    """As a script. Exit code 1, with the reason on stderr: a module that is missing, fails, or starts threads."""
    number, beside, *modules = sys.argv[1:]
    sys.path.insert(0, beside)
    for module in modules:
        import_module(module)
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        sys.exit(
            f"importing {', '.join(modules)} starts {threads} threads, which copies would not have; "
            "NumPy starts none with gateway.environment={OPENBLAS_NUM_THREADS: 1}"
        )
    gc.collect()
    gc.freeze()  # or the first collection of each copy would write to all pages
    sys.stdout.flush()
    request = serve(socket.socket(fileno=int(number)))
    _become(request)
    call(request.file, request.function)


def serve(listener: socket.socket) -> Request:
    """Fork a copy of this process for each request, until standard input ends; returns only in a copy, with its request."""
    waited, copies = select.poll(), dict[int, _Copy]()  # by both of their files
    for ready in (sys.stdin.fileno(), listener.fileno()):
        waited.register(ready, select.POLLIN)
    while True:
        for ready, _ in waited.poll():
            if ready == sys.stdin.fileno():
                for copy in copies.values():
                    _kill(copy)
                sys.exit()
            if ready == listener.fileno():
                connection, _ = listener.accept()
                request = _read(connection)
                if request is None:
                    connection.close()
                    continue
                pid = os.fork()
                if not pid:
                    for copy in copies.values():
                        copy.connection.close()
                        with suppress(OSError):  # each copy comes twice
                            os.close(copy.end)
                    connection.close()
                    listener.close()
                    return request
                with suppress(OSError):  # the copy has done so itself
                    os.setpgid(pid, pid)
                copy = _Copy(pid, os.pidfd_open(pid), connection)
                for file in (copy.end, connection.fileno()):
                    copies[file] = copy
                    waited.register(file, select.POLLIN)
                continue
            if ready not in copies:  # both of its files were ready
                continue
            copy = copies[ready]
            if ready == copy.end:
                _end(copy, waited, copies)
            else:
                _kill(copy)
                waited.unregister(ready)  # its end is waited for
                del copies[ready]


def _end(copy: _Copy, waited: select.poll, copies: dict[int, _Copy]) -> None:
    _kill(copy)  # the processes left in its group, whose number stays taken until the copy is waited for
    code = os.waitstatus_to_exitcode(os.waitpid(copy.pid, 0)[1])
    for file in (copy.end, copy.connection.fileno()):
        if copies.pop(file, None) is not None:
            waited.unregister(file)
    os.close(copy.end)
    with suppress(OSError):  # the client has gone
        copy.connection.sendall(f"{code}\n".encode())
    copy.connection.close()


def _kill(copy: _Copy) -> None:
    with suppress(ProcessLookupError):
        os.killpg(copy.pid, signal.SIGKILL)


def _read(connection: socket.socket) -> Request | None:
    """The request on a connection; None: the client left before it had sent all of it."""
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            return None
        data += more
    return Request(**json.loads(data))


def _become(request: Request) -> None:
    """Turn this process into the one that the request describes."""
    os.setpgid(0, 0)
    for number, path, how in (
        (0, os.devnull, os.O_RDONLY),
        (1, request.log, os.O_WRONLY | os.O_APPEND),
        (2, request.log, os.O_WRONLY | os.O_APPEND),
    ):
        file = os.open(path, how)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = [request.file]
    # Python's own numbers begin anew in a copy; those of NumPy's functions without a generator do not.
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    main()
