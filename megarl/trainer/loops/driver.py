"""The loop that all commands share: steps and their metrics, validations, health, checkpoints, and the end.

    with run.step                  seconds and metrics, logged at its end
        guard: the step's work     a number that is not finite ends the step or the run
        validate                   every `test_freq` steps, and after the last; in other steps poll: results of one that training did not wait for
        memory, check              what the devices held; the run's health
    made                           with all metrics, before the checkpoint
    checkpoints.after              if one is due, or the run is told to end

Each loop defines the work of a step: `ppo`, `offline`, `supervised` (SFT, reward models, DPO), and a program's loop (`megarl.api`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from megarl.config import TrainConfig
from megarl.data.loader import BatchLoader
from megarl.trainer.health.monitor import HealthMonitor, start_monitor, watch, watch_validation
from megarl.trainer.roles.device_memory import DeviceMemory
from megarl.trainer.roles.roles import policy_checkpoints
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.checkpoints import Checkpoints, InFolder, Stateful
from megarl.trainer.run.preemption import BEFORE_THE_FIRST_STEP, REQUEUE
from megarl.trainer.run.run import Run
from megarl.trainer.stages.advantages import Controls, make_controls
from megarl.trainer.stages.nonfinite import finite_step

Metrics = dict[str, float]
Work = Callable[[int, Metrics], pa.Table | None]
"""A step's work: given its number, it adds its metrics, and returns the batch that was trained on, for `check` (None: no check)."""


def epochs(loader: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Batches, epoch after epoch, without end."""
    while True:
        yield from loader


def due(freq: int, step: int, last: int | None = None) -> bool:
    """Whether something is due after `step`: every `freq` steps and after the `last`; never with -1."""
    return freq > 0 and (step % freq == 0 or step == last)


@dataclass(frozen=True)
class Driver:
    """Makes the steps of a run.

    Attributes:
        last: the last step; None: it is not known.
        guard: a context manager around a step's work, given the step and its metrics.
        validate: metrics of held-out data after a step; None: there is none.
        poll: in steps without a validation: metrics of one that began in an earlier step.
        memory: reports the memory of the devices.
        check: metrics of a step's health, given the step, its metrics and its batch.
        check_validation: called with a step that its guard has ended and the metrics of the validation after it, in place of `check`.
        made: called with a step's metrics after they are logged.
        checkpoints: None: none are written.
        stopped: whether the run ends before its last step.
    """

    run: Run
    last: int | None = None
    guard: Callable[[int, Metrics], AbstractContextManager[None]] = lambda step, metrics: nullcontext()
    validate: Callable[[int], Metrics] | None = None
    poll: Callable[[int], Metrics] = lambda step: {}
    test_freq: int = -1
    memory: DeviceMemory | None = None
    check: Callable[[int, Metrics, pa.Table], Metrics] = lambda step, metrics, batch: {}
    check_validation: Callable[[int, Metrics], None] = lambda step, metrics: None
    made: Callable[[int, Metrics], None] = lambda step, metrics: None
    checkpoints: Checkpoints | None = None
    stopped: Callable[[], bool] = lambda: False

    def drive(self, steps: Iterable[int], work: Work) -> None:
        """Make steps until the run is stopped; the checkpoint that it continues from may stop it before the first step.

        Raises:
            SystemExit: the run was told to end while its models started (REQUEUE); also as `make`.
        """
        if self.run.preemption.requested is not None:
            self.run.say(BEFORE_THE_FIRST_STEP)
            raise SystemExit(REQUEUE)
        for step in steps:
            if self.stopped():
                break
            self.make(step, work)

    def make(self, step: int, work: Work) -> Metrics:
        """Make one step; returns its metrics.

        Raises:
            Exceptions of the work, of `guard` and of `Checkpoints.after`.
        """
        batch, validation = None, {}  # the first stays so where the guard ends the step
        with self.run.step(step) as metrics:
            with self.guard(step, metrics):
                batch = work(step, metrics)
            if due(self.test_freq, step, self.last):
                validation = self.add_validation(step, metrics)
            else:
                metrics |= self.poll(step)
            if self.memory is not None:
                metrics |= self.memory.report()
            if batch is not None:
                metrics |= self.check(step, metrics, batch)
            elif validation:
                self.check_validation(step, validation)
        self.made(step, metrics)
        if self.checkpoints is not None:
            self.checkpoints.after(step, metrics, last=step == self.last or self.stopped())
        return metrics

    def add_validation(self, step: int, metrics: Metrics) -> Metrics:
        """Validate after `step`, add the metrics, and return them."""
        found: Metrics = {}
        if self.validate is not None:
            with self.run.timed("validate"):
                found = self.validate(step)
        metrics |= found
        return found


@dataclass(frozen=True)
class LearningState:
    """The state of a policy's training that changes from step to step, and the checkpoints that it is a part of.

    Attributes:
        ptx_batches: batches of the auxiliary language-model loss; None: there is none.
    """

    controls: Controls
    monitor: HealthMonitor
    ptx_batches: Iterator[pa.Table] | None
    checkpoints: Checkpoints

    @classmethod
    def start(
        cls,
        config: TrainConfig,
        run: Run,
        roles: Roles,
        num_steps: int,
        ptx: BatchLoader | None,
        parts: Mapping[str, Stateful] = {},
        folders: Mapping[str, InFolder] = {},
    ) -> LearningState:
        """The state before the first step. `parts`, `folders`: further parts of a checkpoint (see `Checkpoints`)."""
        controls = make_controls(config.algorithm, config.actor_rollout_ref.actor, num_steps)
        monitor = start_monitor(run, config, controls)
        every = {"controls": controls, "monitor": monitor, **parts, "ptx": ptx}
        checkpoints = policy_checkpoints(config, run, roles, every, folders)
        return cls(controls, monitor, epochs(ptx) if ptx is not None else None, checkpoints)

    def driver(
        self,
        config: TrainConfig,
        run: Run,
        roles: Roles,
        last: int | None = None,
        validate: Callable[[int], Metrics] | None = None,
        poll: Callable[[int], Metrics] = lambda step: {},
    ) -> Driver:
        """The driver of a policy's training."""
        return Driver(
            run,
            last,
            guard=partial(finite_step, run, config.trainer.on_nonfinite, self.controls),
            validate=validate,
            poll=poll,
            test_freq=config.trainer.test_freq,
            memory=roles.memory,
            check=partial(watch, run, self.monitor),
            check_validation=partial(watch_validation, run, self.monitor),
            checkpoints=self.checkpoints,
            stopped=lambda: self.monitor.stop is not None,
        )
