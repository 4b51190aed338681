"""Kills and stops random processes of a real training run at random moments, and says how much of it was lost: nothing.

    python benchmarks/chaos.py [--kills 50] [--seed 0] [--json chaos.json] [--keep FOLDER]

A tiny model is trained by PPO: Megatron ranks of an actor and a critic under Ray, an SGLang engine, reward workers. First
once undisturbed, as the reference. Then the same is trained again and again, while an actor's or critic's rank, the
engine's process, SGLang's scheduler, a reward worker, Ray's raylet or its GCS server, or the controller itself gets
SIGKILL, SIGSTOP or (the controller) SIGTERM: during a save, during a step, or while the run still recovers from the last
one. The run recovers by itself; where its command has ended (SIGKILL of the controller; exit code 75 after SIGTERM) the very same
command is started again, as a job's scheduler does.

--json FILE that is there already is gone on with, by further kills at other random moments: `--kills` of them. It has the commit, dates
and machine of each of its parts. A part has a reference of its own, with which its runs are compared.

Each run that comes to its end is compared with the reference bit for bit: metrics but for times and memory, all columns of the
trajectories, the exported weights. After each end of a controller nothing may be left of it: no process, nothing in /dev/shm, no
folder in /tmp. Exit code 1: a run did not recover, differs from the reference, or left something behind, or its command ended
in a way that nobody has asked for. Expected are its ends after SIGKILL, after SIGTERM, and the exit code 75 of a controller that was
stuck in a call of Ray, whose server was killed or stopped.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from chaos_blows import KINDS, Attack, Blow, Deck
from chaos_record import Record, is_unharmed, median_and_most, open_record
from chaos_run import REPOSITORY, AttackedRun
from chaos_task import Task, differences, fingerprint, make_task
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def train_undisturbed(task: Task, folder: Path, sources: Path) -> dict[str, Any]:
    """The reference; raises RuntimeError if it does not come to its end."""
    run = AttackedRun(task.command(folder), folder, sources, is_restarted=False)
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run that is attacked is ended, too
    try:
        record = open_record(options.json, options.seed, options.steps)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if record.parts:
        console.print(
            f"going on with {options.json}: {len(record.blows)} kills in {len(record.parts)} parts so far",
            highlight=False,
        )
    record.begin()
    with ExitStack() as stack:
        if options.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        else:
            folder = options.keep.absolute()
            shutil.rmtree(folder, ignore_errors=True)
        sources = copy_sources(folder / "sources")
        task = make_task(folder / "task", options.steps)
        console.print("an undisturbed run, as the reference ...", highlight=False)
        begun = time.monotonic()
        reference = train_undisturbed(task, folder / "reference", sources)
        record.parts[-1]["reference_seconds"] = round(time.monotonic() - begun, 1)
        attack_runs(options, task, folder, reference, record, console)
    report = record.report()
    show(report, record.blows, console)
    return int(not is_unharmed(report["summary"]))


def copy_sources(folder: Path) -> Path:
    """The sources that run: a copy, so that all of a part's runs have the same, although somebody works on them."""
    for name in ("megarl", "recipes"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def attack_runs(
    options: argparse.Namespace,
    task: Task,
    folder: Path,
    reference: dict[str, Any],
    record: Record,
    console: Console,
) -> None:
    """Hit one run after the other until there were `options.kills` blows more."""
    begun = time.monotonic()
    deck, blows = Deck(random.Random(record.stream), list(record.cards)), []

    def wanted() -> bool:
        in_time = options.minutes is None or time.monotonic() - begun < 60 * options.minutes
        return in_time and len(blows) < options.kills

    with progress(console) as bar:
        line = bar.add_task("", total=options.kills)

        def struck(blow: Blow) -> None:
            blows.append(blow)
            of_run = [one for one in blows if one.run == blow.run]
            record.struck(len(of_run))
            what = f"run {blow.run}, {blow.phase} after step {blow.step}: {blow.signal} to {blow.kind}"
            bar.update(line, advance=1, description=what)
            number = len(record.blows) + len(of_run)
            bar.console.print(f"{number:3d}  {what}", highlight=False, soft_wrap=True)

        while wanted():
            number, of_run = len(record.runs) + 1, time.monotonic()
            run_folder = folder / f"run-{number}"
            run = AttackedRun(task.command(run_folder), run_folder, folder / "sources")
            try:
                Attack(run, number, deck, wanted, struck).go()
            finally:
                run.stop()
            found = {**outcome(run, reference), "seconds": round(time.monotonic() - of_run, 1)}
            record.add([blow for blow in blows if blow.run == number], found, list(deck.cards))
            bar.console.print(f"     run {number}: {in_words(found)}", highlight=False, soft_wrap=True)


def outcome(run: AttackedRun, reference: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a run: whether it finished, where it differs from the reference, the processes it left behind."""
    return {
        "finished": run.finished,
        "ends": dict(Counter(run.ends)),
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


def show(report: dict[str, Any], blows: list[Blow], console: Console) -> None:
    """A row for each kind and signal, and the figures of the whole."""
    console.print()
    for number, part in enumerate(report["parts"], 1):
        console.print(f"part {number}: {part_in_words(part)}", highlight=False)
    figures = report["summary"]
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


def part_in_words(part: dict[str, Any]) -> str:
    facts, changed = part["environment"], len(part["changed_files"])
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return (
        f"{part['kills']} kills, {part['begun']} to {part['written']}, commit {part['commit'][:12]}"
        f"{f' with {changed} changed files' if changed else ''}\n  {facts['command']}\n  {facts['cores']} cores of "
        f"{facts['cpu']}, {facts['memory_gib']} GiB, load before {facts['load_average_before']:.1f}; {versions}"
    )


def figure_in_words(value: Any) -> str:
    """A count, [median, most] of seconds, or such by name."""
    if isinstance(value, dict):
        return "; ".join(f"{name} {figure_in_words(one)}" for name, one in value.items() if one is not None)
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
    parser.add_argument("--kills", type=int, default=50, help="signals that are sent by this call")
    parser.add_argument("--seed", type=int, default=0, help="of the victims and the moments")
    parser.add_argument("--steps", type=int, default=30, help="of a run")
    parser.add_argument("--minutes", type=float, help="send no more signals after so long")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep all runs there; it is emptied first"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, or add to them")
    options = parser.parse_args(arguments)
    if options.kills < 1 or options.steps < 2:
        parser.error("--kills must be at least 1, --steps at least 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
