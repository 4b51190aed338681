"""What a step is trained on: collected when it begins, or while the models learn from the step before (`trainer.mode`).

    sync            step k: weights after k - 1 updates into the engines, collect batch k; learn from it
    one_step_off    step k: weights after k - 1 updates into the engines; collect batch k + 1, and meanwhile learn from batch k

Guarantees of one_step_off:
- Which prompts a batch has, with which noise and which weights they are answered, and what a sampler knows of scores by then,
  depends on the step alone, not on which half is the faster.
- A checkpoint of step k has batch k + 1, whole. A run that goes on from it is the one that saved it.
- A failure of either half ends both, with one report.
- An engine that is lost meanwhile is started anew when the actor has learnt; all engines then serve what it has learnt, as the
  next version, and the trajectories that had not come are generated with that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from megarl.config import TrainConfig
from megarl.data.files import read_arrow, write_arrow
from megarl.trainer.roles.restarts import DeferredRestarts
from megarl.trainer.roles.weight_sync import sync_weights
from megarl.trainer.schedule.concurrent_views import Background, make_views
from megarl.trainer.stages.groups import Groups
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.stages.saved_trajectories import check_sizes

if TYPE_CHECKING:
    from megarl.trainer.roles.types import Roles
    from megarl.trainer.run.checkpoints import InFolder
    from megarl.trainer.run.run import Run
    from megarl.trainer.stages.scoring import Rewards

_TABLE, _SCORES, _STATE = "batch.arrow", "scores.arrow", "state.json"


@dataclass(frozen=True)
class Collected:
    """A step's batch.

    Attributes:
        table: its trajectories, scored.
        prompt_uids, scores: of every trajectory that was generated for it (`Groups.prompt_scores`).
        metrics: of its collection.
        problem: what of it is not finite; None: nothing is known of such.
    """

    step: int
    table: pa.Table
    prompt_uids: list[str]
    scores: np.ndarray
    metrics: dict[str, float]
    problem: str | None = None


class Collect(Protocol):
    """A half that collects (`ppo.collect`, or `ppo.answer` with the weights that are there) but for its configuration."""

    def __call__(
        self, run: Run, roles: Roles, *, rewards: Rewards, step: int
    ) -> tuple[Groups, dict[str, float]]: ...


class Batches(Protocol):
    """Where the loop's batches come from."""

    def of(self, step: int) -> Collected:
        """The step's batch. NotFinite: a number of it is not."""
        ...

    def meanwhile(self, step: int) -> AbstractContextManager[tuple[Run, Roles]]:
        """A context manager, around the part of a step that learns: gives (run, roles) for it."""
        ...

    @property
    def folders(self) -> Mapping[str, InFolder]:
        """What of it belongs to a checkpoint."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """Collects a step's batch when it is asked for."""

    run: Run
    roles: Roles
    rewards: Rewards
    collect: Collect

    def of(self, step: int) -> Collected:
        groups, metrics = self.collect(self.run, self.roles, rewards=self.rewards, step=step)
        return Collected(step, groups.batch(), *groups.prompt_scores(), metrics)

    @contextmanager
    def meanwhile(self, step: int) -> Iterator[tuple[Run, Roles]]:
        yield self.run, self.roles

    @property
    def folders(self) -> Mapping[str, InFolder]:
        return {}


