"""Steps `single` and `trainer`: benchmarks/gpu_single.py, its figures beside published ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.gpu_test.machine import CHECKOUT, machine_here
from megarl.gpu_test.published import ARTICLE, RL_16K, RL_64K, Published, beside
from megarl.gpu_test.runner import Check

NUM_STEPS = 3
CASES = {"rl-16k": RL_16K, "rl-64k": RL_64K}


def run(folder: Path) -> Iterator[Check]:
    train_only = ["--train-only"] if machine_here().trains_only else []
    yield from measure(folder / "single.json", [f"--steps={NUM_STEPS}", *train_only], ARTICLE, "step")


def run_trainer(folder: Path) -> Iterator[Check]:
    for case, published in CASES.items():
        yield from measure(
            folder / f"{case}.json", [f"--steps={NUM_STEPS}", f"--case={case}"], published, "update"
        )


def measure(out: Path, options: Sequence[str], published: Published, phase: str) -> Iterator[Check]:
    """Run the benchmark; `phase`: the one whose figures are those that were published."""
    script = CHECKOUT / "benchmarks" / "gpu_single.py"
    command = [sys.executable, str(script), "--verbose", "--out", str(out), *options]
    code = subprocess.run(command, cwd=CHECKOUT, check=False).returncode
    name = " ".join(["gpu_single.py", *options])
    if code or not out.exists():
        yield Check(name, False, f"exit code {code}")
        return
    yield from figures(name, json.loads(out.read_text(encoding="utf-8")), published, phase)


def figures(name: str, report: Mapping[str, Any], published: Published, phase: str) -> Iterator[Check]:
    """A benchmark's report as checks."""
    yield Check(name, True, f"{report['what']}; {report['device']}")
    for kind, found in report["phases"].items():
        rate = f", {found['tokens_per_s']:,.0f} tokens/s" if found["tokens_per_s"] else ""
        used = f", MFU {found['mfu']:.1%}" if found["mfu"] else ""
        yield Check(kind, None, f"{found['seconds']:.3f} s{rate}{used}", dict(found))
    yield Check(
        "peak memory", None, f"{report['peak_mib']:,.0f} MiB {report['peak_of']}", {"mib": report["peak_mib"]}
    )
    compared = report["phases"][phase]
    text = beside(published, compared["tokens_per_s"], compared["seconds"], compared["mfu"])
    if phase == "step" and "generate" not in report["phases"]:
        text += "; nothing was generated here: this is no step of the published run"
    yield Check(f"beside {published.name}", None, text)
