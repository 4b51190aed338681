"""What a reader must know of a machine to read its numbers."""

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
_SOURCES = ("megarl", "benchmarks", "recipes")  # what decides over how a run goes


def environment(packages: tuple[str, ...]) -> dict[str, Any]:
    """The command (see `without_paths`), the day, the machine, how busy it was, and the versions of `packages`."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "command": without_paths(shlex.join(["python", *sys.argv])),
        "date": date.today().isoformat(),
        "cpu": cpu[1] if cpu else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "load_average_before": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def without_paths(command: str) -> str:
    """Without the file that it writes and the folder that it works in: another reader's are others."""
    return re.sub(r" --(out|json|root)[ =]\S+", "", command)


def commit() -> dict[str, Any]:
    """The commit that runs here, and which files differ from it."""
    head = _git("rev-parse", "HEAD").strip()
    changed = [line[3:] for line in _git("status", "--porcelain", "--", *_SOURCES).splitlines()]
    return {"commit": head, "changed_files": changed}


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout
