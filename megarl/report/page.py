"""`megarl report`: one run, or several on the same charts, as one HTML page."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megarl.report.curves import (
    AHEAD,
    LEARNING,
    PHASE_THROUGHPUT,
    POINTS,
    SYNC,
    THROUGHPUT,
    UNITS,
    charts_of,
    not_finite,
    series_of,
    unit_of,
)
from megarl.report.data import RunRecord, read_runs
from megarl.report.html import MIB, figure, render
from megarl.report.phases import (
    COLOURS,
    PHASES,
    Floors,
    busy_ranks,
    last_step,
    memory_by_phase,
    phases_of_steps,
    shares_of_phases,
)
from megarl.report.summary import Tile, differences, set_keys, status_of, tiles_of
from megarl.trainer.run.timeline import CONTROLLER
from megarl.util.files import write_text

_LAST_STEPS = 20  # of tables that have a row for each step
_LINKS = ("local", "intra_node", "inter_node", "total", "max_per_rank")
_BINS = 30  # of a histogram, at most
_SHOWN_STEPS = 20  # of a list of steps


@dataclass
class Charts:
    """The charts of a page, by the number that their places in the template have."""

    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *charts: dict[str, Any] | None) -> list[int]:
        """The numbers of the charts; None is no chart."""
        there = [chart for chart in charts if chart is not None]
        self.found += there
        return list(range(len(self.found) - len(there), len(self.found)))


@dataclass(frozen=True)
class SideBySide:
    """The final numbers of several runs: `rows`, a tile for each run; `same`, facts that hold for all; `last`, for each curve
    its title and its last value in each run."""

    rows: list[list[Tile]]
    same: list[Tile]
    last: list[list[str]]


@dataclass(frozen=True)
class Failures:
    """Failures of a run: `failures`, a row of each with `keys`; `repeated`, steps made again after a failure."""

    keys: ClassVar = ("time", "step", "phase", "role", "rank", "error", "file")
    failures: list[list[str]]
    restarts: list[str]
    repeated: str
    reward_errors: int
    findings: list[dict[str, Any]]
    not_finite: list[tuple[str, str]]

    @property
    def serious(self) -> bool:
        """Whether there is more than findings of the health monitor."""
        return any((self.failures, self.restarts, self.repeated, self.reward_errors, self.not_finite))

    @property
    def any(self) -> bool:
        return self.serious or bool(self.findings)


def page(runs: Sequence[RunRecord], floors: Sequence[Floors] = ()) -> str:
    """The page's HTML. `floors`: of each run; empty: of none."""
    charts = Charts()
    trained = [run for run in runs if not run.is_evaluation]  # an evaluation has its tiles, and no curves
    learning, constants = charts_of(LEARNING, runs) if trained else ([], [])
    throughput, steady = charts_of((THROUGHPUT, PHASE_THROUGHPUT, AHEAD), runs)
    for chart in throughput:
        for entry in chart["series"]:
            if entry["label"] in PHASES:  # in the colour that the phase has everywhere
                entry |= {"colour": COLOURS[entry["label"]], "label": PHASES[entry["label"]]}
    sync, same_sync = charts_of(SYNC, runs)
    several = len(runs) > 1
    context = {
        "title": " and ".join(run.name for run in runs),
        "runs": runs,
        "several": several,
        "statuses": [status_of(run) for run in runs],
        "tiles": [] if several else tiles_of(runs[0]),
        "side_by_side": _side_by_side(runs) if several else None,
        "differences": differences(runs) if several else [],
        "troubles": [_troubles(run) for run in runs],
        "learning": charts.add(*learning),
        "constants": constants,
        "stacks": charts.add(*(_named(phases_of_steps(run), run, several) for run in runs)),
        "shares": [shares_of_phases(run, least) for run, least in zip_longest(runs, (each.seconds for each in floors), fillvalue={})],
        "floors": list(dict.fromkeys(each.words for each in floors)),
        "throughput": charts.add(*throughput),
        "steady": steady,
        "busy": charts.add(*(_named(busy_ranks(run.timeline), run, several) for run in runs if run.timeline is not None)),
        "step_ranks": charts.add(*(_named(last_step(run.timeline), run, several) for run in runs if run.timeline is not None)),
        "memory": charts.add(*(_named(memory_by_phase(run), run, several) for run in runs)),
        "sync": charts.add(*sync),
        "same_sync": same_sync,
        "sync_tables": [_sync_table(run) for run in runs],
        "lengths": charts.add(*(_named(chart, run, several) for run in runs for chart in _lengths(run))),
        "set_keys": [set_keys(run) for run in runs],
        "metrics": [_metrics(run) for run in runs],
        "long_runs": any(len(run.steps) > POINTS for run in runs),
        "most_points": POINTS,
    }  # fmt: skip
    data = {
        "runs": [run.name for run in runs],
        "charts": charts.found,
        "series": series_of(runs, charts.found),
    }
    return render("report.html", context | {"charts": charts.found}, data)


