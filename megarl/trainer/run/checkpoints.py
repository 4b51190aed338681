"""Checkpoints of a run: their content, when they are saved, and how a run continues from one.

Guarantees:
- A run that continues from a checkpoint of step k begins step k + 1 as the run that saved it did: with its weights, optimizer
  states, schedules, random numbers, coefficients and data positions.
- A checkpoint that cannot be written changes neither older ones nor the run (`trainer.on_save_error`).
- Checkpoints that do not belong to this run's history are moved aside with the other files of their run, never overwritten.

In a checkpoint's folder: a folder for each trained role (Megatron's distributed format), `run.json` (the controller's state),
`config.yaml`, with trainer.save_hf `hf`, with trainer.mode=one_step_off `ahead` (the next step's batch), with partial_rollouts and
fully_async `under_way` (finished groups, prompts of unfinished ones), and the manifest.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from megarl.checkpoints import (
    Checkpoint,
    CheckpointStore,
    FileFacts,
    Keep,
    SaveSchedule,
    Verify,
    changed_files,
    find_damage,
    read_checkpoint,
    steps_in,
)
from megarl.checkpoints.manifest import shortened
from megarl.cluster import RunFailure, WorkerFailed, WorkerGroup
from megarl.config import TrainConfig, TuningConfig
from megarl.config.checks.run import changed_keys
from megarl.config.schema.run import SavingConfig
from megarl.trainer.run.earlier_runs import CONFIG_FILE, move_checkpoints, refusals, set_aside_earlier_run
from megarl.trainer.run.preemption import REQUEUE
from megarl.trainer.run.run import Run


@dataclass
class Best:
    """The best value of `trainer.best_metric` so far, among validations whose checkpoint was written."""

    metric: str | None
    mode: str
    value: float | None = None

    def found(self, metrics: Mapping[str, float]) -> float | None:
        """The value in a validation's metrics; None: the step had no validation, or no metric is configured.

        Raises:
            ValueError: a validation has no metric of that name.
        """
        if self.metric is None or not any(name.startswith("val/") for name in metrics):
            return None
        if self.metric not in metrics:
            known = ", ".join(sorted(name for name in metrics if name.startswith("val/")))
            raise ValueError(f"trainer.best_metric={self.metric!r}: validations have {known}")
        return metrics[self.metric]

    def is_beaten_by(self, value: float | None) -> bool:
        """Whether a value of `found` is better than all before."""
        if value is None or not math.isfinite(value):
            return False
        sign = 1.0 if self.mode == "max" else -1.0
        return self.value is None or sign * value > sign * self.value

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "mode": self.mode, "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved best value, unless it is of another metric."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value = state["value"]


STATE_FILE = "run.json"
VALIDATIONS = "validations"  # a part that checkpoints of earlier versions lack
HF_FOLDER = "hf"
# What Python makes of the error numbers of a file system, by their names: errors of ranks arrive as text.
_FILE_ERRORS = (
    "OSError", "FileExistsError", "FileNotFoundError", "InterruptedError", "IsADirectoryError", "NotADirectoryError",
    "PermissionError",
)  # fmt: skip


class Stateful(Protocol):
    """Controller state that changes from step to step, saved as JSON."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a saved state.

        Raises:
            ValueError: it does not fit this object.
        """
        ...


class InFolder(Protocol):
    """Controller state that is saved as files, in a folder of its own in a checkpoint."""

    def save(self, folder: Path) -> None:
        """Write its files into an empty folder."""
        ...

    def load(self, folder: Path) -> None:
        """Continue with saved files.

        Raises:
            ValueError: they do not fit this object.
        """
        ...


HoldMemory = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint whose files are being written, in the folder `partial`.

    Attributes:
        better: whether its value is the best so far.
        previous_best: the best value before it; None: there was none.
        begun: its start, by `time.perf_counter`.
        seconds: the seconds that the run has waited for it so far.
    """

    step: int
    partial: Path
    better: bool
    previous_best: float | None
    begun: float
    seconds: float


