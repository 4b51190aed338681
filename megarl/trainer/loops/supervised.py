"""The loop that SFT, reward models and DPO share: steps, validations, the best model, early stopping."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from megarl.cluster import WorkerGroup, group_kind
from megarl.config import TuningConfig, TuningTrainerConfig
from megarl.layout.grid import ParallelLayout
from megarl.trainer.loops.ppo import due, epochs
from megarl.trainer.roles.model_roles import say_layers
from megarl.trainer.roles.roles import open_pools
from megarl.trainer.run.checkpoints import Stateful, make_checkpoints
from megarl.trainer.run.cluster_setup import MODEL_PROCESSES, pools_of
from megarl.trainer.run.export import FOLDER
from megarl.trainer.run.run import Run
from megarl.trainer.workers.dispatch import NAMED, ModelSpec
from megarl.util.files import whole_file

VAL_LOSS = "val/loss"


class Loader(Stateful, Protocol):
    """Batches of one epoch each time it is iterated, and their position."""

    def __iter__(self) -> Iterator[pa.Table]: ...


@dataclass(frozen=True)
class Stages:
    """The stages that differ between the commands.

    Attributes:
        update: makes one optimizer step on a batch; returns its metrics.
        validate: returns metrics of held-out examples, including `val/loss`; None: there are no such examples.
        export: writes the model as a Hugging Face folder, completely or not at all; returns its path.
    """

    update: Callable[[pa.Table], dict[str, float]]
    validate: Callable[[], dict[str, float]] | None
    export: Callable[[Path], str]


@dataclass
class Progress:
    """Validation losses so far: the best one, and whether the run is to stop early.

    Attributes:
        patience: consecutive validations without a lower loss after which the run ends; None: it does not end early.
        min_delta: how much lower than `threshold` a loss must be to count for `patience`.
        best: the lowest loss; infinite before the first.
        threshold: the lowest one that counted.
        stale: validations since then.
    """

    patience: int | None
    min_delta: float
    best: float = float("inf")
    threshold: float = float("inf")
    stale: int = 0

    def observe(self, loss: float) -> bool:
        """Record a loss; returns whether it is the lowest so far (NaN never is)."""
        if loss < self.threshold - self.min_delta:
            self.threshold, self.stale = loss, 0
        else:
            self.stale += 1
        lowest = loss < self.best
        self.best = loss if lowest else self.best
        return lowest

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, which have no infinity."""
        return {
            "best": self.best if math.isfinite(self.best) else None,
            "threshold": self.threshold if math.isfinite(self.threshold) else None,
            "stale": self.stale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.threshold = (
            math.inf if state[name] is None else state[name] for name in ("best", "threshold")
        )
        self.stale = state["stale"]

    @property
    def stop(self) -> bool:
        return self.patience is not None and self.stale >= self.patience


def start_group(
    config: TuningConfig, run: Run, num_steps: int, name: str, worker: str, head: str, **arguments: Any
) -> tuple[WorkerGroup, ParallelLayout]:
    """The model's ranks on all devices of the run, and their layout.

    Args:
        worker: the ranks' class, as module:class; it gets `arguments` in addition to `spec`.
        head: "lm" or "value".
    """
    trainer = config.trainer
    open_pools(run, pools_of(config))
    pool = run.pools["global"]
    spec = ModelSpec(
        path=config.model.path,
        head=head,
        megatron=config.megatron,
        optim=config.optim,
        num_updates=num_steps,
        timeout=trainer.collective_timeout,
        lora=config.model.lora,
    )
    with run.status("starting the model's ranks"):
        kind = group_kind(len(pool), run.relays_from)
        group = run.start(
            kind(
                name,
                worker,
                pool,
                len(pool),
                {"spec": spec, **arguments},
                run.log_dir,
                around=NAMED,
                fork_server=run.fork_servers.get(MODEL_PROCESSES),
            )
        )
        run.profiled.append(group)
        run.wait(group.started)
    say_layers(run, group, pool)
    return group, ParallelLayout.from_config(config.megatron, len(pool))


def run_steps(
    trainer: TuningTrainerConfig,
    run: Run,
    loader: Loader,
    num_steps: int,
    stages: Stages,
    group: WorkerGroup,
) -> str:
    """Make all remaining steps; returns the folder of the model after the last one.

    Also saves checkpoints, as the trainer's keys say, and the best model so far as `best/hf`.
    """
    progress = Progress(trainer.early_stop_patience, trainer.early_stop_min_delta)
    parts = {"data": loader, "progress": progress}
    checkpoints = make_checkpoints(
        run, trainer, {"model": group}, parts, lambda phase: nullcontext(), stages.export
    )
    done = checkpoints.resume()
    for step, batch in zip(range(done + 1, num_steps + 1), epochs(loader), strict=False):
        if progress.stop:  # already before the checkpoint
            break
        with run.step(step) as metrics:
            with run.timed("update"):
                metrics |= stages.update(batch)
            validated = stages.validate is not None and due(trainer.test_freq, step, num_steps)
            if validated:
                with run.timed("validate"):
                    metrics |= stages.validate()
        if validated and progress.observe(metrics[VAL_LOSS]) and trainer.save_best:
            save_best(run, step, metrics, stages.export)
        checkpoints.after(step, metrics, last=step == num_steps or progress.stop)
        if progress.stop:
            run.say(
                f"step {step}: the last {progress.stale} validations had no {VAL_LOSS} under {progress.threshold:.6g} by "
                f"trainer.early_stop_min_delta={trainer.early_stop_min_delta:g}: the run ends early"
            )
    return stages.export(run.folder / FOLDER)


def save_best(run: Run, step: int, metrics: dict[str, float], export: Callable[[Path], str]) -> None:
    """Write the model as `best/hf` in the run folder, and its step and metrics into `best/best.json`."""
    folder = run.folder / "best"
    (folder / "best.json").unlink(
        missing_ok=True
    )  # it would describe another model while this one is written
    run.say(f"step {step}: the lowest {VAL_LOSS} so far, {metrics[VAL_LOSS]:.6g}")
    export(folder / FOLDER)
    found = {"step": step, **{name: value for name, value in metrics.items() if name.startswith("val/")}}
    with whole_file(folder / "best.json") as temporary:
        temporary.write_text(json.dumps(found, indent=2) + "\n")
