"""A sandbox for an agent: Linux namespaces in which it sees the folders that it needs, and reaches no network but the gateway.

As a script, which the agent runner starts in place of the agent's command:

    python -I -S -B -c BOOT <folder of megarl> <settings as JSON> <command...>

The gateway listens on a Unix socket, too. Inside, the first process of the sandbox listens at the gateway's own address and forwards to that
socket, so that agents find the gateway where they would find it outside. Its end is the end of all that the agent has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.rewards.sandbox import namespaces

_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from megarl.gateway.sandbox import main; main()"
_ROOT = str(Path(__file__).resolve().parents[2])
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 38, 9
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_CHUNK = 1 << 16
_FAILED = 125  # exit code where there is no sandbox, as of `docker run`


@dataclass(frozen=True)
class Sandbox:
    """What an agent sees.

    Attributes:
        socket: the gateway's Unix socket.
        port: at which the gateway listens on the loopback interface.
        folders: that it may read, besides those of the system and of Python.
        memory_mb: MiB of data that each of its processes may have; None: any.
    """

    socket: str
    port: int
    folders: tuple[str, ...] = ()
    memory_mb: int | None = None

    def command(self, command: Sequence[str], writable: Path) -> list[str]:
        """What is run in place of an agent's command.

        Args:
            writable: folder that the agent may write into, besides its own /tmp.
        """
        python = [
            os.path.realpath(sys.base_prefix),
            sys.prefix,
            *sysconfig.get_paths().values(),
            f"{_ROOT}/megarl",
        ]
        folders = [*dict.fromkeys([*python, *self.folders])]
        settings = asdict(self) | {"folders": [path for path in folders if os.path.isdir(path)]}
        told = json.dumps(settings | {"writable": str(writable), "parent": os.getpid()})
        return [sys.executable, "-I", "-S", "-B", "-c", _BOOT, _ROOT, told, *command]


def main() -> None:
    """Become the sandbox, and exit as the command does; exit code 125: there is none here."""
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    place = os.getcwd()
    try:
        namespaces.enter()
    except OSError as error:
        _fail(f"Linux namespaces: {error}")
    # After a change of credentials, which unsets it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != settings["parent"]:
        os._exit(_FAILED)
    if first := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) % 256)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    try:
        writable = settings["writable"]
        namespaces.make_root(
            [*settings["folders"], os.path.dirname(settings["socket"]), writable], [writable]
        )
        _start_loopback()
        listener = socket.create_server(("127.0.0.1", settings["port"]))
        namespaces.drop_capabilities()
    except OSError as error:
        _fail(f"the sandbox: {error}")
    # Without it a process of the user root gets the capabilities of its namespaces again when it runs a program.
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if settings["memory_mb"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory_mb"] << 20,) * 2)
    agent = os.fork()
    if not agent:
        _become(command, place)
    threading.Thread(target=_forward, args=(listener, settings["socket"]), daemon=True).start()
    while True:  # the first process of a pid namespace also has its orphans
        ended, status = os.wait()
        if ended == agent:
            os._exit(os.waitstatus_to_exitcode(status) % 256)


def _become(command: Sequence[str], place: str) -> None:
    try:
        os.chdir(place)
        os.execvp(command[0], [*command])
    except OSError as error:
        _fail(f"{command[0]}: {error.strerror}")


def _fail(why: str) -> None:
    os.write(2, f"no sandbox: {why}\n".encode())
    os._exit(_FAILED)


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16xH14x", fcntl.ioctl(asked, _SIOCGIFFLAGS, request))[0]
        fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


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
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)