@dataclass
class Checkpoints:
    """Saves a run's state after its steps, when that is due; the run's store is open.

    Attributes:
        groups: the trained roles, by the name of their folder.
        parts: controller state saved as JSON, by name.
        folders: controller state saved as files, by the name of its folder.
        held: keeps the memory that a phase ("save_<role>") needs on the devices during a block.
        export: writes the policy as a Hugging Face model into a folder.
    """

    run: Run
    trainer: SavingConfig
    groups: Mapping[str, WorkerGroup]
    parts: Mapping[str, Stateful]
    held: HoldMemory
    export: Callable[[Path], Any]
    folders: Mapping[str, InFolder] = field(default_factory=dict)
    schedule: SaveSchedule = field(init=False)
    best: Best = field(init=False)
    _unfinished: Unfinished | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        trainer = self.trainer
        self.schedule = SaveSchedule(
            every_steps=trainer.save_freq if trainer.save_freq > 0 else None,
            every_minutes=trainer.save_minutes,
            max_run_minutes=trainer.max_run_minutes,
            started=self.run.started,
        )
        self.best = Best(trainer.best_metric, trainer.best_mode)

    def resume(self) -> int:
        """Load the checkpoint that the run continues from; returns its step, 0 without one.

        Raises:
            ValueError: it does not fit this run; names the part.
        """
        found = self.run.resumed
        if found is None:
            return 0
        saved = json.loads((found.folder / STATE_FILE).read_text(encoding="utf-8"))
        with self.run.timed("resume"), self.run.status(f"going on from {found.folder}"):
            for role, group in self.groups.items():
                with self.held(f"save_{role}"):
                    self.run.wait(group.call("load_checkpoint", str(found.folder / role), role))
            for name, part in self._all_parts().items():
                if name in saved or name != VALIDATIONS:
                    part.load_state_dict(saved[name])
            for name, own in self.folders.items():
                own.load(found.folder / name)
        if found.facts.get("best") and self.best.value is not None:
            self._mark_resumed(found)
        return found.step

    def _mark_resumed(self, found: Checkpoint) -> None:
        """Mark the checkpoint that the run continues from as the best, which a run that was killed after it wrote it may not have done."""
        store = self.run.store
        if store.best != found.step and found.folder.resolve().parent == store.root.resolve():
            store.mark_best(found.step)

    def after(self, step: int, metrics: Mapping[str, float], *, last: bool) -> None:
        """Save after a step if that is due.

        Args:
            metrics: the step's.
            last: whether it is the last step of the run.

        Raises:
            OSError: the checkpoint could not be written, and trainer.on_save_error says stop.
            SystemExit: the run has to end here, and to be started again (REQUEUE).
        """
        value = self.best.found(metrics)
        self.schedule.stepped(self.run.seconds["step"])
        due = self.schedule.due(step, last=last)
        reason = None if last else self._ending(due)
        save = reason is not None or due in ("steps", "minutes")
        with self.run.timed("save"):
            # A value is the best only if its checkpoint is written: finish that before the next comparison.
            self._finish(wait=save or last or value is not None)
            better = self.best.is_beaten_by(value)
            if save or better:
                self._begin(step, value if better else None)
                self._finish(wait=last or reason is not None or not self.trainer.async_save)
        if reason is not None:
            self.run.say(f"ending after step {step}, to be started again: {reason}")
            raise SystemExit(REQUEUE)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Mark the checkpoint of `step`, if there is one, as the best by the results of a validation that was made after it was written."""
        value = self.best.found(metrics)
        if self.best.is_beaten_by(value) and step in steps_in(self.run.store.root):
            self.best.value = value
            self.run.store.mark_best(step)

    def save(self, step: int) -> Path | None:
        """Save now, after `step`; returns the checkpoint's folder, None if there is none (trainer.on_save_error).

        Raises:
            OSError: as `after`.
        """
        self.finish()
        with self.run.timed("save"):
            self._begin(step, None)
            saved = self._finish(wait=True)
        return saved.folder if saved is not None else None

    def finish(self) -> None:
        """Wait for the checkpoint that is still written in the background; raises as `after`."""
        with self.run.timed("save"):
            self._finish(wait=True)

    def _ending(self, due: str | None) -> str | None:
        """The reason why the run cannot make another step; None: it can."""
        if self.run.preemption.requested is not None:
            return f"the run was told to end ({self.run.preemption.requested})"
        if due == "deadline":
            return f"trainer.max_run_minutes={self.trainer.max_run_minutes:g} would be over with another step"
        return None

    def _begin(self, step: int, best: float | None) -> None:
        """Begin a checkpoint: write the controller's state, and have the ranks copy (in the background) or write theirs.

        best: this step's value if it is the best so far.
        """
        begun, previous_best = time.perf_counter(), self.best.value
        with self._may_fail(step, previous_best), self.run.store.building(step) as partial:
            self.best.value = previous_best if best is None else best
            state = {name: part.state_dict() for name, part in self._all_parts().items()}
            (partial / STATE_FILE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
            shutil.copyfile(self.run.folder / CONFIG_FILE, partial / CONFIG_FILE)
            for name, own in self.folders.items():
                (partial / name).mkdir()
                own.save(partial / name)
            if self.trainer.save_hf:
                with self.held("export"):
                    self.export(partial / HF_FOLDER)
            for role in self.groups:
                (partial / role).mkdir()
            for role, group in self.groups.items():
                folder = str(partial / role)
                with self.held(f"save_{role}"):
                    self.run.wait(group.call("begin_save", folder, role, background=self.trainer.async_save))
            self._unfinished = Unfinished(
                step, partial, best is not None, previous_best, begun, time.perf_counter() - begun
            )

    def _finish(self, *, wait: bool) -> Checkpoint | None:
        """Commit the unfinished checkpoint; without `wait` only if all its files are written."""
        saving = self._unfinished
        if saving is None or not (wait or self._is_written()):
            return None
        self._unfinished, begun = None, time.perf_counter()
        with self._may_fail(saving.step, saving.previous_best), self.run.store.discarding(saving.partial):
            files = self._written()
            files |= {name: None for name in _files_in(saving.partial) if name not in files}
            facts = {"step": saving.step, "best": saving.better}
            checkpoint = self.run.store.commit(saving.step, saving.partial, files, facts)
            if saving.better:
                self.run.store.mark_best(saving.step)
            now = time.perf_counter()
            # Background writing, too: a run that ends waits for all of it.
            self.schedule.saved(now - saving.begun)
            self.run.say(
                f"checkpoint: {checkpoint.folder} ({checkpoint.manifest.num_bytes / 1e6:,.1f} MB in "
                f"{now - saving.begun:.1f} s, of which the run waited {saving.seconds + now - begun:.1f} s)"
            )
            return checkpoint
        return None

    def _written(self) -> dict[str, FileFacts | None]:
        """The files of all ranks, by path; raises a failure after all roles have ended saving, the first that is not of files if there is one."""
        files: dict[str, FileFacts | None] = {}
        failure: WorkerFailed | None = None
        for role, group in self.groups.items():
            try:
                results = self.run.wait(group.call("finish_save", role))
            except WorkerFailed as error:
                if failure is None or (_is_of_files(failure) and not _is_of_files(error)):
                    failure = error
                continue
            for written in results:
                files |= {f"{role}/{name}": facts for name, facts in written.items()}
        if failure is not None:
            raise failure
        return files

    def _is_written(self) -> bool:
        calls = [ref for role, group in self.groups.items() for ref in group.call("is_saved", role)]
        return all(self.run.wait(calls))

    @contextmanager
    def _may_fail(self, step: int, previous_best: float | None) -> Iterator[None]:
        """Turn a file system error, here or in a rank, into the run's end or a warning, and restore the best value `previous_best`."""
        try:
            yield
        except (OSError, WorkerFailed) as error:
            self.best.value = previous_best
            of_files = _is_of_files(error)
            stops = self.trainer.on_save_error == "stop"
            if of_files and stops:
                self.run.say(
                    f"step {step}: no checkpoint, and the run ends (trainer.on_save_error=stop); older ones are as they were"
                )
            if stops or not of_files:
                raise
            self.run.say(
                f"Warning: step {step}: no checkpoint, the run goes on (trainer.on_save_error): {error}"
            )

    def _all_parts(self) -> dict[str, Stateful]:
        return {**self.parts, "best": self.best, "schedule": self.schedule}


