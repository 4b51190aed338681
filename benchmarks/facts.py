"""The facts of a machine that a reader needs to understand its numbers; the head and the report of a benchmark."""

import json
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
_SOURCES = ("megarl", "benchmarks", "recipes")  # the files that a run depends on
_BUSY = 0.5  # load average above which figures are not for publication


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


def announce(packages: tuple[str, ...]) -> dict[str, Any]:
    """`environment`, printed as the head of a benchmark's output."""
    facts = environment(packages)
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    print(
        f"$ {facts['command']}\n{facts['cores']} cores of {facts['cpu']}, {facts['memory_gib']} GiB; {versions}"
    )
    if facts["load_average_before"] > _BUSY:
        print(
            f"WARNING   the machine was busy before (load {facts['load_average_before']:.1f}): not for publication"
        )
    return facts


def write_report(out: str | Path | None, **report: Any) -> None:
    """Write facts and figures as JSON; nowhere if `out` is None."""
    if out is not None:
        Path(out).write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {out}")


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
