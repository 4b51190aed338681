"""The batch of a step: collected when the step begins, or while the models learn from the batch before it (`trainer.mode`).

    sync            step k: weights after k - 1 updates into the engines, collect batch k; learn from it
    one_step_off    step k: weights after k - 1 updates into the engines; collect batch k + 1 while the models learn from batch k

Guarantees of one_step_off:
- The prompts of a batch, the noise and the weights of its responses, and the scores that a sampler knows by then depend on the
  step alone, not on whether collecting or learning is faster.
- A checkpoint of step k has the complete batch k + 1. A run that continues from it equals the one that saved it.
- A failure of collecting or of learning ends both, with one report.
- An engine that is lost while the models learn is restarted after the actor's updates. The others answer its prompts, with the weights
  that all had; where none is left, all then serve the updated weights as the next version, and answer what is missing with these.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from megarl.config import TrainConfig
from megarl.data.files import read_arrow, write_arrow
from megarl.trainer.roles.types import Roles
from megarl.trainer.roles.weight_sync import sync_weights
from megarl.trainer.run.checkpoints import InFolder
from megarl.trainer.run.run import Run
from megarl.trainer.schedule.concurrent_views import Background, View, in_background
from megarl.trainer.stages.given_responses import own_rows
from megarl.trainer.stages.groups import Groups
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.stages.saved_trajectories import check_sizes
from megarl.trainer.stages.scoring import Rewards

_TABLE, _SCORES, _STATE = "batch.arrow", "scores.arrow", "state.json"


@dataclass(frozen=True)
class Collected:
    """A step's batch.

    Attributes:
        table: its trajectories, scored.
        prompt_uids, scores: of every trajectory that was generated for it (`Groups.prompt_scores`).
        metrics: the metrics of collecting it.
        problem: which number of it is not finite; None: no such number is known.
    """

    step: int
    table: pa.Table
    prompt_uids: list[str]
    scores: np.ndarray
    metrics: dict[str, float]
    problem: str | None = None


class Collect(Protocol):
    """`ppo.collect`, or `ppo.answer` with the engines' current weights, with configuration and prompts already bound."""

    def __call__(
        self, run: Run, roles: Roles, rewards: Rewards, step: int
    ) -> tuple[Groups, dict[str, float]]: ...


@dataclass
class Batches(ABC):
    """The source of the loop's batches."""

    config: TrainConfig
    run: Run
    roles: Roles
    rewards: Rewards

    @abstractmethod
    def of(self, step: int) -> Collected:
        """The step's batch.

        Raises:
            NotFinite: a number of it is not finite.
        """

    @contextmanager
    def during_learning(self, step: int) -> Iterator[View]:
        """A context manager around the learning part of a step, which gives the view of (run, roles) for it."""
        yield self.run, self.roles

    @property
    def folders(self) -> Mapping[str, InFolder]:
        """Its parts of a checkpoint that have files, by the name of their folder."""
        return {}


@dataclass
class Synchronous(Batches):
    """Collects a step's batch when the step begins."""

    collect: Collect

    def of(self, step: int) -> Collected:
        groups, metrics = self.collect(self.run, self.roles, self.rewards, step)
        return Collected(step, groups.batch(), *groups.prompt_scores(), metrics)


@dataclass
class OneStepOff(Batches):
    """Collects the next step's batch while the models learn.

    Attributes:
        last_step: the last step that a batch is collected for.
        collect: collects with the newest weights, for the first step of a run.
        answer: collects with the weights that the engines hold.
        ahead: the batch that was collected ahead; None: there is none.
    """

    last_step: int
    collect: Collect
    answer: Collect
    ahead: Collected | None = None

    def of(self, step: int) -> Collected:
        """As `Batches.of`; its metrics have the number of versions between the weights of its trajectories and the trained ones."""
        found, self.ahead = self.ahead, None
        if found is None:
            groups, metrics = self.collect(self.run, self.roles, self.rewards, step)
            found = Collected(step, groups.batch(), *groups.prompt_scores(), metrics)
        assert found.step == step, f"the batch of step {found.step} in step {step}"
        if found.problem is not None:
            raise NotFinite(found.problem, found.table)
        behind = step - own_rows(found.table)["weight_version"].to_numpy()
        if not len(behind):  # all responses are given
            return found
        staleness = {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}
        return replace(found, metrics=found.metrics | staleness)

    @contextmanager
    def during_learning(self, step: int) -> Iterator[View]:
        """Collect batch `step + 1` during the block, with the weights from its beginning.

        Raises:
            The exceptions of collecting, at the next call that the block waits for.
        """
        if step >= self.last_step:
            yield self.run, self.roles
            return
        with self.roles.memory.phase("sync"):
            synced = sync_weights(self.run, self.roles, version=step)
        ahead = partial(self._collect_ahead, step + 1, synced)
        goes_on = self.config.trainer.on_nonfinite == "skip"
        with in_background(
            self.run, self.roles, step, "collect-ahead", ahead, self._take, goes_on
        ) as learner:
            yield learner

    @property
    def folders(self) -> Mapping[str, InFolder]:
        return {"ahead": self}

    def save(self, folder: Path) -> None:
        """Write the batch that was collected ahead: its trajectories, its prompts' scores, its metrics."""
        found, state = self.ahead, {}
        if found is not None:
            write_arrow(found.table, folder / _TABLE)
            scores = pa.table({"prompt_uid": pa.array(found.prompt_uids, pa.string()), "score": found.scores})
            write_arrow(scores, folder / _SCORES)
            state = {"step": found.step, "metrics": found.metrics, "problem": found.problem}
        (folder / _STATE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue with a saved batch.

        Raises:
            ValueError: its sizes are not those of this configuration.
        """
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        if not state:
            self.ahead = None
            return
        table, scores = read_arrow(folder / _TABLE), read_arrow(folder / _SCORES)
        if state["problem"] is None:
            check_sizes(table, folder / _TABLE, self.config.data, self.config.actor_rollout_ref.rollout.n)
        self.ahead = Collected(
            state["step"],
            table,
            scores["prompt_uid"].to_pylist(),
            scores["score"].to_numpy(),
            state["metrics"],
            state["problem"],
        )

    def _collect_ahead(self, step: int, synced: dict[str, float], view: View) -> Collected:
        run, roles = view
        with run.timed("ahead", {"for_step": step}):
            try:
                groups, metrics = self.answer(run, roles, replace(self.rewards, run=run), step)
            except NotFinite as found:  # reported by the step that the batch is for
                return Collected(step, found.batch, [], np.empty(0), {}, str(found))
            return Collected(step, groups.batch(), *groups.prompt_scores(), synced | metrics)

    def _take(self, background: Background[Collected], collector: Run, learner: Run) -> None:
        """Wait for the batch, and add the seconds of collecting it to those of the step.

        `ahead_wait`: seconds that the main thread waited for it; `ahead_overlap`: the other seconds of collecting it.
        """
        run, seconds = self.run, collector.seconds
        with run.timed("ahead_wait"):
            self.ahead = background.result(look=lambda: learner.wait([]))
        run.seconds |= {
            name if name == "ahead" else f"ahead/{name}": value for name, value in seconds.items()
        }
        run.seconds["ahead_overlap"] = max(0.0, seconds["ahead"] - run.seconds["ahead_wait"])