def _is_of_files(error: OSError | WorkerFailed) -> bool:
    """Whether a checkpoint could not be written; else a process is at fault, or its code."""
    if isinstance(error, WorkerFailed):
        # Megarl's own TimeoutErrors have no error number, and are of processes that wait for each other.
        timed_out = error.kind == "TimeoutError" and error.message.startswith(f"[Errno {errno.ETIMEDOUT}]")
        return timed_out or error.kind in _FILE_ERRORS
    return not isinstance(error, RunFailure)  # WaitTimeout is an OSError, too


def _files_in(folder: Path) -> list[str]:
    """Paths of all files in a folder, relative to it."""
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]


def open_store(
    trainer: SavingConfig, folder: Path, say: Callable[[str], None], console: Console | None = None
) -> CheckpointStore:
    """The checkpoints in `folder`, kept as the trainer's keys say; a context manager.

    Args:
        console: shows the progress of work that takes a while.

    Raises:
        ValueError: another run writes there, or trainer.checkpoint_url cannot be used.
    """
    keep = Keep(trainer.max_ckpt_to_keep, trainer.keep_every, best=trainer.best_metric is not None)
    return CheckpointStore(folder, keep, trainer.checkpoint_url, say, console=console)


def _require_steps(found: Checkpoint, total_steps: int | None, say: Callable[[str], None]) -> None:
    """ValueError: the run has fewer steps than its checkpoint has made."""
    if total_steps is None or found.step < total_steps:
        return
    if found.step > total_steps:
        raise ValueError(
            f"{found.folder} is of step {found.step}, and the run ends with step {total_steps} (trainer.total_training_steps or "
            "total_epochs): set more steps, or trainer.resume_mode=disable to begin anew"
        )
    say(f"all {total_steps} steps are made: nothing is left to train, and the model is exported again")


