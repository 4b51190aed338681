"""A run: its folder, its cluster, its log. Ended whole, whatever ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.cluster import ResourcePool, WorkerGroup, start_cluster, stop_cluster, stream, wait
from megarl.config import (
    BatchPlan,
    TrainConfig,
    TuningBatchPlan,
    TuningConfig,
    batch_table,
    resolve_batches,
    save_batch_plan,
    save_config,
    to_dict,
)
from megarl.data.trajectories import write_trajectories
from megarl.trainer.logger import RunLogger
from megarl.trainer.trackers import TrackedRun


@dataclass
class Run:
    """What the stages of a run share; `seconds` holds the phases of the step in progress."""

    folder: Path
    console: Console
    logger: RunLogger | None = None
    trajectory_folder: Path | None = None
    groups: list[WorkerGroup] = field(default_factory=list)
    pools: dict[str, ResourcePool] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def log_dir(self) -> Path:
        """Where every process has a log of its own."""
        return self.folder / "logs"

    def say(self, text: str) -> None:
        """Print a line, as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def status(self, what: str) -> Iterator[None]:
        """Say what takes a while, and afterwards how long it took."""
        self.say(f"{what} ...")
        begun = time.perf_counter()
        yield
        self.say(f"  {time.perf_counter() - begun:.1f} s")

    def start(self, group: WorkerGroup) -> WorkerGroup:
        """Watch over a group from now on, and end it with the run."""
        self.groups.append(group)
        return group

    def wait(self, refs: list[ray.ObjectRef]) -> list[Any]:
        """The results; raises within seconds when any process of the run died or a call failed."""
        return wait(refs, self.groups)

    def stream(self, streams: list[ray.ObjectRefGenerator]) -> Iterator[pa.Table]:
        """The tables that generator methods yield, as they come, from any rank; raises as `wait` does."""
        return stream(streams, self.groups)

    def put(self, table: pa.Table) -> ray.ObjectRef:
        """A table in the object store, from where every process reads it in place."""
        return ray.put(table)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the seconds of a phase of the step."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun

    @contextmanager
    def step(self, step: int) -> Iterator[dict[str, float]]:
        """Time a step; what the caller puts into the dictionary is logged at its end."""
        self.seconds.clear()
        metrics: dict[str, float] = {}
        with self.timed("step"):
            yield metrics
        if "perf/tokens" in metrics:
            metrics["perf/tokens_per_s"] = metrics["perf/tokens"] / self.seconds["step"]
        metrics |= {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
        self.logger.log(step, metrics)

    def save_trajectories(self, batch: pa.Table, kind: str, step: int) -> None:
        """Write trajectories: a step's ("step"), as they were trained on, or the validation's after it ("val")."""
        assert self.trajectory_folder is not None
        write_trajectories(batch, self.trajectory_folder / f"{kind}-{step:06d}.parquet")


@contextmanager
def open_run(config: TrainConfig | TuningConfig, total_steps: int) -> Iterator[Run]:
    """A training run: writes down what is run, starts the cluster, opens the log.

    Args:
        config: resolved and checked.
    """
    trainer, plan = config.trainer, resolve_batches(config)
    folder = Path(trainer.default_local_dir)
    save_config(config, folder / "config.yaml")
    save_batch_plan(plan, folder)
    with open_engine_run(trainer.ray_address, plan.devices, folder) as run:
        run.say((folder / "config.yaml").read_text())
        print_plan(run.console, plan, total_steps)
        if isinstance(config, TrainConfig):
            run.trajectory_folder = Path(trainer.rollout_data_dir)
        tracked = TrackedRun(trainer.project_name, trainer.experiment_name, to_dict(config))
        with RunLogger(
            folder, trainer.logger, total_steps=total_steps, console=run.console, tracked=tracked
        ) as run.logger:
            yield run


@contextmanager
def open_engine_run(address: str | None, num_devices: int, folder: Path) -> Iterator[Run]:
    """A run's folder and cluster (the one at `address`, or one of its own); ends every process it started."""
    run = Run(folder, Console())
    run.say(f"run folder: {folder}")
    cluster = start_cluster(address, num_devices, folder)
    try:
        yield run
    finally:
        for group in run.groups:
            group.shutdown()
        for pool in run.pools.values():
            pool.close()
        stop_cluster(cluster)


def print_plan(console: Console, plan: BatchPlan | TuningBatchPlan, total_steps: int) -> None:
    header, *rows = batch_table(plan)
    table = Table(
        *header, title=f"{total_steps} steps", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
