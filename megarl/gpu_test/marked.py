"""Steps `tests` and `plan`: the tests that are marked gpu, a check each."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from megarl.gpu_test.runner import Check
from megarl.gpu_test.steps import CHECKOUT

TIMEOUT = 420  # seconds of a test: the first imports and compilations are part of it
LAST = 400  # characters of a failure
PLAN = "tests/plan/test_plan_gpu.py"  # trains for minutes


MARK = "mark.gpu"


def run(folder: Path) -> Iterator[Check]:
    yield from _pytest(folder, [name for name in marked(CHECKOUT) if name != PLAN])


def run_plan(folder: Path) -> Iterator[Check]:
    yield from _pytest(folder, [PLAN])


def marked(checkout: Path) -> list[str]:
    """The files that have such tests: to import all others would take longer, and packages that only they need."""
    files = sorted((checkout / "tests").rglob("test_*.py"))
    return [str(file.relative_to(checkout)) for file in files if MARK in file.read_text(encoding="utf-8")]


def _pytest(folder: Path, what: list[str]) -> Iterator[Check]:
    report = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--timeout={TIMEOUT}",
               "-p", "no:cacheprovider", f"--junitxml={report}", *what]  # fmt: skip
    code = subprocess.run(command, cwd=CHECKOUT, check=False).returncode
    yield Check("pytest", code == 0, f"exit code {code}")
    if report.exists():
        yield from results(report.read_text(encoding="utf-8"))


def results(report: str) -> Iterator[Check]:
    """The tests of a JUnit file."""
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        seconds = float(case.get("time", 0))
        skipped, failed = case.find("skipped"), case.find("failure")
        wrong = failed if failed is not None else case.find("error")
        if skipped is not None:
            yield Check(name, None, f"skipped: {skipped.get('message')}")
        elif wrong is not None:
            yield Check(name, False, (wrong.get("message") or "")[:LAST], {"seconds": seconds})
        else:
            yield Check(name, True, f"{seconds:.1f} s", {"seconds": seconds})