def find_resumed(
    config: TrainConfig | TuningConfig,
    store: CheckpointStore,
    say: Callable[[str], None],
    total_steps: int | None = None,
    verify: Verify = changed_files,
    console: Console | None = None,
) -> Checkpoint | None:
    """The checkpoint that a run continues from, as `trainer.resume_mode` says; prints the keys that have changed since.

    Files in the run folder that do not belong to this run's history are moved aside: later checkpoints, or all files of an earlier run
    if this one continues from none of its checkpoints.

    Args:
        config: resolved.
        total_steps: of the run; None: its end is not known.
        verify: reads a checkpoint's files.
        console: shows the progress of that for the checkpoint of `trainer.resume_from_path`.

    Raises:
        ValueError: the checkpoint is damaged, was saved with another value of a fixed key or another model, or is of a step after
            the run's last one; the run reads files of the earlier run that would be moved.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        found = None
    elif trainer.resume_mode == "path":
        assert trainer.resume_from_path is not None, "checked: trainer.resume_from_path"
        found = read_checkpoint(trainer.resume_from_path)
        damage = find_damage(found, console=console, verify=verify)
        if damage:
            raise ValueError(f"trainer.resume_from_path={trainer.resume_from_path}: {shortened(damage)}")
    else:
        found = store.newest_good(verify=verify)
    if found is not None:
        refused = refusals(config, found.folder)
        if refused:
            raise ValueError("\n  ".join([f"the run cannot go on from {found.folder}:", *refused]))
        _require_steps(found, total_steps, say)
        say(f"going on from step {found.step}: {found.folder}")
        for key, (before, after) in changed_keys(config, found.folder / CONFIG_FILE).items():
            say(f"  changed since: {key}: {before!r} -> {after!r}")
    # A checkpoint from elsewhere begins a new history in this folder, as a new run does.
    if found is not None and found.folder.resolve().parent == store.root.resolve():
        last = found.step
        move_checkpoints(store.root, last + 1, None, say)
    else:
        last = -1
        set_aside_earlier_run(config, say)
    store.abandon_later(last)  # in the remote store, and as the best checkpoint
    return found
