"""Runs steps, each in a process group of its own with a limit of time; what a step found until it ended is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.gpu_test.steps import Step
from megarl.rollout.sglang.before_import import sglang_environment

PASSED, FAILED, IMPOSSIBLE = "passed", "failed", "impossible"
LAST_LINES = 30


@dataclass(frozen=True)
class Check:
    """One thing that a step looked at.

    Attributes:
        ok: None: it is a figure, or a note, and cannot be wrong.
        figures: numbers by name, for the record.
    """

    name: str
    ok: bool | None
    found: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What became of a step.

    Attributes:
        outcome: PASSED, FAILED or IMPOSSIBLE.
        reason: of a failure, or why it could not run.
        log: the end of what a step that failed printed.
    """

    name: str
    what: str
    outcome: str
    reason: str
    seconds: float
    checks: list[Check] = field(default_factory=list)
    log: str = ""


def run_step(step: Step, folder: Path, limit: float) -> Result:
    """Run a step in `folder`, which is its own; ends all its processes after `limit` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    out, log = folder / "checks.jsonl", folder / "log.txt"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "megarl.gpu_test.process", step.function, str(folder), str(out)]
    begun = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(sglang_environment("cuda", 1) if step.engine else {})},
        )
        with _ended_with_its_group(process):
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
    checks = list(read_checks(out))
    reason = failure(code, checks, limit)
    return Result(
        step.name,
        step.what,
        PASSED if reason is None else FAILED,
        reason or "",
        time.monotonic() - begun,
        checks,
        "" if reason is None else _tail(log),
    )


def failure(code: int | None, checks: list[Check], limit: float) -> str | None:
    """Why a step that ended with exit code `code` failed; None: it did not.

    `code` None: it was still running after `limit` seconds.
    """
    if code is None:
        last = f"; the last that it did was: {checks[-1].name}" if checks else ""
        return f"it was still running after {limit:.0f} s and was killed{last}"
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    if code:
        return f"its process ended with exit code {code}"
    wrong = [check.name for check in checks if check.ok is False]
    if wrong:
        return f"wrong: {', '.join(wrong)}"
    return None if checks else "it checked nothing"


def read_checks(file: Path) -> Iterator[Check]:
    """Those that were written whole."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield Check(**json.loads(line))


@contextmanager
def _ended_with_its_group(process: subprocess.Popen) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # all of them may have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
