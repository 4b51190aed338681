"""Experiment trackers beside the run folder: Weights & Biases, MLflow, SwanLab, each used where it is installed.

Guarantees:
- A tracker is imported only where the configuration names it.
- Every run that is opened is ended: as finished, or as failed with the error of the run.

Where and as whom a tracker logs (servers, keys, offline modes) is its own business, by its own files and variables.
Written against wandb 0.31, mlflow 3.17 and swanlab 0.10; `tests/trainer/trackers` has their signatures.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run; `config`: the resolved configuration as nested dictionaries."""

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

    @abstractmethod
    def finish(self, error: BaseException | None) -> None:
        """End the run: as failed where there is an error."""


class WandbTracker(Tracker):
    def __init__(self, module: ModuleType, run: TrackedRun, folder: Path) -> None:
        self.wandb = module
        self.run = module.init(project=run.project, name=run.name, config=dict(run.config), dir=str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def log_samples(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0])
        table = self.wandb.Table(columns=columns, data=[[row[column] for column in columns] for row in rows])
        self.run.log({tag: table}, step=step)

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
        texts = ["\n\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows]
        self.swanlab.log({tag: [self.swanlab.Text(text) for text in texts]}, step=step)

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self.swanlab.finish()
        else:
            self.swanlab.finish(state="crashed", error=f"{type(error).__name__}: {error}")


TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
}


def open_trackers(names: Sequence[str], run: TrackedRun, folder: Path) -> list[Tracker]:
    """Begin a run in each of the trackers `names`, which are installed; `folder`: for what they keep locally."""
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
    """A metric's name in MLflow, which knows letters, digits and `_-. /:` alone: `pass@4` is `pass_at_4`."""
    return re.sub(r"[^\w\-./ :]", "_", metric.replace("@", "_at_"))
