"""When validations are made: within their step, or while training goes on (`trainer.eval_mode`).

    blocking     step k: updates; weights into the engines of the rollouts, answers, scores: results are metrics of step k
    concurrent   step k: updates; weights into engines of their own ──► a thread: answers, scores
                 step k + 1, k + 2, ... go on                               │ results of step k
                 the end of the step in which they come: they are logged ◄──┘

A blocking run that is told to end saves before a validation that is due: it is made after the last step, or by the run that continues.

Guarantees of `concurrent`, each asserted by a test:
- Results are logged once, as those of the step whose weights they used, and equal those of a blocking validation after that step.
- Training waits for a sync alone; and, when a validation is due, for the one before it (`timing_s/validate_wait`).
- A validation that fails ends the run at the end of a step, as a blocking one does.
- The prompts of an engine that is lost go to the others. Where none is left, or the run ends before the results, the weights may be gone:
  the newest ones are validated instead, as those of their own step. Where these are the same weights, nothing differs.
- A run ends after its last validation. One that is told to end does not wait: the run that continues repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa

from megarl.cluster import WorkerGroup, WorkerLost
from megarl.config import TrainConfig, validates_concurrently
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import Blocks
from megarl.rewards.processes.scorer import make_scorer
from megarl.trainer.roles.restarts import EngineRestarts
from megarl.trainer.roles.types import Roles
from megarl.trainer.roles.weight_sync import sync_eval_weights
from megarl.trainer.run.logger import METRICS_FILE, read_metrics
from megarl.trainer.run.run import Run
from megarl.trainer.schedule.concurrent_views import Background, InterruptedWatch, RunView
from megarl.trainer.stages.scoring import Rewards
from megarl.trainer.stages.validation import ValidationSet, validate

Metrics = dict[str, float]
PREFIX, SCORE = "val/", "val/score/mean"  # of the metrics of a validation, and one that each has
THREAD, PHASE = "validation", "eval"
_REPEATED = "it is repeated with the weights of step {}, as the validation after that"


@dataclass(frozen=True)
class Validated:
    """The results of a validation.

    Attributes:
        answers: scored, by `ValidationSet.file`.
    """

    step: int
    metrics: Metrics
    answers: dict[str, pa.Table]


@dataclass
class Validations:
    """The validations of a run; here those that are made within their step.

    Attributes:
        blocking: validates after a step, which was just made, and returns the metrics.
        learnt: given the step and the metrics of each validation that ends after its step, also of one that was logged before the run
            continued.
        open: the step of a validation whose results have not come; None: there is none.
    """

    run: Run
    blocking: Callable[[int], Metrics]
    learnt: Callable[[int, Metrics], None]
    open: int | None = field(default=None, init=False)

    def begin(self, step: int) -> Metrics:
        """Validate, or begin to, after a step that was just made; returns metrics of that step.

        A run that is told to end saves first, because it may be killed during a validation: the run that continues makes it, or `finish`.
        """
        if self.run.preemption.requested is not None:
            self.open = step
            return {}
        return self.blocking(step)

    def poll(self, step: int) -> Metrics:
        """At the end of a step without a validation of its own: report results that have come; returns metrics of this step."""
        return {}

    def resume(self, done: int) -> None:
        """To be called once the checkpoint of step `done`, from which the run continues, was loaded: repeats a validation whose results were
        not logged."""
        step, self.open = self.open, None
        if step is None:
            return
        file = self.run.folder / METRICS_FILE
        rows = read_metrics(file) if file.is_file() else []
        logged = next((row for row in rows if row["step"] == step and SCORE in row), None)
        if logged is not None:
            self.learnt(step, {name: value for name, value in logged.items() if name.startswith(PREFIX)})
            return
        self.run.say(f"the validation after step {step} had not ended: {_REPEATED.format(done)}")
        self._repeat(done)

    def finish(self) -> None:
        """To be called at the end of the run, once its last checkpoint is written: makes a validation that is left."""
        step, self.open = self.open, None
        if step is not None:
            self._repeat(step)

    def abandon(self) -> None:
        """The results of a validation in progress, or of one to be repeated, are lost."""
        self.open = None

    def state_dict(self) -> dict[str, Any]:
        return {"open": self.open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.open = state["open"]

    def _repeat(self, step: int) -> None:
        assert self.run.logger is not None
        with self.run.timed("validate"):
            metrics = self.blocking(step)
        self.run.logger.log_late(step, metrics, {})
        self.learnt(step, metrics)


class EnginesLost(Exception):
    """No engine is left that has the weights of a validation."""


class _ToldToEnd(Exception):
    """The run was told to end, so that it does not wait for a validation."""


@dataclass(frozen=True)
class NoRestarts:
    """In the thread of a validation nothing is restarted, because the actor may have other weights by then."""

    restarts: EngineRestarts
    come_late = True

    @property
    def engines(self) -> WorkerGroup:
        return self.restarts.engines

    def lose(self, failure: WorkerLost) -> list[int]:
        """As `EngineRestarts.lose`; an engine that hangs is ended, so that no later call waits for it."""
        ranks = self.restarts.lose(failure)
        for rank in self.restarts.hung:
            self.engines.end(rank)
        return ranks

    def revive(self, failure: WorkerLost) -> None:
        """Raises EnginesLost, because no other engine is left."""
        raise EnginesLost(str(failure)) from failure

    def serve_all(self) -> None:
        """Does nothing: all engines that are left have the weights."""

    def replace_lost(self, failure: WorkerLost | None = None) -> None:
        """Does nothing: the next validation begins with it."""


Answer = Callable[[Run, Rewards, int], tuple[dict[str, pa.Table], Metrics]]
"""Validates after a step, with a view of the run and rewards of its own; returns scored answers and metrics (`validate`)."""


@dataclass
class ConcurrentValidations(Validations):
    """Validations in a thread, one at a time, with engines and reward processes of their own.

    Attributes:
        rewards: with a scorer and a tokenizer that nothing else uses.
        report: given the results of each validation, in the main thread.
    """

    roles: Roles
    rewards: Rewards
    answer: Answer
    report: Callable[[Validated], None]
    _background: Background[Validated] | None = field(default=None, init=False)

    def begin(self, step: int) -> Metrics:
        """As `Validations.begin`, after the validation before it; returns when the engines have the weights. A run that is told to end begins
        none: the run that continues does."""
        try:
            self._refuse_if_ending()
            if self.open is not None:
                with self.run.timed("validate_wait"):
                    self._take(f"that after step {step} takes its place")
        except _ToldToEnd:
            self.abandon()
            self.open = step
            return {}
        return self._start(step)

    def poll(self, step: int) -> Metrics:
        if self.open is None or self._background is None or not self._background.is_done:
            return {}
        if self._take(_REPEATED.format(step)):
            return {}
        with self.run.timed("validate"):
            return self._start(step)

    def finish(self) -> None:
        """Wait for the last validation, and report it; a run that is told to end does not."""
        while (step := self.open) is not None:
            last = self.run.at_step if self.run.at_step is not None else step
            try:
                self._refuse_if_ending()
                with self.run.status(f"waiting for the validation after step {step}"):
                    taken = self._take(_REPEATED.format(last))
            except _ToldToEnd:
                self.abandon()
                self.run.say(f"the run was told to end: the validation after step {step} is left out")
                return
            if not taken:
                self._start(last)

    def abandon(self) -> None:
        """As `Validations.abandon`; ends the thread."""
        super().abandon()
        background, self._background = self._background, None
        if background is not None:
            background.end()

    def _repeat(self, step: int) -> None:
        self._start(step)

    def _start(self, step: int) -> Metrics:
        with self.roles.memory.held("eval_sync"):
            synced = sync_eval_weights(self.run, self.roles, step + 1)
        self.open, self._background = step, Background(THREAD)
        self._background.start(partial(self._validate, self._view(self._background, step), step))
        return synced

    def _refuse_if_ending(self) -> None:
        if self.run.preemption.requested is not None:
            raise _ToldToEnd

    def _look(self) -> None:
        self.run.wait([])
        self._refuse_if_ending()

    def _take(self, remedy: str) -> bool:
        """Wait for the results, and report them; returns False if they were lost with the engines.

        remedy: for the user, what is done about the loss.
        """
        assert self._background is not None
        step, self.open = self.open, None
        try:
            found = self._background.result(self._look)
        except EnginesLost as lost:
            self.run.say(f"the validation after step {step} has lost its engines: {remedy}. {lost}")
            return False
        self.report(found)
        self.learnt(found.step, found.metrics)
        return True

    def _validate(self, view: Run, step: int) -> Validated:
        with view.timed(PHASE, {"for_step": step}):
            try:
                answers, metrics = self.answer(view, replace(self.rewards, run=view), step)
            except EnginesLost:  # the answers that came have uids that the repeated validation uses again
                self.rewards.scorer.give_up()
                raise
        seconds = {
            name if name == PHASE else f"{PHASE}/{name}": taken for name, taken in view.seconds.items()
        }
        return Validated(
            step,
            {
                **{f"{PREFIX}{name}": value for name, value in metrics.items()},
                **{f"timing_s/{name}": taken for name, taken in seconds.items()},
            },
            answers,
        )

    def _view(self, background: Background[Validated], step: int) -> Run:
        """The run as the thread sees it: it watches its own engines, ends when it is told to, and times its own phases."""
        run, own = self.run, self.roles.eval
        assert run.watch is not None and own is not None
        return RunView.of(
            run,
            own_groups=[own.group],
            watch=InterruptedWatch(run.watch.idle_timeout, run.watch.cluster, background.obey),
            check=background.obey,
            seconds={},
            phases=[],
            other_phases=run.phases,
            restarts=NoRestarts(own.restarts) if own.restarts.max_restarts else None,
            spares=[],
            blocks=Blocks(),
            at_step=step,
        )


@contextmanager
def open_validations(
    config: TrainConfig,
    run: Run,
    roles: Roles,
    sets: Sequence[ValidationSet],
    blocking: Callable[[int], Metrics],
    report: Callable[[Validated], None],
    learnt: Callable[[int, Metrics], None],
) -> Iterator[Validations]:
    """The validations of a run, as `trainer.eval_mode` says; one in progress at the end of the block is abandoned."""
    if not validates_concurrently(config):
        yield Validations(run, blocking, learnt)
        return
    model = config.actor_rollout_ref.model
    with make_scorer(config) as scorer:
        rewards = Rewards(run, scorer, load_tokenizer(model.tokenizer_path, model.trust_remote_code))
        answer = partial(_answer, config, roles, sets)
        found = ConcurrentValidations(run, blocking, learnt, roles, rewards, answer, report)
        try:
            yield found
        finally:
            found.abandon()


def _answer(
    config: TrainConfig, roles: Roles, sets: Sequence[ValidationSet], view: Run, rewards: Rewards, step: int
) -> tuple[dict[str, pa.Table], Metrics]:
    assert roles.eval is not None
    data, when = config.data, f"validation after step {step}"
    return validate(
        view, roles.eval.group, sets, rewards, data.max_response_length, config.trainer.seed,
        data.val_batch_size, when, lambda: view.timed("generate"),
    )  # fmt: skip