@dataclass
class OneStepOff:
    """Collects the next step's batch while the models learn.

    Attributes:
        last_step: after it nothing is collected.
        collect: with the newest weights; of a step whose batch was not collected before: a run's first one.
        answer: with the weights that the engines have.
        ahead: the batch that is there; None: there is none.
    """

    config: TrainConfig
    run: Run
    roles: Roles
    rewards: Rewards
    last_step: int
    collect: Collect
    answer: Collect
    ahead: Collected | None = None

    def of(self, step: int) -> Collected:
        """As `Batches.of`; its metrics say how many versions its trajectories' weights are behind those that are trained."""
        found, self.ahead = self.ahead, None
        if found is None:
            groups, metrics = self.collect(self.run, self.roles, rewards=self.rewards, step=step)
            found = Collected(step, groups.batch(), *groups.prompt_scores(), metrics)
        assert found.step == step, f"the batch of step {found.step} in step {step}"
        if found.problem is not None:
            raise NotFinite(found.problem, found.table)
        behind = step - found.table["weight_version"].to_numpy()
        staleness = {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}
        return replace(found, metrics=found.metrics | staleness)

    @contextmanager
    def meanwhile(self, step: int) -> Iterator[tuple[Run, Roles]]:
        """Collect batch `step + 1` with the weights as they are at the beginning of the block; it is there at its end.

        Raises:
            Whatever the collection raises, at the block's next look.
        """
        if step >= self.last_step:
            yield self.run, self.roles
            return
        with self.roles.memory.phase("sync"):
            synced = sync_weights(self.run, self.roles, version=step)
        background: Background[Collected] = Background("collect-ahead")
        assert self.roles.restarts is not None, "a run with engines"
        deferred = DeferredRestarts(self.roles.restarts, background.ask, version=step + 1)
        (run, roles), learner = make_views(self.run, self.roles, background, deferred)
        background.start(partial(self._collect_ahead, run, roles, step + 1, synced))
        try:
            try:
                yield learner
            except NotFinite:
                if self.config.trainer.on_nonfinite == "skip":  # the run goes on, with what is collected
                    self._take(background, learner[0], run.seconds)
                raise
            self._take(background, learner[0], run.seconds)
        except BaseException:
            background.end()
            raise

    @property
    def folders(self) -> Mapping[str, InFolder]:
        return {"ahead": self}

    def save(self, folder: Path) -> None:
        """Write the batch that is there: its trajectories, its prompts' scores, its metrics."""
        found, state = self.ahead, {}
        if found is not None:
            write_arrow(found.table, folder / _TABLE)
            scores = pa.table({"prompt_uid": pa.array(found.prompt_uids, pa.string()), "score": found.scores})
            write_arrow(scores, folder / _SCORES)
            state = {"step": found.step, "metrics": found.metrics, "problem": found.problem}
        (folder / _STATE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on with a batch that was saved. ValueError: it is not one of this configuration."""
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        if not state:
            self.ahead = None
            return
        table, scores = read_arrow(folder / _TABLE), read_arrow(folder / _SCORES)
        if state["problem"] is None:
            check_sizes(table, folder / _TABLE, self.config)
        self.ahead = Collected(
            state["step"],
            table,
            scores["prompt_uid"].to_pylist(),
            scores["score"].to_numpy(),
            state["metrics"],
            state["problem"],
        )

    def _collect_ahead(self, run: Run, roles: Roles, step: int, synced: dict[str, float]) -> Collected:
        with run.timed("ahead", {"for_step": step}):
            try:
                groups, metrics = self.answer(run, roles, rewards=replace(self.rewards, run=run), step=step)
            except NotFinite as found:  # the step's that it is for
                return Collected(step, found.batch, [], np.empty(0), {}, str(found))
            return Collected(step, groups.batch(), *groups.prompt_scores(), synced | metrics)

    def _take(self, background: Background[Collected], learner: Run, seconds: dict[str, float]) -> None:
        """Wait for the batch; the seconds of its collection become those of the step.

        `ahead_wait`: that the learning half waited for it; `ahead_overlap`: of its collection, those in which it did not.
        """
        run = self.run
        with run.timed("ahead_wait"):
            self.ahead = background.result(look=lambda: learner.wait([]))
        run.seconds |= {
            name if name == "ahead" else f"ahead/{name}": value for name, value in seconds.items()
        }
        run.seconds["ahead_overlap"] = max(0.0, seconds["ahead"] - run.seconds["ahead_wait"])
