"""A sandbox of Linux namespaces, made without another program: agents see the folders that they need, and reach no network but the gateway.

As a script, which the agent runner starts in place of the agent's command:

    python -I -S -B -c BOOT <folder of megarl> <settings as JSON> <command...>
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys

from megarl.gateway.sandboxes import first
from megarl.gateway.sandboxes.interface import AgentProcess, Program, SandboxSettings, variables_here
from megarl.gateway.sandboxes.local import PYTHON, ROOT, readable_folders
from megarl.rewards.sandbox import namespaces

_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from megarl.gateway.sandboxes.namespaces import main; main()"
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 38, 9
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


class Namespaces:
    """See above; `memory_mb` limits the data of each process."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings

    def start(self, agent: AgentProcess) -> Program:
        told = {
            "folders": [*readable_folders(self._settings), str(agent.folder)],
            "writable": str(agent.folder),
            "work": str(agent.work),
            "socket": self._settings.socket,
            "port": self._settings.port,
            "memory_mb": self._settings.memory_mb or 0,
            "parent": os.getpid(),
        }
        return Program((*PYTHON, "-c", _BOOT, ROOT, json.dumps(told), *agent.command), variables_here(agent))

    def stop(self, agent: AgentProcess) -> None:
        return None  # a namespace ends with its first process, and that with its parent


def main() -> None:
    """Become the sandbox, and exit as the command does; exit code 125: there is none here."""
    told, command = json.loads(sys.argv[1]), sys.argv[2:]
    try:
        namespaces.enter()
    except OSError as error:
        first.fail(f"Linux namespaces: {error}")
    # Set after the change of credentials, which would unset it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != told["parent"]:
        first.fail("the runner has ended")
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    try:
        namespaces.make_root(told["folders"], [told["writable"]])
        _start_loopback()
        namespaces.drop_capabilities()
        os.chdir(told["work"])
    except OSError as error:
        first.fail(str(error))
    # Without it a process of the user root gets the capabilities of its namespaces again when it runs a program.
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    first.run(told["socket"], told["port"], told["memory_mb"], command)


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16xH14x", fcntl.ioctl(asked, _SIOCGIFFLAGS, request))[0]
        fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
