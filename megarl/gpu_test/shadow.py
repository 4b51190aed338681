"""Step `shadow`: a shadow run's account of a rank's memory, compared with the same rank on a real GPU.

The shadow needs torch's CPU build, which is not where a GPU is: its numbers come with megarl (shadow_ranks.json). `python -m
megarl.gpu_test.shadow` makes them anew on a machine without a GPU.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.gpu_test.runner import Check
from megarl.util.files import write_text

FILE = Path(__file__).with_name("shadow_ranks.json")
MIB, GIB = 1 << 20, 1 << 30
TOLERANCE = 0.05
# Memory that a shadow does not have: workspaces that cuBLAS and cuDNN take from torch's allocator.
WORKSPACES = 256 * MIB
KEPT = ("role", "rank", "parts", "released", "transformer_engine")


@dataclass(frozen=True)
class Case:
    """A rank of a recipe."""

    recipe: str
    role: str
    rank: int
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.recipe}, {self.role} {self.rank}"


CASES = (
    Case("qwen2.5_0.5b_ppo_single_gpu", "actor", 0),
    Case("qwen2.5_0.5b_ppo_single_gpu", "critic", 0),
    Case("qwen2.5_7b_dapo", "actor", 0),
)


@dataclass(frozen=True)
class Row:
    """Bytes of a part or phase, in the shadow and on the GPU."""

    name: str
    shadow: int
    found: int

    @property
    def ok(self) -> bool:
        """Parts are the same tensors; a phase may take workspaces that the shadow does not know."""
        if self.name.startswith("part "):
            return abs(self.found - self.shadow) <= TOLERANCE * self.shadow
        return -TOLERANCE * self.shadow <= self.found - self.shadow <= TOLERANCE * self.shadow + WORKSPACES

    def text(self) -> str:
        difference = f"{(self.found - self.shadow) / self.shadow:+.1%}" if self.shadow else "no ratio"
        return f"{_size(self.found)} on the GPU, {_size(self.shadow)} in the shadow: {difference}"


def run(folder: Path) -> Iterator[Check]:
    from megarl.gpu_test.alone import LoneRunner, cuda_meter

    runner, known = LoneRunner(cuda_meter(), "cuda"), read_known()
    for case in CASES:
        yield from compare_case(case, known.get(case.name), run_case(case, runner))


def read_known() -> dict[str, dict[str, Any]]:
    """The shadow's reports by case, as they came with megarl."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def run_case(case: Case, runner: Any) -> dict[str, Any]:
    from megarl.plan.inputs import read_inputs

    config, inputs = read_inputs(f"recipe:{case.recipe}", list(case.overrides), check=False)
    report = asdict(runner.run(config, inputs, case.role, case.rank))
    gc.collect()
    return report


def compare_case(case: Case, shadow: Mapping[str, Any] | None, found: Mapping[str, Any]) -> Iterator[Check]:
    """Compare a rank's measured bytes with its shadow's. `shadow` None: there is none; the bytes are recorded nonetheless."""
    if shadow is None:
        yield Check(f"{case.name}: no shadow of it came with megarl", None, "", kept(found))
        return
    versions = ", ".join(f"{name} {version}" for name, version in shadow["versions"].items())
    yield Check(f"{case.name}: the shadow's versions", None, versions)
    for row in rows(shadow, found):
        yield Check(
            f"{case.name}: {row.name}", row.ok, row.text(), {"shadow": row.shadow, "found": row.found}
        )
    if shadow["transformer_engine"] != found["transformer_engine"]:
        yield Check(f"{case.name}: layers", False, "Transformer Engine's are in one of the two only")


def rows(shadow: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of two reports of a rank, which are JSON."""
    for part in sorted({*shadow["parts"], *found["parts"]}):
        yield Row(f"part {part}", shadow["parts"].get(part, 0), found["parts"].get(part, 0))
    for phase in sorted({*shadow["phases"], *found["phases"]}):
        one, other = shadow["phases"].get(phase), found["phases"].get(phase)
        yield Row(f"peak of {phase}", one["peak"] if one else 0, other["peak"] if other else 0)
    yield Row("after release", shadow["released"], found["released"])


def kept(report: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a rank's report that come with megarl."""
    phases = {name: {"peak": phase["peak"]} for name, phase in report["phases"].items()}
    return {**{name: report[name] for name in KEPT}, "phases": phases}


def shadow_case(case: Case) -> dict[str, Any]:
    """Run a case as a shadow."""
    from megarl.shadow.dry_run import run_ranks

    (report,) = run_ranks(f"recipe:{case.recipe}", list(case.overrides), [(case.role, case.rank)])
    return report


def main() -> None:
    """Run all cases, or the ones whose numbers in `CASES` are given."""
    from megarl.util.packages import installed

    known = read_known()
    versions = {name: installed(name) for name in ("torch", "megatron-core")}
    for number in map(int, sys.argv[1:]) if sys.argv[1:] else range(len(CASES)):
        case = CASES[number]
        known[case.name] = {**kept(shadow_case(case)), "versions": versions}
        write_text(FILE, json.dumps(known, indent=1) + "\n")


def _size(size: int) -> str:
    return f"{size / GIB:.3f} GiB" if abs(size) >= GIB // 10 else f"{size / MIB:.2f} MiB"


if __name__ == "__main__":
    main()