def _named(chart: dict[str, Any] | None, run: RunRecord, several: bool) -> dict[str, Any] | None:
    """The chart of one run, with the run's name in the title where the page has several runs."""
    if chart is None or not several:
        return chart
    return chart | {"title": f"{chart['title']}: {run.name}"}


def _side_by_side(runs: Sequence[RunRecord]) -> SideBySide:
    tiles = [{tile.label: tile for tile in tiles_of(run)} for run in runs]
    labels = list(dict.fromkeys(label for each in tiles for label in each))
    found = SideBySide([], [], [])
    for label in labels:
        row = [each.get(label, Tile(label, "-")) for each in tiles]
        same_fact = not row[0].is_number and all(tile == row[0] for tile in row)
        found.same.append(row[0]) if same_fact else found.rows.append(row)
    for curves in LEARNING:
        for metric, label in curves.metrics.items():
            last = [run.series(metric)[-1:] for run in runs]
            if any(last):
                title = curves.title if len(curves.metrics) == 1 else f"{curves.title}: {label}"
                text = UNITS[unit_of(curves, (value for run in runs for _, value in run.series(metric)))]
                found.last.append([title, *(text(each[0][1]) if each else "-" for each in last)])
    return found


def _troubles(run: RunRecord) -> Failures:
    timeline = run.timeline
    lost = [
        f"{span.name}: {(span.end - span.begin) / 1e9:.1f} s"
        for track in (timeline.tracks if timeline is not None else ())
        if track.role == CONTROLLER
        for span in track.spans
        if "is lost: starting it anew" in span.name
    ]
    return Failures(
        failures=[[failure.get(key, "-")[:160] for key in Failures.keys] for failure in run.failures],
        restarts=lost,
        repeated=_numbers(timeline.again) if timeline is not None else "",
        reward_errors=run.reward_errors,
        findings=run.findings,
        not_finite=[(name, _numbers(steps)) for name, steps in not_finite(run).items()],
    )


def _lengths(run: RunRecord) -> list[dict[str, Any]]:
    """A histogram of prompts and one of responses, of the first and the last step that have trajectories."""
    found = []
    for name in ("prompt", "response"):
        by_step = {step: columns[name] for step, columns in run.lengths.items() if columns[name]}
        every = [length for lengths in by_step.values() for length in lengths]
        if len(set(every)) < 2:
            continue
        low, high = min(every), max(every)
        width = -(-(high - low + 1) // _BINS)
        edges = np.arange(low, high + width + 1, width)
        found.append(
            {
                "kind": "histogram",
                "title": f"Length of {name}s",
                "about": "responses by number of tokens" if name == "response" else "prompts by number of tokens",
                "x": [f"{edge}" if width == 1 else f"{edge} to {edge + width - 1}" for edge in edges[:-1].tolist()],
                "parts": [
                    {"colour": f"c{slot}", "label": f"step {step}", "values": np.histogram(lengths, edges)[0].tolist()}
                    for slot, (step, lengths) in enumerate(by_step.items())
                ],
            }
        )  # fmt: skip
    return found


def _sync_table(run: RunRecord) -> list[list[str]]:
    """For each of the last steps: step, MiB by link, of all and of the rank that gets most, unchanged MiB, seconds."""
    synced = [step for step in run.steps if "sync/bytes_total" in step][-_LAST_STEPS:]
    return [
        [
            str(int(step["step"])),
            *(f"{step.get(f'sync/bytes_{name}', 0.0) / MIB:,.2f}" for name in (*_LINKS, "unchanged")),
            f"{step['timing_s/sync']:.3f}" if "timing_s/sync" in step else "-",
        ]
        for step in synced
    ]


def _metrics(run: RunRecord) -> list[list[str]]:
    """Each metric with its first, least, greatest and last value; the least and the greatest are of those that are finite, if any is."""
    names = sorted(run.columns.keys() - {"step", "time"})
    found = []
    for name in names:
        values = [value for _, value in run.series(name)]
        finite = [value for value in values if math.isfinite(value)] or values
        found.append([name, *(figure(value) for value in (values[0], min(finite), max(finite), values[-1]))])
    return found


def _numbers(steps: Sequence[int]) -> str:
    """Text such as "3, 7, 9"; of many steps the first ones."""
    return ", ".join(map(str, steps[:_SHOWN_STEPS])) + (", ..." if len(steps) > _SHOWN_STEPS else "")


FILE = "report.html"


def run(options: argparse.Namespace, floors: Callable[[RunRecord], Floors]) -> None:
    """Write the page, and print its path: in the folder of a single run, or for several runs in the current folder.

    Args:
        floors: of a run.

    Raises:
        ValueError: a folder is no run's.
    """
    folders = [Path(folder) for folder in options.folders]
    default = folders[0] / FILE if len(folders) == 1 else Path(FILE)
    output = Path(options.output) if options.output is not None else default
    runs = read_runs(folders)
    text = page(runs, [floors(each) for each in runs])
    write_text(output, text)
    print(f"{output}: {len(text.encode()) / 1e6:.1f} MB")
