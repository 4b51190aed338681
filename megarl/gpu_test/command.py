"""`megarl doctor --gpu`, which `make gpu-test` runs: the steps that can run here, one after the other, and the record of them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from megarl.gpu_test.runner import (
    FAILED,
    IMPOSSIBLE,
    Record,
    Result,
    facts_of,
    file_of,
    merged,
    run_step,
    write,
)
from megarl.gpu_test.steps import SECONDS, STEPS, Machine, Step, chosen, machine_here, obstacle
from megarl.util.files import naming


def run(options: argparse.Namespace) -> int:
    """Run the steps, print and write their checks; returns the exit code.

    Raises:
        ValueError: names the option that is wrong.
        OSError: no record can be written.
    """
    if options.recipe is not None or options.overrides:
        raise ValueError(
            "--gpu tests this machine with models of its own; it takes no recipe and no key=value"
        )
    steps, machine = chosen(options.steps), machine_here()
    reasons = {step.name: obstacle(step, machine) for step in steps}
    _announce(steps, machine, reasons)
    if all(reason is not None for reason in reasons.values()):
        return 1
    folder = Path(options.out) if options.out is not None else _usual_folder(machine)
    with naming(folder):  # known before the first step, not after it
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    results = []
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-test-") as name:
        for step in steps:
            reason = reasons[step.name]
            if reason is not None:
                results.append(Result(step.name, step.what, IMPOSSIBLE, reason, 0.0))
            else:
                print(f"{step.name}: {step.what} ...", flush=True)
                results.append(run_step(step, Path(name, step.name), min(options.limit, SECONDS)))
            print(result_text(results[-1]), flush=True)
            # After each step: no check is lost with the machine.
            facts, today = facts_of(machine), date.today().isoformat()
            file = file_of(folder, today, facts)
            files = write(
                file, merged(file, Record(today, facts, tuple(results))), [one.name for one in STEPS]
            )
    print(f"written: {files[0]} and {files[1]}")
    return exit_code(results, by_name=options.steps is not None)


def exit_code(results: Sequence[Result], by_name: bool) -> int:
    """1 where a step failed, or one that was asked for by its name could not run."""
    bad = (FAILED, IMPOSSIBLE) if by_name else (FAILED,)
    return 1 if any(result.outcome in bad for result in results) else 0


def _announce(steps: Sequence[Step], machine: Machine, reasons: dict[str, str | None]) -> None:
    cards = ", ".join(gpu.name for gpu in machine.gpus) or "no GPU"
    torch = machine.versions.get("torch", "not installed")
    print(f"{cards}; torch {torch}, built for CUDA {machine.cuda or '(none)'}")
    if machine.cuda is not None and machine.trains_only:
        print("training only: there is no SGLang for this torch that megarl knows, so nothing generates here")
    common = set(reasons.values())
    if len(common) == 1 and None not in common:
        print(
            f"nothing can run here: {common.pop()}. Steps that would run, {SECONDS / 60:.0f} minutes at most each:"
        )
        for step in steps:
            print(f"  {step.name:10} {step.what}{_needs(step)}")
        return
    for step in steps:
        reason = reasons[step.name]
        does = "runs" if reason is None else f"cannot run: {reason}"
        print(f"  {step.name:10} {step.what}\n  {'':10} {does}")


def _needs(step: Step) -> str:
    parts = [
        *([f"{step.gpus} GPUs"] if step.gpus > 1 else []),
        *(["the repository"] if step.checkout else []),
        *step.packages,
    ]
    return f" (needs {', '.join(parts)})" if parts else ""


def result_text(result: Result) -> str:
    """A step's result as lines of text."""
    lines = [f"{result.name}: {result.outcome}, {result.seconds:.0f} s"]
    if result.outcome == IMPOSSIBLE:
        return f"{result.name}: cannot run: {result.reason}"
    for check in result.checks:
        mark = {True: "ok   ", False: "WRONG", None: "     "}[check.ok]
        lines.append(f"  {mark} {check.name}{': ' + check.found if check.found else ''}")
    if result.reason:
        lines.append(f"  {result.reason}")
    if result.log:
        lines += [f"  | {line}" for line in result.log.splitlines()]
    return "\n".join(lines)


def _usual_folder(machine: Machine) -> Path:
    if machine.checkout is not None:
        return machine.checkout / "benchmarks" / "results" / "gpu"
    return Path("gpu-test")
