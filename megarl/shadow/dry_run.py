"""`megarl plan memory --dry-run`: shadow ranks of a recipe beside the plan of their memory.

A rank of each class is run: of each role the first, the middle and the last pipeline stage, or the ranks that are asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from megarl.config import TrainConfig
from megarl.config.model_fit import check_models
from megarl.shadow import device
from megarl.shadow.process import Request
from megarl.trainer.memory_command import read_inputs
from megarl.trainer.memory_plan import GIB, MemoryPlan, PlanInputs, model_use, plan_memory

CLASSES = "classes"
NUM_LINES = 5
MIB = 1 << 20


@dataclass(frozen=True)
class Comparison:
    """Bytes of one owner on a rank: as planned, and as the rank had them.

    Attributes:
        phase: "always", or the phase whose peak it is.
    """

    rank: str
    owner: str
    phase: str
    planned: int
    found: int

    @property
    def difference(self) -> float:
        """Of the plan, relative to what was found; negative where the plan is too small."""
        return (self.planned - self.found) / self.found if self.found else float(self.planned > 0)


def run(options: argparse.Namespace) -> int:
    """Run the ranks, print the table; exit code 1 where the plan is too small by more than the tolerance.

    Raises:
        ValueError: names the option or key, or what this machine lacks for it.
    """
    problem = device.missing()
    if problem is not None:
        raise ValueError(f"--dry-run: {problem}")
    if options.fit:
        raise ValueError(
            "--dry-run runs the recipe's own layout; --fit looks for another: use them one after the other"
        )
    config, inputs = read_inputs(options.recipe, options.overrides)
    check_models(config, inputs.model, inputs.critic, inputs.reward)
    ranks = chosen_ranks(config, inputs, options.ranks)
    card = {"memory": round(options.gpu_memory * GIB)}
    plan = plan_memory(config, inputs, round(options.gpu_memory * GIB))
    reports = run_ranks(options.recipe, options.overrides, ranks, card=card)
    found = [row for report in reports for row in compare(plan, report)]
    wrong = [row for row in found if row.difference < -options.tolerance / 100]
    if options.json:
        print(json.dumps({"comparisons": [asdict(row) for row in found], "ranks": reports}, indent=2))
    else:
        print_comparison(Console(), found, reports, options.tolerance)
    return 1 if wrong else 0


def chosen_ranks(config: TrainConfig, inputs: PlanInputs, ranks: str) -> list[tuple[str, int]]:
    """(role, rank) of "classes" or of numbers such as "0,8", which are of every role.

    Raises:
        ValueError: --ranks is neither, or a role has no such rank.
    """
    roles = [
        "actor",
        *(["critic"] if config.critic is not None and not config.critic.model.share_base else []),
    ]
    chosen = []
    for role in roles:
        layout = model_use(config, inputs, role).layout
        if ranks == CLASSES:
            stages = sorted({0, layout.pp // 2, layout.pp - 1})
            numbers = [stage * (layout.world // layout.pp) for stage in stages]
        else:
            try:
                numbers = [int(number) for number in ranks.split(",")]
            except ValueError:
                raise ValueError(f"--ranks {ranks}: give {CLASSES} or numbers such as 0,8") from None
            over = [number for number in numbers if not 0 <= number < layout.world]
            if over:
                raise ValueError(
                    f"--ranks {ranks}: the {role} has ranks 0 to {layout.world - 1}, not {over[0]}"
                )
        chosen += [(role, number) for number in numbers]
    return chosen


def run_ranks(
    recipe: str,
    overrides: Sequence[str],
    ranks: Sequence[tuple[str, int]],
    *,
    micro_batches: int | None = None,
    transformer_engine: bool = True,
    card: Mapping[str, object] | None = None,
    num_processes: int | None = None,
) -> list[dict]:
    """The reports (`rank.RankReport` as JSON) of shadow ranks, in their order; as many processes as the machine has cores.

    Raises:
        RuntimeError: a rank failed; with the end of what its process printed.
    """
    count = min(len(ranks), num_processes or os.cpu_count() or 1)
    shares = [list(ranks[number::count]) for number in range(count)]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        progress.add_task(f"running {len(ranks)} shadow ranks in {count} processes", total=None)
        started = []
        for number, share in enumerate(shares):
            out = Path(folder, f"{number}.jsonl")
            request = Request(
                recipe, list(overrides), share, str(out), micro_batches, transformer_engine, dict(card or {})
            )
            started.append((out, _start(request, Path(folder, f"{number}.log"))))
        try:
            for number, (_, process) in enumerate(started):
                if process.wait():
                    raise RuntimeError(
                        _failure(shares[number], started[number][0], Path(folder, f"{number}.log"))
                    )
        finally:
            for _, process in started:
                process.kill()
                process.wait()
        reports = [
            json.loads(line) for out, _ in started for line in out.read_text(encoding="utf-8").splitlines()
        ]
    order = {(role, rank): number for number, (role, rank) in enumerate(ranks)}
    return sorted(reports, key=lambda report: order[report["role"], report["rank"]])


def _start(request: Request, log: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.shadow.process"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(request)))
    process.stdin.close()
    return process


def _failure(share: Sequence[tuple[str, int]], out: Path, log: Path) -> str:
    done = len(out.read_text(encoding="utf-8").splitlines()) if out.exists() else 0
    role, rank = share[min(done, len(share) - 1)]
    tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
    return f"the shadow of {role} rank {rank} failed:\n  {tail}"


def compare(plan: MemoryPlan, report: Mapping) -> Iterator[Comparison]:
    """What a rank held and took, beside the plan of its stage."""
    role, stage, parts, phases = report["role"], report["stage"], report["parts"], report["phases"]
    name = f"{role} {report['rank']} (stage {stage})"
    planned = {
        owner.name: owner.stages[stage] for owner in plan.owners if owner.name.startswith((role, "ref_"))
    }
    for part in ("weights", "adapters", "gradients", "optimizer"):
        if f"{role}_{part}" in planned:
            yield Comparison(name, f"{role}_{part}", "always", planned[f"{role}_{part}"], parts.get(part, 0))
    if "reference" in parts:
        yield Comparison(name, "ref_weights", "always", planned["ref_weights"], parts["reference"])
    # What stays of the first pass are workspaces that libraries keep: they are a line of their own.
    evaluating = phases["evaluate"]["peak"] - phases["evaluate"]["left"]
    yield Comparison(name, f"{role}_evaluating", "evaluate", planned[f"{role}_evaluating"], evaluating)
    update = planned[f"{role}_activations"] + planned[f"{role}_working"]
    yield Comparison(name, f"{role}_activations + working", "update", update, phases["update"]["peak"])


def print_comparison(
    console: Console, found: Sequence[Comparison], reports: Sequence[Mapping], tolerance: float
) -> None:
    table = Table("", "phase", "plan", "dry run", "difference", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for rank in dict.fromkeys(row.rank for row in found):
        table.add_row(rank, style="bold")
        for row in (row for row in found if row.rank == rank):
            text = f"{row.difference:+.1%}"
            text = f"{text}, too small" if row.difference < -tolerance / 100 else text
            table.add_row(f"  {row.owner}", row.phase, _size(row.planned), _size(row.found), text)
        table.add_section()
    wide = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, wide)  # names are never cut
    console.print(table)
    for report in reports:
        console.print("\n".join(_details(report)), highlight=False, markup=False, soft_wrap=True)


def _details(report: Mapping) -> Iterator[str]:
    layers = "Transformer Engine's" if report["transformer_engine"] else "megarl's own in torch"
    yield (
        f"{report['role']} rank {report['rank']} of {report['world_size']}: layers {layers}; {report['num_operations']:,} operations, "
        f"{report['flops']['update'] / 1e12:,.2f} TFLOP and {len(report['log']):,} collectives; {report['seconds']:.0f} s of a processor"
    )
    yield "  largest at the peak of the update:"
    for (phase, _, line), size in report["phases"]["update"]["largest"][:NUM_LINES]:
        yield f"    {_size(size)}  {line} ({phase})"
    yield f"  stays when everything is released: {_size(report['released'])}"
    for (_, _, line), size in report["kept_by"][:NUM_LINES]:
        if size >= report["released"] / 100:
            yield f"    {_size(size)}  {line}"
    for what, times in sorted(report["assumed"].items(), key=lambda item: -item[1]):
        yield f"  assumed {times} times: {what}"


def _size(size: int) -> str:
    return f"{size / GIB:.3f} GiB" if size >= GIB // 10 else f"{size / MIB:.2f} MiB"
