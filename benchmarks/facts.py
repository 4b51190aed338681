"""What a reader must know of a machine to read its numbers."""

import os
import platform
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def environment(packages: tuple[str, ...]) -> dict[str, Any]:
    """The command, the machine, how busy it was, and the versions of `packages`."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "command": shlex.join(["python", *sys.argv]),
        "cpu": cpu[1] if cpu else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "load_average_before": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }
