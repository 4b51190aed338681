"""Runs programs against tests in a jail (`megarl.rewards.sandbox.jail`), which is a process of its own."""

import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from megarl.rewards.sandbox.jail import main; main(int(sys.argv[2]))"
_ROOT = str(Path(__file__).resolve().parents[3])
# Beyond the tests' own time: starting Python on a busy machine.
_START_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """`seconds`: processor time of a test, in whole seconds (rounded up); by the clock it may take twice `seconds`.
    `total_seconds`: by the clock, for all tests.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    total_seconds: float = 100.0


@dataclass(frozen=True)
class TestResult:
    """The outcome of one test.

    `outcome`: "ok" (it ended by itself without an error), "error", "timeout", "killed" (by a signal).
    `output`: printed text; `value`: a function's return value as JSON; `stderr`: its end.
    """

    outcome: str
    output: str
    stderr: str
    value: str | None = None


def run_tests(
    program: str,
    tests: Sequence[dict[str, Any]],
    limits: Limits,
    isolation: str = "auto",
    stop_at_failure: bool = False,
) -> list[TestResult]:
    """Run a Python program against tests (their forms: `megarl.rewards.sandbox.jail`).

    Args:
        stop_at_failure: run no test after one that did not end well.

    Returns:
        The results of the tests that there was time for, from the first on.

    Raises:
        RuntimeError: the jail cannot be set up on this machine.
    """
    if isolation == "auto":
        isolation = best_isolation()
    paths = list(dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib")))
    request = {
        "isolation": isolation,
        # Python imports by the name that it was started with, which may lead through a link, as uv's and home directories do.
        "folders": [*dict.fromkeys((sys.base_prefix, os.path.realpath(sys.base_prefix))), *paths],
        "paths": paths,
        "program": program,
        "seconds": limits.seconds,
        "total_seconds": limits.total_seconds,
        "memory_mb": limits.memory_mb,
        "tests": list(tests),
        "stop_at_failure": stop_at_failure,
    }
    answer = _ask(request, limits.total_seconds + _START_SECONDS)
    if "error" in answer:
        raise RuntimeError(f"the code sandbox cannot be set up (isolation {isolation!r}): {answer['error']}")
    return [TestResult(**result) for result in answer["results"]]


@functools.cache
def best_isolation() -> str:
    """ "namespaces" where this system lets an ordinary process have them, else "seccomp", with one message about it.

    RuntimeError: in namespaces a program that does nothing does not end well.
    """
    try:
        (probe,) = run_tests("", [{"kind": "stdin"}], Limits(), "namespaces")
    except RuntimeError as error:
        print(
            f"megarl: {error}. Programs of the model run without namespaces: they can write nothing and reach no "
            "network, but read what this user may read (reward.code.isolation)",
            file=sys.stderr,
        )
        return "seccomp"
    if probe.outcome != "ok":  # a busy machine's timeout, too, is no reason for the weaker isolation
        raise RuntimeError(
            f"the code sandbox does not work (isolation 'namespaces'): an empty program ended with {probe.outcome!r}: {probe.stderr}"
        )
    return "namespaces"


def _ask(request: dict[str, Any], seconds: float) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", _BOOT, _ROOT, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},  # above all none of this process's secrets
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(json.dumps(request), timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RuntimeError(f"the code sandbox did not end within {seconds:g} s") from None
    try:
        return json.loads(output)
    except ValueError:
        return {"error": f"exit code {process.returncode}, {(errors or output)[-500:]!r}"}
