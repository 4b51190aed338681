"""A sandbox of the program bwrap (bubblewrap): the namespaces of namespaces.py, also where the system lets only this program make them."""

from __future__ import annotations

import os

from megarl.gateway.sandboxes import first
from megarl.gateway.sandboxes.interface import AgentProcess, Program, SandboxSettings, variables_here
from megarl.gateway.sandboxes.local import PYTHON, readable_folders

_LIBRARIES = ("/usr", "/lib", "/lib64", "/lib32")


class Bubblewrap:
    """See above; `memory_mb` limits the data of each process."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings

    def start(self, agent: AgentProcess) -> Program:
        settings = self._settings
        # /tmp before the folders, some of which may lie in it; and outer folders before the folders within them.
        arguments = ["bwrap", "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
        arguments += ["--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev"]
        folders = [path for path in _LIBRARIES if os.path.isdir(path)]
        for path in [*folders, *sorted(readable_folders(settings), key=len)]:
            if os.path.islink(path):  # /lib -> usr/lib
                arguments += ["--symlink", os.readlink(path), path]
            else:
                arguments += ["--ro-bind", path, path]
        arguments += [
            "--bind",
            str(agent.folder),
            str(agent.folder),
            "--chdir",
            str(agent.work),
            "--",
            *PYTHON,
        ]
        arguments += [first.__file__, settings.socket, str(settings.port), str(settings.memory_mb or 0)]
        return Program((*arguments, *agent.command), variables_here(agent))

    def stop(self, agent: AgentProcess) -> None:
        return None  # a namespace ends with its first process, and that with its parent
