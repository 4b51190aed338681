"""The record of a test: one JSON file, and one Markdown page of it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.gpu_test.machine import Machine
from megarl.gpu_test.runner import FAILED, IMPOSSIBLE, PASSED, Check, Result
from megarl.util.files import whole_file

GIB = 1 << 30
MARKS = {PASSED: "passed", FAILED: "**failed**", IMPOSSIBLE: "could not run"}


@dataclass(frozen=True)
class Record:
    """Attributes:
    facts: of the machine and of megarl, as JSON; records of equal facts are one.
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
    """The commit that runs, and whether files differ from it; nothing where there is no repository."""
    if checkout is None or not (checkout / ".git").exists():
        return {}
    told = []
    for command in (
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--", "megarl", "recipes", "benchmarks/*.py"],
    ):
        done = subprocess.run(["git", *command], cwd=checkout, capture_output=True, text=True, check=False)
        if done.returncode:
            return {}
        told.append(done.stdout.strip())
    return {"commit": told[0], "changed_files": [line[3:] for line in told[1].splitlines()]}


def file_of(folder: Path, date: str, facts: dict[str, Any]) -> Path:
    """Such as "2026-11-25_1x_NVIDIA_H100_80GB_HBM3.json"."""
    names = [gpu["name"] for gpu in facts["gpus"]]
    card = f"{len(names)}x_{names[0]}" if names else "no_gpu"
    return folder / (re.sub(r"[^\w.-]+", "_", f"{date}_{card}") + ".json")


def merged(file: Path, record: Record) -> Record:
    """The record with the results that `file` has of other steps, where that is of the same machine and versions."""
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
    with whole_file(file) as out:
        out.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    with whole_file(text) as out:
        out.write_text(page(record), encoding="utf-8")
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
        f"- megarl {facts['megarl']['version']} {facts['megarl'].get('commit', '')}"
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
