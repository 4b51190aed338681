"""Kills and stops random processes of a real training run at random moments, and says what was lost of it: nothing.

    python benchmarks/chaos.py [--kills 50] [--seed 0] [--json chaos.json] [--keep FOLDER]

A tiny model is trained by PPO: Megatron ranks of an actor and a critic under Ray, an SGLang engine, reward workers. First
once undisturbed, as the reference. Then the same is trained again and again, and meanwhile an actor's or critic's rank, the
engine's process, SGLang's scheduler, a reward worker, Ray's raylet or its GCS server, or the controller itself gets
SIGKILL, SIGSTOP or (the controller) SIGTERM: during a save, during a step, or while the run still recovers from the last
one. The run recovers by itself; where its command has ended (SIGKILL of the controller; exit code 75 after SIGTERM) the very same
command is started again, as a job's scheduler does.

Each run that comes to its end is compared with the reference bit for bit: metrics but for times and memory, all columns of the
trajectories, the exported weights. After each end of a controller nothing may be left of it: no process, nothing in /dev/shm, no
folder in /tmp. Exit code 1: a run did not recover, differs from the reference, or left something behind.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos_blows import KINDS, Attack, Blow, Deck
from chaos_run import AttackedRun
from chaos_task import Task, differences, fingerprint, make_task
from facts import environment
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PACKAGES = ("megatron-core", "sglang", "ray", "torch")


def train_undisturbed(task: Task, folder: Path) -> dict[str, Any]:
    """The reference; raises RuntimeError if it does not come to its end."""
    run = AttackedRun(task.command(folder), folder, is_restarted=False)
    try:
        run.begin()
        while not run.finished and run.failure is None:
            run.poll()
            time.sleep(0.1)
    finally:
        run.stop()
    if run.failure is not None:
        raise RuntimeError(f"the undisturbed run: {run.failure}")
    return fingerprint(folder)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    report: dict[str, Any] = {
        "environment": environment(PACKAGES),
        "steps": options.steps,
        "seed": options.seed,
    }
    with ExitStack() as stack:
        if options.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        else:
            folder = options.keep.absolute()
            shutil.rmtree(folder, ignore_errors=True)
        task = make_task(folder / "task", options.steps)
        console.print("an undisturbed run, as the reference ...", highlight=False)
        begun = time.monotonic()
        reference = train_undisturbed(task, folder / "reference")
        report["reference_seconds"] = time.monotonic() - begun
        blows, runs = attack_runs(options, task, folder, reference, console)
    report |= {"blows": [asdict(blow) for blow in blows], "runs": runs, "summary": summary(blows, runs)}
    show(report, blows, console)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(not is_unharmed(report["summary"]))


def attack_runs(
    options: argparse.Namespace, task: Task, folder: Path, reference: dict[str, Any], console: Console
) -> tuple[list[Blow], list[dict[str, Any]]]:
    """Hit one run after the other until there were `options.kills` blows; (these, what came of each run)."""
    begun = time.monotonic()
    deck, blows, runs = Deck(random.Random(options.seed)), [], []

    def wanted() -> bool:
        in_time = options.minutes is None or time.monotonic() - begun < 60 * options.minutes
        return in_time and len(blows) < options.kills

    with progress(console) as bar:
        line = bar.add_task("", total=options.kills)

        def struck(blow: Blow) -> None:
            blows.append(blow)
            what = f"run {blow.run}, {blow.phase} after step {blow.step}: {blow.signal} to {blow.kind}"
            bar.update(line, advance=1, description=what)
            bar.console.print(f"{len(blows):3d}  {what}", highlight=False, soft_wrap=True)

        while wanted():
            number = len(runs) + 1
            run = AttackedRun(task.command(folder / f"run-{number}"), folder / f"run-{number}")
            try:
                Attack(run, number, deck, wanted, struck).go()
            finally:
                run.stop()
            runs.append(outcome(run, reference))
            bar.console.print(f"     run {number}: {in_words(runs[-1])}", highlight=False, soft_wrap=True)
    return blows, runs


def outcome(run: AttackedRun, reference: dict[str, Any]) -> dict[str, Any]:
    """What came of a run: it finished or did not, where it differs from the reference, what it left behind."""
    return {
        "finished": run.finished,
        "errors": run.errors,
        "starts": len(run.starts),
        "differences": differences(reference, fingerprint(run.folder)) if run.finished else [],
        "orphans": [orphan for start in run.starts for orphan in start.orphans],
        "seconds_until_nothing_was_left": [start.gone for start in run.starts],
    }


def in_words(run: dict[str, Any]) -> str:
    end = "came to its end" if run["finished"] else "DID NOT COME TO ITS END"
    same = f"{len(run['differences'])} DIFFERENCES" if run["differences"] else "no difference"
    left = f"LEFT BEHIND: {run['orphans']}" if run["orphans"] else "nothing left behind"
    lines = [f"{end}, {run['starts']} starts of the command; {same}; {left}"]
    return "\n     ".join([*lines, *run["errors"], *run["differences"][:8]])


def summary(blows: list[Blow], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the whole; seconds are [median, most]."""
    return {
        "kills": len(blows),
        "recovered": sum(blow.recovered for blow in blows),
        "steps_lost_most": max((blow.lost for blow in blows), default=0),
        "runs": len(runs),
        "runs_compared": sum(run["finished"] for run in runs),
        "differences": sum(len(run["differences"]) for run in runs),
        "unexpected_ends": sum(len(run["errors"]) for run in runs),
        "orphans": sum(len(run["orphans"]) for run in runs),
        "seconds_to_notice": {
            name: median_and_most(
                [blow.seconds for blow in blows if blow.signal == name and blow.seconds is not None]
            )
            for name in ("SIGKILL", "SIGSTOP", "SIGTERM")
        },
        "seconds_to_go_on": median_and_most(
            [blow.recovery_seconds for blow in blows if blow.recovery_seconds is not None]
        ),
        "seconds_until_nothing_was_left": median_and_most(
            [seconds for run in runs for seconds in run["seconds_until_nothing_was_left"]]
        ),
    }


