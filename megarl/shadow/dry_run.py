"""`megarl plan memory --dry-run`: shadow ranks of a recipe compared with the plan of their memory.

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
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from megarl.config import TrainConfig, TuningConfig
from megarl.config.model_fit import check_models
from megarl.plan.commands import memory_limits
from megarl.plan.inputs import PlanInputs, model_use, read_planned, roles_of
from megarl.plan.memory import plan_of
from megarl.shadow import device, engine
from megarl.shadow.agreement import agreements, all_ranks, lines
from megarl.shadow.comparison import Comparison, compare
from megarl.shadow.page import fullest, page, size_text
from megarl.shadow.requests import Request
from megarl.util.files import write_text

CLASSES = "classes"
MODULE = "megarl.shadow.process"
NUM_LINES = 5
# Of a shadow's process. In time glibc would keep freed blocks of up to 32 MiB in its heap (mallopt(3), M_MMAP_THRESHOLD); above a fixed
# threshold they go back to the system.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MALLOC_MMAP_THRESHOLD_": "262144"}


def run(options: argparse.Namespace) -> int:
    """Run the ranks, print the table; exit code 1 where the plan is too small by more than the tolerance, or collectives do not fit.

    Raises:
        ValueError: names the option or key, or the package that this machine lacks.
    """
    limit, reserve = memory_limits(options, options.gpu_memory)
    problem = device.missing()
    if problem is not None:
        raise ValueError(f"--dry-run: {problem}")
    if options.fit:
        raise ValueError(
            "--dry-run runs the recipe's own layout; --fit looks for another: use them one after the other"
        )
    config, inputs = read_planned(options.recipe, options.overrides, options.command)
    check_models(config, inputs.model, inputs.critic, inputs.reward, inputs.teachers)
    ranks = chosen_ranks(config, inputs, options.ranks)
    roles = list(dict.fromkeys(role for role, _ in ranks))
    together = all_ranks(config, inputs, roles) if options.agree else []
    card = {"memory": limit}
    plan = plan_of(config, inputs, limit, reserve)
    engines = isinstance(config, TrainConfig) and not options.without_engines
    reports = run_ranks(
        options.recipe,
        options.overrides,
        [*ranks, engine.FIRST] if engines else ranks,
        card=card,
        command=options.command,
        engine_environment=engine.environment(config) if engines else None,
    )
    found = [row for report in reports for row in compare(plan, report)]
    wrong = [row for row in found if row.difference < -options.tolerance / 100]
    # Ranks that run separately prove nothing: each takes its peers to have its own data, and a stage without experts has other calls.
    fit = agreements(
        run_ranks(
            options.recipe, options.overrides, together, card=card, command=options.command, together=True
        )
        if together
        else []
    )
    if options.html is not None:
        write_text(options.html, page(options.recipe, found, reports, options.tolerance))
    if options.json:
        agreed = {role: asdict(agreement) for role, agreement in fit.items()}
        told = {"comparisons": [asdict(row) for row in found], "agreement": agreed, "ranks": reports}
        print(json.dumps(told, indent=2))
    else:
        print_comparison(Console(), found, reports, options.tolerance)
        for line in lines(fit):
            print(line)
    agree = not any(agreement.problems for agreement in fit.values())
    return 1 if wrong or not agree or any(report.get("problems") for report in reports) else 0


def chosen_ranks(config: TrainConfig | TuningConfig, inputs: PlanInputs, ranks: str) -> list[tuple[str, int]]:
    """(role, rank) of "classes" or of numbers such as "0,8", which are of every role.

    Raises:
        ValueError: --ranks is neither, or a role has no such rank.
    """
    chosen = []
    for role in roles_of(config):
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
    command: str | None = None,
    num_processes: int | None = None,
    together: bool = False,
    engine_environment: Mapping[str, str] | None = None,
) -> list[dict]:
    """The reports (`rank.RankReport` or `sglang.EngineReport` as JSON) of shadow ranks, in their order.

    As many processes as the machine has cores run the ranks of models; each rank of an engine has one of its own.

    Args:
        engine_environment: of the process of an engine's rank.
        together: the ranks of a role run at the same time, as `together.run` says, one role after the other.

    Raises:
        RuntimeError: a rank failed; with the end of its process's output.
    """
    # Ranks of models share processes; an engine's rank has one of its own, whose environment is another.
    models = [rank for rank in ranks if rank[0] != engine.ROLE]
    count = 1 if together else min(len(models), num_processes or os.cpu_count() or 1)
    shares = [list(models[number::count]) for number in range(count)]
    shares += [[rank] for rank in ranks if rank[0] == engine.ROLE]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        progress.add_task(f"running {len(ranks)} shadow ranks in {len(shares)} processes", total=None)
        started = []
        for number, share in enumerate(shares):
            out = Path(folder, f"{number}.jsonl")
            request = Request(
                recipe,
                list(overrides),
                share,
                str(out),
                micro_batches,
                transformer_engine,
                together,
                dict(card or {}),
                command,
            )
            of_engine = share[0][0] == engine.ROLE
            module, more = (engine.MODULE, engine_environment) if of_engine else (MODULE, {})
            started.append((out, start([request], Path(folder, f"{number}.log"), module, more or {})))
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


def start(
    requests: Sequence[Request], log: Path, module: str = MODULE, more: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """A process that runs the ranks of all requests, one after the other; `more`: further variables of its environment."""
    environment = {**os.environ, **ENVIRONMENT, **(more or {})}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps([asdict(request) for request in requests]))
    process.stdin.close()
    return process


def _failure(share: Sequence[tuple[str, int]], out: Path, log: Path) -> str:
    done = len(out.read_text(encoding="utf-8").splitlines()) if out.exists() else 0
    role, rank = share[min(done, len(share) - 1)]
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    # After the error itself torch names all kernels of an operation that has none for a device.
    tail = "\n  ".join([line for line in lines if "registered at /" not in line][-30:])
    return f"the shadow of {role} rank {rank} failed:\n  {tail}"


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
            table.add_row(f"  {row.owner}", row.phase, size_text(row.planned), size_text(row.found), text)
        table.add_section()
    wide = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, wide)  # names are never cut
    console.print(table)
    for report in reports:
        lines = engine.details(report) if report["role"] == engine.ROLE else _details(report)
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _details(report: Mapping) -> Iterator[str]:
    layers = "Transformer Engine's" if report["transformer_engine"] else "megarl's own in torch"
    last = fullest(report)
    yield (
        f"{report['role']} rank {report['rank']} of {report['world_size']}: layers {layers}; {report['num_operations']:,} operations, "
        f"{report['flops'][last] / 1e12:,.2f} TFLOP and {len(report['log']):,} collectives; {report['seconds']:.0f} s of a processor"
    )
    yield f"  largest at the peak of the {last}:"
    for (phase, _, line), size in report["phases"][last]["largest"][:NUM_LINES]:
        yield f"    {size_text(size)}  {line} ({phase})"
    for phase in (phase for phase in ("save", "load") if phase in report["phases"]):
        yield f"  takes to {phase} a checkpoint: {size_text(report['phases'][phase]['peak'])}"
    yield f"  stays when everything is released: {size_text(report['released'])}"
    for (_, _, line), size in report["kept_by"][:NUM_LINES]:
        if size >= report["released"] / 100:
            yield f"    {size_text(size)}  {line}"
    for what, times in sorted(report["assumed"].items(), key=lambda item: -item[1]):
        yield f"  assumed {times} times: {what}"
