"""Rollout engines that died or hang are started anew, while the models that are trained stay as they are.

A new engine gets the current version of the weights, verified as ever, before it serves anything. Trajectories that had not
come are asked for again (`rollouts.generate`): their noise depends on seed and uid, so they come out as they would have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl.cluster import WorkerLost

if TYPE_CHECKING:
    from megarl.cluster import WorkerGroup
    from megarl.trainer.roles.device_memory import DeviceMemory
    from megarl.trainer.run.run import Run

KEY = "actor_rollout_ref.rollout.max_restarts"


@dataclass
class EngineRestarts:
    """Replaces lost engines, at most `max_restarts` times in a run.

    Attributes:
        memory: of the devices that the engines may share.
        connect: tells all engines anew where weights come from.
        sync: gives all engines the weights of the actor as a version.
        version: the one that they serve; None: none was synced yet.
        key: what `max_restarts` is called in the configuration.
        hung: ranks of engines that live, but do not answer any more.
        count: restarts so far.
        lacks_weights: whether one was started anew since all were given weights: it has none.
    """

    run: Run
    engines: WorkerGroup
    max_restarts: int
    memory: DeviceMemory
    connect: Callable[[], object]
    sync: Callable[[int], object]
    version: int | None = None
    key: str = KEY
    hung: set[int] = field(default_factory=set)
    count: int = 0
    lacks_weights: bool = False

    def note(self, failure: WorkerLost) -> None:
        """Remember whom to replace; raises the failure if it is not an engine's, or one too many."""
        if failure.role != self.engines.role or self.count >= self.max_restarts:
            raise failure
        self.hung.add(failure.rank)

    def replace_lost(self, failure: WorkerLost | None = None) -> None:
        """Start all engines anew that have ended or hang; they hold no weights yet.

        Args:
            failure: how that was noticed, if by one.

        Raises:
            RuntimeError: it is one too many, or one does not come up.
            WorkerLost: the failure; it is not an engine's, or one too many.
        """
        if failure is not None:
            self.note(failure)
        while ranks := self.lost():
            try:
                self._replace(ranks)
            except WorkerLost as failure:  # yet another
                self.note(failure)

    def revive(self, failure: WorkerLost) -> None:
        """In the middle of a generation: replace the engine that is lost, and have all serve what they served."""
        self.note(failure)
        assert self.version is not None, "engines generate with synced weights"
        self.renew(self.version)

    def serve_all(self) -> None:
        """Before a generation goes on: have all serve what they served, also those that were replaced when nobody generated."""
        while self.lacks_weights:
            assert self.version is not None, "engines generate with synced weights"
            self.renew(self.version)

    def renew(self, version: int) -> None:
        """Replace the engines that are lost, and have all serve the actor's weights, which are `version`."""
        self.replace_lost()
        with self.memory.held("sync"):
            self.sync(version)
            self.served(version)
        with self.memory.held("generate"):
            pass  # the caller goes on with it

    def served(self, version: int) -> None:
        """Note that all engines have a version of the weights."""
        self.version, self.lacks_weights = version, False

    def lost(self) -> list[int]:
        """Ranks of engines that have ended or hang."""
        dead = {process.rank for process in self.engines.processes if process.is_dead}
        return sorted(dead | self.hung)

    def _replace(self, ranks: list[int]) -> None:
        self.memory.make_room(self.engines)
        for rank in ranks:
            processes = self.engines.processes_of(rank)
            process = next((process for process in processes if process.is_dead), processes[0])
            if self.count >= self.max_restarts:
                raise RuntimeError(
                    f"{process} is lost, and {self.key}={self.max_restarts} engines have been started anew already; "
                    f"its log: {process.log_path}"
                )
            self.count += 1
            what = f"{process} is lost: starting it anew, {self.count} of {self.max_restarts} times"
            with self.run.status(what):
                starts, self.lacks_weights = self.engines.restart(rank), True
                self.hung.discard(rank)
                self.run.wait(starts)
        self.memory.join(self.engines, ranks)
        self.connect()


@dataclass(frozen=True)
class DeferredRestarts:
    """The same while the actor learns: a new engine waits until it has, and all then serve what it has learnt.

    Attributes:
        ask: has something done when learning is over; returns when it is done.
        version: that of the actor's weights by then.
    """

    restarts: EngineRestarts
    ask: Callable[[Callable[[], object]], None]
    version: int

    @property
    def engines(self) -> WorkerGroup:
        return self.restarts.engines

    def revive(self, failure: WorkerLost) -> None:
        """As `EngineRestarts.revive`; raises the failure at once if it cannot be."""
        self.restarts.note(failure)
        self.ask(lambda: self.restarts.renew(self.version))

    def serve_all(self) -> None:
        """As `EngineRestarts.serve_all`."""
        while self.restarts.lacks_weights:
            self.ask(lambda: self.restarts.renew(self.version))

    def replace_lost(self, failure: WorkerLost | None = None) -> None:
        """As `EngineRestarts.replace_lost`."""
        if failure is not None:
            self.restarts.note(failure)
        if self.restarts.lost():
            self.ask(self.restarts.replace_lost)