def is_unharmed(figures: dict[str, Any]) -> bool:
    """Whether every blow was recovered from, every run compared, and nothing differs or was left behind."""
    harm = ("differences", "unexpected_ends", "orphans")
    return (
        figures["recovered"] == figures["kills"]
        and figures["runs_compared"] == figures["runs"]
        and not any(figures[name] for name in harm)
    )


def median_and_most(seconds: list[float]) -> list[float] | None:
    return [round(statistics.median(seconds), 1), round(max(seconds), 1)] if seconds else None


def show(report: dict[str, Any], blows: list[Blow], console: Console) -> None:
    """A row for each kind and signal, and the figures of the whole."""
    facts, figures = report["environment"], report["summary"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    console.print(
        f"\n{facts['command']}\n{facts['cores']} cores of {facts['cpu']}, {facts['memory_gib']} GiB, load before "
        f"{facts['load_average_before']:.1f}; {versions}",
        highlight=False,
    )
    columns = ("hit", "signal", "times", "start/step/save", "recovered", "steps lost", "noticed in s", "most")
    table = Table(*columns, box=None)
    for kind in KINDS:
        for name in ("SIGKILL", "SIGSTOP", "SIGTERM"):
            rows = [blow for blow in blows if (blow.kind, blow.signal) == (kind, name)]
            if rows:
                table.add_row(kind, name, *cells(rows))
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name.replace('_', ' ')}: {figure_in_words(value)}", highlight=False)


def figure_in_words(value: Any) -> str:
    """A count, [median, most] of seconds, or such pairs by signal."""
    if isinstance(value, dict):
        return "; ".join(
            f"{name} {figure_in_words(pair)}" for name, pair in value.items() if pair is not None
        )
    return f"{value[0]} (median), {value[1]} (most)" if isinstance(value, list) else str(value)


def cells(rows: list[Blow]) -> list[str]:
    phases = [sum(blow.phase == phase for blow in rows) for phase in ("start", "step", "save")]
    times = median_and_most([blow.seconds for blow in rows if blow.seconds is not None])
    return [
        str(len(rows)),
        "/".join(map(str, phases)),
        str(sum(blow.recovered for blow in rows)),
        str(max(blow.lost for blow in rows)),
        *(["-", "-"] if times is None else map(str, times)),
    ]


def progress(console: Console) -> Progress:
    """Of blows; on a terminal only."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, disable=not console.is_terminal)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="signals that are sent, in all runs together")
    parser.add_argument("--seed", type=int, default=0, help="of what is hit, and when")
    parser.add_argument("--steps", type=int, default=10, help="of a run")
    parser.add_argument("--minutes", type=float, help="send no more signals after so long")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep all runs there; it is emptied first"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    options = parser.parse_args(arguments)
    if options.kills < 1 or options.steps < 2:
        parser.error("--kills must be at least 1, --steps at least 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
