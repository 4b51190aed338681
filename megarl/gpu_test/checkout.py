"""Steps that run programs of the repository: its tests that are marked gpu (`tests`, `plan`), a check each, and benchmarks/gpu_single.py
(`single`, `trainer`), its figures compared with published ones."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.gpu_test.runner import LOG, Check, tail
from megarl.gpu_test.steps import CHECKOUT, machine_here

MARK = "mark.gpu"
PLAN = "tests/plan/test_plan_gpu.py"  # trains for minutes
ENGINE = "tests/rollout/sglang/test_gpu.py"  # starts SGLang
TEST_SECONDS = 420  # of one test: the first imports and compilations are part of it
MESSAGE = 400  # characters of a failure
NUM_STEPS = 3


def run_tests(folder: Path) -> Iterator[Check]:
    left_out = (PLAN, ENGINE) if machine_here().trains_only else (PLAN,)
    yield from _pytest(folder, [name for name in marked(CHECKOUT) if name not in left_out])


def run_plan(folder: Path) -> Iterator[Check]:
    yield from _pytest(folder, [PLAN])


def marked(checkout: Path) -> list[str]:
    """The files with tests that are marked gpu: importing the others would take longer, and packages that only they need."""
    files = sorted((checkout / "tests").rglob("test_*.py"))
    return [str(file.relative_to(checkout)) for file in files if MARK in file.read_text(encoding="utf-8")]


def _pytest(folder: Path, what: list[str]) -> Iterator[Check]:
    report = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--timeout={TEST_SECONDS}",
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
            yield Check(name, False, (wrong.get("message") or "")[:MESSAGE], {"seconds": seconds})
        else:
            yield Check(name, True, f"{seconds:.1f} s", {"seconds": seconds})


# Published figures of single GPUs. None was measured with megarl, and none was repeated: each is another program's, on a card of its own.


@dataclass(frozen=True)
class Published:
    """A figure that others published.

    Attributes:
        name: in a few words.
        source: where it stands.
        caveat: why the two are not the same thing.
    """

    name: str
    source: str
    tokens_per_s: float
    seconds: float | None = None
    mfu: float | None = None
    caveat: str = ""


ARTICLE = Published(
    "PPO of Qwen2.5-0.5B, H800",
    "an article on verl, step 42",
    1702.0,
    13.3,
    caveat="1,702 tokens/s for 13.3 s are 22,637 tokens a step, 354 a trajectory; here each trajectory has all 1,024",
)
PRIME_RL = "prime-rl, benchmarks/baselines: the trainer alone"
RL_16K = Published("RL of Qwen3-0.6B, 16,384 tokens, H100", PRIME_RL, 11_900.0, mfu=0.111)
RL_64K = Published("RL of Qwen3-0.6B, 65,536 tokens, H100", PRIME_RL, 10_100.0, mfu=0.268)


def comparison_text(published: Published, tokens_per_s: float, seconds: float, mfu: float | None) -> str:
    """The figures of this run, compared with the published ones, as text."""
    parts = [
        f"{tokens_per_s:,.0f} tokens/s, {_ratio(tokens_per_s, published.tokens_per_s)} of {published.tokens_per_s:,.0f}"
    ]
    parts.append(
        f"{seconds:.2f} s a step"
        + (f", {_ratio(seconds, published.seconds)} of {published.seconds}" if published.seconds else "")
    )
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}" + (f" (published: {published.mfu:.1%})" if published.mfu else ""))
    text = "; ".join(parts) + f" ({published.source})"
    return f"{text}; {published.caveat}" if published.caveat else text


def _ratio(found: float, other: float) -> str:
    return f"{found / other:.2f}x"


CASES = {"rl-16k": RL_16K, "rl-64k": RL_64K}


def run_single(folder: Path) -> Iterator[Check]:
    train_only = ["--train-only"] if machine_here().trains_only else []
    yield from measure(folder / "single.json", [f"--steps={NUM_STEPS}", *train_only], ARTICLE, "step")


def run_trainer(folder: Path) -> Iterator[Check]:
    for case, published in CASES.items():
        yield from measure(
            folder / f"{case}.json", [f"--steps={NUM_STEPS}", f"--case={case}"], published, "update"
        )


def measure(out: Path, options: Sequence[str], published: Published, phase: str) -> Iterator[Check]:
    """Run the benchmark; `phase`: the one whose figures were published."""
    script = CHECKOUT / "benchmarks" / "gpu_single.py"
    command = [sys.executable, str(script), "--verbose", "--out", str(out), *options]
    code = subprocess.run(command, cwd=CHECKOUT, check=False).returncode
    name = " ".join(["gpu_single.py", *options])
    if code or not out.exists():
        yield Check(name, False, f"exit code {code}\n{tail(out.parent / LOG)}")
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
    text = comparison_text(published, compared["tokens_per_s"], compared["seconds"], compared["mfu"])
    if phase == "step" and "generate" not in report["phases"]:
        text += "; nothing was generated here: this is no step of the published run"
    yield Check(f"compared with {published.name}", None, text)
