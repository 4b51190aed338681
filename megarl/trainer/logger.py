"""A run's metrics: to the console, to TensorBoard and, always, to `metrics.jsonl` in the run folder.

Guarantees: after `log` returns, the step is on disk; a step is in `metrics.jsonl` once, also when a run is resumed
from an earlier step than its last one; each line of it is strict JSON.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megarl.files import naming, whole_file

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
SINKS = ("console", "tensorboard")


@dataclass(frozen=True)
class Figure:
    """A figure of the console line: its label, and the metrics of which the first that is there is shown."""

    label: str
    metrics: tuple[str, ...]
    format: str = ".4f"


FIGURES = (
    Figure("loss", ("train/loss",)),
    Figure("val_loss", ("val/loss",)),
    Figure("reward", ("critic/score/mean",), ".3f"),
    Figure("accuracy", ("val/score/mean",), ".3f"),
    Figure("kl", ("actor/ref_kl", "actor/ppo_kl"), ".2e"),
    Figure("entropy", ("actor/entropy",), ".3f"),
    Figure("grad_norm", ("actor/grad_norm", "train/grad_norm"), ".3f"),
    Figure("lr", ("actor/lr", "train/lr"), ".2e"),
    Figure("tokens/s", ("perf/tokens_per_s",), ",.0f"),
    Figure("seconds", ("timing_s/step",), ".1f"),
)


class RunLogger:
    """Writes the metrics of each step; to be used in a `with` statement.

    Args:
        folder: the run folder.
        sinks: of "console" (a line a step, and a progress bar on a terminal) and "tensorboard".
        total_steps: for the progress bar; None where it is not known.
        resumed_step: the last step of the run that is resumed; None: the run is new. What an earlier run logged in
            this folder for later steps (for a new run: for all) is dropped.
        description: names the run in the progress bar.
        figures: what the console line shows, where the metrics have it.
        console: where to print; None: standard output.
    """

    def __init__(
        self,
        folder: str | Path,
        sinks: Sequence[str] = SINKS,
        total_steps: int | None = None,
        *,
        resumed_step: int | None = None,
        description: str = "train",
        figures: Sequence[Figure] = FIGURES,
        console: Console | None = None,
    ) -> None:
        unknown = sorted(set(sinks) - set(SINKS))
        if unknown:
            raise ValueError(f"trainer.logger has {', '.join(unknown)}; megarl has {', '.join(SINKS)}")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.console = console or Console()
        self._figures = tuple(figures)
        self._total_steps = total_steps
        self._to_console = "console" in sinks
        last_kept = -1 if resumed_step is None else resumed_step
        _keep_metrics(self.folder / METRICS_FILE, last_kept)
        self._events = _open_events(self.folder, last_kept + 1) if "tensorboard" in sinks else None
        self._progress = _progress(self.console, enabled=self._to_console)
        self._task = self._progress.add_task(description, total=total_steps, completed=max(last_kept, 0))

    def __enter__(self) -> "RunLogger":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._events is not None:
            with naming(self.folder / TENSORBOARD_FOLDER):
                self._events.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        values = {name: float(value) for name, value in metrics.items()}
        line = {
            "step": step,
            "time": time.time(),
            **{name: _json_number(value) for name, value in values.items()},
        }
        _append(self.folder / METRICS_FILE, json.dumps(line, allow_nan=False) + "\n")
        if self._events is not None:
            with naming(self.folder / TENSORBOARD_FOLDER):
                _write_events(self._events, step, values)
        if self._to_console:
            self._print_line(step, values)
            self._progress.update(self._task, completed=step)

    def print(self, *objects: Any) -> None:
        """Print something (text, a rich table), above the progress bar where there is one."""
        self._progress.console.print(*objects)

    def _print_line(self, step: int, values: Mapping[str, float]) -> None:
        # No markup, no highlighting, no wrapping: the line is the same in a terminal, a file and a scheduler's log.
        total = "" if self._total_steps is None else f"/{self._total_steps}"
        parts = [f"step {step}{total}"]
        for figure in self._figures:
            name = next((name for name in figure.metrics if name in values), None)
            if name is not None:
                parts.append(f"{figure.label} {values[name]:{figure.format}}")
        self._progress.console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The lines of a `metrics.jsonl` (or of the one in a run folder), numbers as floats, `step` as an int.

    A last line that was cut off when the run was killed is left out.

    Raises:
        ValueError: no such file; a line before the last that is no JSON.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there are no metrics at {path}")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path} line {number}: not valid JSON: {error}") from None
        rows.append({name: value if name == "step" else float(value) for name, value in row.items()})
    return rows


def _keep_metrics(path: Path, last_kept: int) -> None:
    kept = [row for row in read_metrics(path) if row["step"] <= last_kept] if path.is_file() else []
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in kept:
            file.write(json.dumps({name: _json_number(value) for name, value in row.items()}) + "\n")


def _append(path: Path, line: str) -> None:
    """Append a whole line, or nothing where the disk is full."""
    size = path.stat().st_size
    try:
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError:
        os.truncate(path, size)
        raise


def _json_number(value: float) -> float | str:
    """JSON has no NaN and no infinity: they are written as text that `float` reads."""
    return value if math.isfinite(value) else str(value)


def _open_events(folder: Path, first_step: int) -> EventFileWriter:
    writer = EventFileWriter(str(folder / TENSORBOARD_FOLDER))
    # TensorBoard drops what earlier files of the folder hold from this step on.
    restart = Event(wall_time=time.time(), step=first_step, session_log=SessionLog(status=SessionLog.START))
    writer.add_event(restart)
    writer.flush()
    return writer


def _write_events(writer: EventFileWriter, step: int, values: Mapping[str, float]) -> None:
    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
    writer.flush()


def _progress(console: Console, enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        # Elsewhere than on a terminal a bar would be printed again and again: the lines alone are left.
        disable=not (enabled and console.is_terminal),
    )
