"""A run's metrics: to the console, to TensorBoard, to experiment trackers and, always, to `metrics.jsonl` in the run folder.

Guarantees:
- After `log` returns, the step is on disk.
- A step is in `metrics.jsonl` once, also when a run is resumed from an earlier step than its last one. Results of a step that came when
  later ones were made have a further line, which `read_metrics` joins to that of their step.
- Each line of it is strict JSON.
- A tracker is imported only where the configuration names it.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter

from megarl.config.schema.run import DEFAULT_LOGGERS
from megarl.util.files import naming, whole_file


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it; `config`: the resolved configuration as nested dictionaries."""

    project: str
    name: str
    config: Mapping[str, Any]


class Tracker(ABC):
    """One tracker's run, from its construction to `finish`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step; steps come in their order."""

    @abstractmethod
    def log_samples(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Answers of a validation, all with the same columns, under the name `tag`; before the step's metrics."""

    def log_late(
        self,
        step: int,
        now: int,
        metrics: Mapping[str, float],
        samples: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> None:
        """Further metrics of a step that was logged before, and answers by their names; `now`: the newest step so far."""
        for tag, rows in samples.items():
            self.log_samples(step, tag, rows)
        self.log(step, metrics)

    @abstractmethod
    def finish(self, error: BaseException | None) -> None:
        """End the run: as failed where there is an error."""


LATE_STEP = "val/step"


class WandbTracker(Tracker):
    def __init__(self, module: ModuleType, run: TrackedRun, folder: Path) -> None:
        self.wandb = module
        self.run = module.init(project=run.project, name=run.name, config=dict(run.config), dir=str(folder))
        self._late: set[str] = set()  # metrics that are drawn over LATE_STEP

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def log_samples(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.run.log({tag: self._table(rows)}, step=step)

    def log_late(
        self,
        step: int,
        now: int,
        metrics: Mapping[str, float],
        samples: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> None:
        """wandb drops metrics of a step before its newest one: these metrics are logged with the newest step, and drawn over LATE_STEP,
        which has their own step."""
        if not self._late:
            self.run.define_metric(LATE_STEP)
        for name in metrics:
            if name not in self._late:
                self.run.define_metric(name, step_metric=LATE_STEP)
        self._late |= metrics.keys()
        tables = {tag: self._table(rows) for tag, rows in samples.items()}
        self.run.log({**metrics, **tables, LATE_STEP: float(step)}, step=now)

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        return self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])

    def finish(self, error: BaseException | None) -> None:
        self.run.finish(exit_code=0 if error is None else 1)


class MlflowTracker(Tracker):
    def __init__(self, module: ModuleType, run: TrackedRun, folder: Path) -> None:
        self.mlflow = module
        module.set_experiment(experiment_name=run.project)
        module.start_run(run_name=run.name)
        module.log_params(flatten(run.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.mlflow.log_metrics({mlflow_name(name): value for name, value in metrics.items()}, step=step)

    def log_samples(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        self.mlflow.log_dict(columns, f"{tag}/step-{step:06d}.json")

    def finish(self, error: BaseException | None) -> None:
        self.mlflow.end_run(status="FINISHED" if error is None else "FAILED")


class SwanlabTracker(Tracker):
    def __init__(self, module: ModuleType, run: TrackedRun, folder: Path) -> None:
        self.swanlab = module
        module.init(
            project=run.project, name=run.name, config=dict(run.config), log_dir=str(folder / "swanlog")
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.swanlab.log(dict(metrics), step=step)

    def log_samples(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self.swanlab.echarts.Table().add(list(rows[0]), [list(row.values()) for row in rows])
        self.swanlab.log({tag: table}, step=step)

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self.swanlab.finish()
        else:
            self.swanlab.finish(state="crashed", error=f"{type(error).__name__}: {error}")


class TrackioTracker(Tracker):
    def __init__(self, module: ModuleType, run: TrackedRun, folder: Path) -> None:
        self.trackio = module
        module.init(project=run.project, name=run.name, config=dict(run.config), embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log(dict(metrics), step=step)

    def log_samples(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self.trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.trackio.log({tag: table}, step=step)

    def finish(self, error: BaseException | None) -> None:
        if error is not None:  # its runs have no state; an alert is shown with the run
            self.trackio.alert(
                "the run failed", f"{type(error).__name__}: {error}", level=self.trackio.AlertLevel.ERROR
            )
        self.trackio.finish()


TRACKERS: dict[str, Callable[[ModuleType, TrackedRun, Path], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
    "trackio": TrackioTracker,
}


def open_trackers(names: Sequence[str], run: TrackedRun, folder: Path) -> list[Tracker]:
    """Begin a run in each of the trackers `names`, which are installed; `folder`: for their local files."""
    opened: list[Tracker] = []
    try:
        for name in names:
            opened.append(TRACKERS[name](import_module(name), run, folder))
    except BaseException as error:
        for tracker in opened:
            tracker.finish(error)
        raise
    return opened


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys with dots: {"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def mlflow_name(metric: str) -> str:
    """A metric's name in MLflow, which allows letters, digits and `_-. /:` alone: `pass@4` is `pass_at_4`."""
    return re.sub(r"[^\w\-./ :]", "_", metric.replace("@", "_at_"))


RECENT = 20  # steps


@dataclass
class Pace:
    """Seconds between the ends of the last `RECENT` steps, including checkpoints and validations.

    Their median is the time of a step, so that a few steps with a validation or a checkpoint do not count.
    """

    last: float | None = None  # when the last step ended
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def ended(self, now: float, step_seconds: float | None) -> None:
        """A step ended. `step_seconds`: its own time, which counts where none ended before it."""
        taken = step_seconds if self.last is None else now - self.last
        if taken is not None:
            self.seconds.append(taken)
        self.last = now

    def left(self, num_steps: int) -> str | None:
        """The time of `num_steps` more steps, such as 0:48 or 26:02:05; None: no step has ended, or none is left."""
        if not self.seconds or num_steps <= 0:
            return None
        minutes, seconds = divmod(round(median(self.seconds) * num_steps), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


METRICS_FILE = "metrics.jsonl"  # the sink "file"
LATE = "late"  # the field of lines that belong to an earlier line of their step
TENSORBOARD_FOLDER = "tensorboard"
SAMPLE_CHARACTERS = 300  # of a prompt or response on the console
# The numbers of the console line: label, metrics (the first one that a step has is shown), format.
FIGURES = (
    ("loss", ("train/loss",), ".4f"),
    ("val_loss", ("val/loss",), ".4f"),
    ("reward", ("critic/score/mean",), ".3f"),
    ("accuracy", ("val/score/mean", "val/accuracy", "train/accuracy"), ".3f"),
    ("kl", ("actor/ref_kl", "actor/ppo_kl"), ".2e"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("grad_norm", ("actor/grad_norm", "train/grad_norm"), ".3f"),
    ("lr", ("actor/lr", "train/lr"), ".2e"),
    ("tokens/s", ("perf/tokens_per_s",), ",.0f"),
    ("seconds", ("timing_s/step", "timing_s/eval"), ".1f"),
)


class RunLogger:
    """Writes the metrics of each step; to be used in a `with` statement.

    Args:
        folder: the run folder.
        sinks: of the configuration's `LOGGERS`; `metrics.jsonl` is written in any case.
        total_steps: for the progress bar; None where it is not known.
        resumed_step: the last step of the run that is resumed; None: the run is new. Metrics that an earlier run
            logged in this folder for later steps (for a new run: for all steps) are dropped.
        console: where to print; None: standard output.
        tracked: the run as trackers see it; required with any tracker.
        trackers: further trackers, which are open already.
    """

    def __init__(
        self,
        folder: str | Path,
        sinks: Sequence[str] = DEFAULT_LOGGERS,
        total_steps: int | None = None,
        *,
        resumed_step: int | None = None,
        console: Console | None = None,
        tracked: TrackedRun | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._total_steps = total_steps
        self._to_console = "console" in sinks
        last_kept = -1 if resumed_step is None else resumed_step
        keep_lines(self.folder / METRICS_FILE, last_kept)
        self._events = _open_events(self.folder, last_kept + 1) if "tensorboard" in sinks else None
        named = [name for name in dict.fromkeys(sinks) if name in TRACKERS]
        assert tracked is not None or not named, f"{named} need to be told of the run"
        self._trackers = [*trackers, *(open_trackers(named, tracked, self.folder) if tracked else [])]
        self._progress = _progress(console or Console(), enabled=self._to_console)
        self._task = self._progress.add_task("train", total=total_steps, completed=max(last_kept, 0), left="")
        self._pace = Pace()
        self._newest = max(last_kept, 0)

    def __enter__(self) -> RunLogger:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._tell(lambda tracker: tracker.finish(error))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        values = self._write(step, metrics, {})
        self._newest = max(self._newest, step)
        self._tell(lambda tracker: tracker.log(step, values))
        if step:  # step 0 is the validation before training
            self._pace.ended(time.monotonic(), values.get("timing_s/step"))
        if self._to_console:
            left = None if self._total_steps is None else self._pace.left(self._total_steps - step)
            self._print_line(step, values, left)
            self._progress.update(self._task, completed=step, left="" if left is None else f"{left} left")

    def log_samples(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show some answers, all with the same columns, in TensorBoard and in the trackers; the first one, shortened, on the console.

        To be called before `log` of the same step.

        Args:
            tag: their name there.
        """
        if not rows:
            return
        self._newest = max(self._newest, step)
        self._tell(lambda tracker: tracker.log_samples(step, tag, rows))
        self._show(step, tag, rows)

    def _show(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._events is not None:
            _write_text(self._events, step, tag, _markdown(rows))
        if self._to_console:
            self._say(f"step {step}: {tag}, one of them:")
            for name, cell in rows[0].items():
                self._say(f"  {name}: {cut(str(cell), SAMPLE_CHARACTERS)}")

    def log_late(
        self, step: int, metrics: Mapping[str, float], samples: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> None:
        """Write further metrics of a step that was logged before, the results of a validation, and show some of its answers.

        Args:
            samples: answers by their name, as in `log_samples`.
        """
        samples = {tag: rows for tag, rows in samples.items() if rows}
        for tag, rows in samples.items():
            self._show(step, tag, rows)
        values = self._write(step, metrics, {LATE: True})
        self._tell(lambda tracker: tracker.log_late(step, max(self._newest, step), values, samples))
        if self._to_console:
            self._say("  ".join([f"validation after step {step}", *_figures(values)]))

    def _write(self, step: int, metrics: Mapping[str, float], marks: Mapping[str, bool]) -> dict[str, float]:
        """Write metrics into metrics.jsonl, with the fields `marks`, and into TensorBoard's file; returns them as floats."""
        values = {name: float(value) for name, value in metrics.items()}
        line = {
            "step": step,
            "time": time.time(),
            **marks,
            **{name: _json_number(value) for name, value in values.items()},
        }
        _append(self.folder / METRICS_FILE, (json.dumps(line, allow_nan=False) + "\n").encode())
        if self._events is not None:
            _write_scalars(self._events, step, values)
        return values

    def _tell(self, call: Callable[[Tracker], object]) -> None:
        """Call each tracker. An exception, such as of a server that is away, is a warning: the metrics are on disk."""
        for tracker in self._trackers:
            try:
                call(tracker)
            except Exception as error:
                name = type(tracker).__name__
                self._say(f"Warning: {name}: {type(error).__name__}: {error}; {METRICS_FILE} has all metrics")

    def _say(self, line: str) -> None:
        # No markup, no highlighting, no wrapping: the line is the same in a terminal, a file and a scheduler's log.
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _print_line(self, step: int, values: Mapping[str, float], left: str | None) -> None:
        total = "" if self._total_steps is None else f"/{self._total_steps}"
        parts = [f"step {step}{total}", *_figures(values)]
        if left is not None:
            parts.append(f"left {left}")
        self._say("  ".join(parts))


def _figures(values: Mapping[str, float]) -> Iterator[str]:
    for label, names, form in FIGURES:
        name = next((name for name in names if name in values), None)
        if name is not None:
            yield f"{label} {values[name]:{form}}"


def cut(text: str, length: int) -> str:
    """A text on one line: line breaks as they are written in Python, the middle left out where it is longer than `length`."""
    text = text.strip().replace("\n", "\\n")
    if len(text) <= length:
        return text
    half = (length - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The steps of a `metrics.jsonl` (or of the one in a run folder), numbers as floats, `step` as an int; a line of late results belongs
    to the line of its step.

    A last line that was cut off when the run was killed is left out.

    Raises:
        ValueError: no such file; a line before the last that is no JSON.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there are no metrics at {path}")
    rows: dict[int, dict[str, float]] = {}
    for _, row in _complete_lines(path):
        step, late = row["step"], row.pop(LATE, False)
        values = {name: value if name == "step" else float(value) for name, value in row.items()}
        rows[step] = values | rows.get(step, {}) if late else values
    return list(rows.values())


def keep_lines(path: Path, last_step: int) -> None:
    """Drop lines of a file of JSON lines about steps after `last_step`, and a last line that was cut off.

    Raises:
        ValueError: a line before the last is no JSON.
    """
    lines = _complete_lines(path) if path.is_file() else []
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line, row in lines if row["step"] <= last_step)


def _complete_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each line of a file of JSON lines, and its value, without a last line that was cut off."""
    lines, found = path.read_text(encoding="utf-8").splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            found.append((line, json.loads(line)))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path} line {number}: not valid JSON: {error}") from None
    return found


def _append(path: Path, data: bytes) -> None:
    """Append all data, or none if the disk is full."""
    size = path.stat().st_size
    try:
        with naming(path), path.open("ab") as file:
            file.write(data)
    except OSError:
        os.truncate(path, size)
        raise


def _json_number(value: float) -> float | str:
    """JSON has no NaN and no infinity: they are written as text that `float` reads."""
    return value if math.isfinite(value) else str(value)


def _open_events(folder: Path, first_step: int) -> Path:
    """A new file of TensorBoard's events.

    TensorBoard's own writer has a thread, which prints a traceback where the disk is full.
    """
    folder = folder / TENSORBOARD_FOLDER
    # TensorBoard finds a file by the beginning of its name, and reads a folder's files in the order of their names.
    path = folder / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
    with naming(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    _append_event(path, Event(wall_time=time.time(), file_version="brain.Event:2"))
    # TensorBoard drops events of earlier files in the folder from this step on.
    restart = SessionLog(status=SessionLog.START)
    _append_event(path, Event(wall_time=time.time(), step=first_step, session_log=restart))
    return path


def _append_event(path: Path, event: Event) -> None:
    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    _append(path, record.getvalue())


def _write_scalars(path: Path, step: int, values: Mapping[str, float]) -> None:
    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    _append_event(path, Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))


def _write_text(path: Path, step: int, tag: str, text: str) -> None:
    """Write a text for TensorBoard's page of texts, which reads Markdown."""
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=TensorShapeProto())
    value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
    _append_event(path, Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table; line breaks and bars within a cell, which would end it, are replaced."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _progress(console: Console, enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        # Elsewhere than on a terminal a bar would be printed again and again: the lines alone are left.
        disable=not (enabled and console.is_terminal),
    )
