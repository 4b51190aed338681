"""Runs steps, each in a process group of its own with a time limit, and records them: one JSON file and one Markdown page.

The checks that a step reported before it ended are kept: its process, `python -m megarl.gpu_test.runner MODULE:FUNCTION FOLDER FILE`,
writes each to a line of the file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.gpu_test.steps import Machine, Step
from megarl.rollout.sglang.before_import import sglang_environment
from megarl.util.files import write_text

PASSED, FAILED, IMPOSSIBLE = "passed", "failed", "impossible"
LAST_LINES = 30
LOG = "log.txt"  # of a step, in its folder


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
    """The result of a step.

    Attributes:
        outcome: PASSED, FAILED or IMPOSSIBLE.
        reason: of a failure, or why it could not run.
        log: the end of a failed step's output.
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
    out, log = folder / "checks.jsonl", folder / LOG
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "megarl.gpu_test.runner", step.function, str(folder), str(out)]
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
        "" if reason is None else tail(log),
    )


def main() -> None:
    """The process of a step."""
    function, folder, out = sys.argv[1:]
    module, _, name = function.partition(":")
    with Path(out).open("w", encoding="utf-8") as file:
        for check in getattr(import_module(module), name)(Path(folder)):
            file.write(json.dumps(asdict(check)) + "\n")
            file.flush()


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
    """The checks that were written completely."""
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


def tail(log: Path) -> str:
    """The last lines of a step's output so far."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])


GIB = 1 << 30
MARKS = {PASSED: "passed", FAILED: "**failed**", IMPOSSIBLE: "could not run"}


@dataclass(frozen=True)
class Record:
    """The results of steps on a machine.

    Attributes:
        facts: of the machine and of megarl, as JSON; records of equal facts are merged.
        results: by step.
    """

    date: str
    facts: dict[str, Any]
    results: tuple[Result, ...]


def facts_of(machine: Machine) -> dict[str, Any]:
    return {
        "megarl": {"version": __version__, **_commit(machine.checkout)},
        "gpus": [{"name": gpu.name, "driver": gpu.driver, "gib": gpu.memory / GIB} for gpu in machine.gpus],
        "cuda": machine.cuda,
        "python": machine.python,
        "cores": machine.cores,
        "host_gib": round(machine.host_memory / GIB, 1),
        "versions": dict(sorted(machine.versions.items())),
    }


def _commit(checkout: Path | None) -> dict[str, Any]:
    """The commit that runs, and whether files differ from it; nothing where there is no repository, or git cannot tell."""
    if checkout is None or not (checkout / ".git").exists():
        return {}
    told = []
    for command in (
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--", "megarl", "recipes", "benchmarks/*.py"],
    ):
        try:
            done = subprocess.run(
                ["git", *command], cwd=checkout, capture_output=True, text=True, check=False
            )
        except OSError:  # it is not installed
            return {}
        if done.returncode:
            return {}
        told.append(done.stdout)
    # Each line of the status begins with two letters, which may be spaces.
    return {"commit": told[0].strip(), "changed_files": [line[3:] for line in told[1].splitlines()]}


def file_of(folder: Path, date: str, facts: dict[str, Any]) -> Path:
    """The file of a record, such as "2026-11-25_1x_NVIDIA_H100_80GB_HBM3.json"."""
    names = [gpu["name"] for gpu in facts["gpus"]]
    card = f"{len(names)}x_{names[0]}" if names else "no_gpu"
    return folder / (re.sub(r"[^\w.-]+", "_", f"{date}_{card}") + ".json")


def merged(file: Path, record: Record) -> Record:
    """The record with the results of other steps in `file`, if that file is of the same machine and versions."""
    if not file.exists():
        return record
    earlier = json.loads(file.read_text(encoding="utf-8"))
    if earlier["facts"] != record.facts:
        return record
    names = {result.name for result in record.results}
    kept = [_result(told) for told in earlier["results"] if told["name"] not in names]
    return Record(record.date, record.facts, (*kept, *record.results))


def _result(told: dict[str, Any]) -> Result:
    return Result(**{**told, "checks": [Check(**check) for check in told["checks"]]})


def write(file: Path, record: Record, order: Sequence[str]) -> tuple[Path, Path]:
    """Write JSON and page, results in the `order` of their names; returns both files."""
    place = {name: number for number, name in enumerate(order)}
    results = tuple(sorted(record.results, key=lambda result: place.get(result.name, len(place))))
    record = Record(record.date, record.facts, results)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = file.with_suffix(".md")
    write_text(file, json.dumps(asdict(record), indent=1) + "\n")
    write_text(text, page(record))
    return file, text


def page(record: Record) -> str:
    facts = record.facts
    cards = ", ".join(
        f"{gpu['name']} ({gpu['gib']:.0f} GiB, driver {gpu['driver']})" for gpu in facts["gpus"]
    )
    lines = [
        f"# GPU test of {record.date}",
        "",
        f"- GPUs: {cards or 'none'}; torch is built for CUDA {facts['cuda'] or '(none)'}",
        f"- host: {facts['cores']} cores, {facts['host_gib']} GiB; Python {facts['python']}",
        f"- megarl {facts['megarl']['version']} {facts['megarl'].get('commit', '(commit not known)')}"
        + (f", changed: {', '.join(changed)}" if (changed := facts["megarl"].get("changed_files")) else ""),
        f"- {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}",
        "",
        "| step | result | seconds | what |",
        "|---|---|---|---|",
    ]
    for result in record.results:
        seconds = f"{result.seconds:.0f}" if result.outcome != IMPOSSIBLE else ""
        lines.append(f"| {result.name} | {MARKS[result.outcome]} | {seconds} | {_cell(result.what)} |")
    for result in record.results:
        lines += ["", f"## {result.name}: {MARKS[result.outcome]}", ""]
        if result.reason:
            lines += [result.reason, ""]
        if result.checks:
            lines += ["| check | | found |", "|---|---|---|"]
            lines += [
                f"| {_cell(check.name)} | {_mark(check)} | {_cell(check.found)} |" for check in result.checks
            ]
        if result.log:
            lines += ["", "```", result.log.replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def _mark(check: Check) -> str:
    return {True: "ok", False: "**wrong**", None: ""}[check.ok]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


if __name__ == "__main__":
    main()
