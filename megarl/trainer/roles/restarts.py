"""Restarts of rollout engines that died or hang; the trained models are not touched.

A new engine gets the current version of the weights, verified as in every sync, before it serves requests. The lost engine's prompts
go back into the queue (stages/request_queue.py): the noise of their responses depends on seed and uid, so that they equal the lost ones.
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
        memory: the memory of the devices, which engines may share with models.
        connect: connects all engines to the actor's ranks again.
        sync: sends the actor's weights to all engines as a version.
        version: the version that the engines serve; None: none was synced yet.
        key: the configuration key of `max_restarts`.
        hung: ranks of engines that live but do not answer.
        count: restarts so far.
        lacks_weights: whether an engine was restarted since the last sync.
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
    come_late = False

    def note(self, failure: WorkerLost) -> None:
        """Remember an engine to replace; raises the failure if it is not of an engine, or exceeds `max_restarts`."""
        if failure.role != self.engines.role or self.count >= self.max_restarts:
            raise failure
        self.hung.add(failure.rank)

    def lose(self, failure: WorkerLost) -> list[int]:
        """As `note`; returns the ranks of all lost engines."""
        self.note(failure)
        return self.lost()

    def replace_lost(self, failure: WorkerLost | None = None) -> None:
        """Restart all engines that have ended or hang; the new ones hold no weights yet.

        Args:
            failure: the failure that showed the loss; None: there was none.

        Raises:
            WorkerLost: the failure, if it is not of an engine; or `max_restarts` is exceeded.
            WorkerFailed: a new engine does not start.
        """
        if failure is not None:
            self.note(failure)
        while ranks := self.lost():
            try:
                self._replace(ranks)
            except WorkerLost as failure:  # another engine is lost
                self.note(failure)

    def revive(self, failure: WorkerLost) -> None:
        """During generation: replace the lost engine, and sync the version that all engines served."""
        self.note(failure)
        assert self.version is not None, "engines generate with synced weights"
        self.renew(self.version)

    def serve_all(self) -> None:
        """Before generation continues: sync the served version if an engine was replaced since the last sync."""
        while self.lacks_weights:
            assert self.version is not None, "engines generate with synced weights"
            self.renew(self.version)

    def renew(self, version: int) -> None:
        """Replace lost engines, and sync the actor's weights, which are `version`, to all engines."""
        self.replace_lost()
        with self.memory.held("sync"):
            self.sync(version)
            self.served(version)
        with self.memory.held("generate"):
            pass  # the caller continues in this phase

    def served(self, version: int) -> None:
        """Record that all engines have a version of the weights."""
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
                self.run.refuse_loss(process, f"{self.count} engines were started anew already ({self.key})")
            self.count += 1
            what = f"{process} is lost: starting it anew, {self.count} of {self.max_restarts} times"
            with self.run.status(what):
                starts, self.lacks_weights = self.engines.restart(rank), True
                self.hung.discard(rank)
                self.run.wait(starts)
            self.memory.join(self.engines, [rank])  # before the next one, which may not start
        self.connect()


@dataclass(frozen=True)
class DeferredRestarts:
    """Restarts while the actor learns: a new engine comes after the updates; where no engine is left, all then serve the updated
    weights.

    Attributes:
        ask: runs a call in the main thread once learning is over; returns after it.
        version: the version of the actor's weights by then.
    """

    restarts: EngineRestarts
    ask: Callable[[Callable[[], object]], None]
    version: int
    come_late = True

    @property
    def engines(self) -> WorkerGroup:
        return self.restarts.engines

    def lose(self, failure: WorkerLost) -> list[int]:
        """As `EngineRestarts.lose`."""
        return self.restarts.lose(failure)

    def revive(self, failure: WorkerLost) -> None:
        """As `EngineRestarts.revive`; raises the failure at once if the engine cannot be replaced."""
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
