"""A run: its folder, its cluster, its log, and the calls of its processes, with a report when one of them fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pyarrow as pa
import ray
from rich.console import Console

from megarl.checkpoints import Checkpoint, CheckpointStore
from megarl.cluster import (
    ResourcePool,
    RunFailure,
    WaitTimeout,
    Watch,
    WorkerGroup,
    WorkerLost,
    loss_of,
    wait,
    write_report,
)
from megarl.cluster.ranks import RankProcess
from megarl.cluster.report import stacks_of
from megarl.data.trajectories import REF_TOP_TOKENS, Blocks, write_trajectories
from megarl.rewards.processes.scorer import Scorer
from megarl.trainer.run.logger import RunLogger
from megarl.trainer.run.preemption import Preemption
from megarl.trainer.run.timeline import STEP, Timeline
from megarl.trainer.workers.dispatch import Plans
from megarl.util.spans import Facts as SpanFacts

PROFILES = "profiles"  # in the run folder: traces of torch's profiler


class Restarts(Protocol):
    """Restarts lost engines."""

    @property
    def engines(self) -> WorkerGroup:
        """All engines of the run."""
        ...

    def revive(self, failure: WorkerLost) -> None:
        """Replace an engine that was lost while it generated; raises the failure if it cannot be replaced."""
        ...

    def serve_all(self) -> None:
        """Give all engines the weights that they served before, including replaced ones."""
        ...

    def lose(self, failure: WorkerLost) -> list[int]:
        """Remember a lost engine; returns the ranks of all lost ones. Raises the failure if the engine cannot be replaced."""
        ...

    @property
    def come_late(self) -> bool:
        """Whether engines are restarted only when the models have learnt, so that it is better to go on without them."""
        ...

    def replace_lost(self, failure: WorkerLost | None = None) -> None:
        """Restart all engines that have ended or hang; raises the failure if that is not possible."""
        ...


@dataclass
class Run:
    """The state that the stages of a run share; `seconds` holds the phases of the step in progress.

    Where collecting and learning run concurrently, each has a view of its own (`RunView` in trainer/schedule/concurrent_views.py).
    """

    folder: Path
    console: Console
    logger: RunLogger | None = None  # None: metrics are not logged
    trajectory_folder: Path | None = None
    groups: list[WorkerGroup] = field(default_factory=list)
    pools: dict[str, ResourcePool] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    at_step: int | None = None  # the last one that has begun
    phases: list[str] = field(default_factory=list)  # the open phases, outermost first
    watch: Watch | None = None  # detects processes that hang
    phase_timeout: float | None = None  # the most seconds of a call
    restarts: Restarts | None = None  # restarts engines that die; None: their death ends the run
    # Further groups whose dead ranks are replaced before they are called.
    spares: list[WorkerGroup] = field(default_factory=list)
    relays_from: int | None = None  # from so many ranks of a model on, calls go through relays
    store: CheckpointStore | None = None
    resumed: Checkpoint | None = None  # the checkpoint that the run continues from
    started: float = field(default_factory=time.monotonic)
    preemption: Preemption = field(default_factory=Preemption)
    profiled: list[WorkerGroup] = field(default_factory=list)  # groups whose ranks can be traced
    profile_steps: Sequence[int] = ()
    profile_ranks: Sequence[int] = ()
    timeline: Timeline | None = None  # None: none is written
    blocks: Blocks = field(default_factory=Blocks)  # reused memory of the batches' columns
    plans: Plans = field(default_factory=Plans)  # of the batch in training

    @property
    def resumed_step(self) -> int:
        """The last step before the run's start; -1: the run is new, and step 0 is still to come."""
        return -1 if self.resumed is None else self.resumed.step

    @property
    def fork_servers(self) -> Mapping[str, str]:
        """The sockets of the fork servers, by process kind (cluster_setup.py)."""
        assert self.watch is not None and self.watch.cluster is not None
        return self.watch.cluster.fork_servers

    @property
    def log_dir(self) -> Path:
        """The folder with a log of every process."""
        return self.folder / "logs"

    def say(self, text: str) -> None:
        """Print a line without markup."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def status(self, what: str) -> Iterator[None]:
        """Print the name of a slow block, and its seconds at the end."""
        self.say(f"{what} ...")
        begun = time.perf_counter()
        with self._noted(what):
            yield
        self.say(f"  {time.perf_counter() - begun:.1f} s")

    def start(self, group: WorkerGroup) -> WorkerGroup:
        """Watch a group from now on, and end it with the run."""
        self.groups.append(group)
        return group

    def wait(self, refs: list[ray.ObjectRef], busy: Collection[str] = ()) -> list[Any]:
        """The results; raises within seconds when any process of the run died or a call failed, and soon if one hangs.

        Args:
            busy: marks of processes that should be working, whether or not `refs` are calls of them.

        Raises:
            RunFailure: names a report of all processes. A dead engine that can be restarted counts only if `refs` are calls of it.
        """
        with self._reporting():
            return wait(refs, self.watched, self.phase_timeout, self.watch, self._spares, busy=busy)

    def refuse_silence(self, since: float, processes: Sequence[RankProcess]) -> None:
        """Raise if none of these processes has returned anything for longer than `phase_timeout`.

        Args:
            since: when one of them last returned something, by `time.monotonic`.

        Raises:
            WaitTimeout: names the processes and a report of all.
        """
        if self.phase_timeout is not None and time.monotonic() - since > self.phase_timeout:
            stacks_of(processes)  # written to the logs that the error names
            with self._reporting():
                raise WaitTimeout(self.phase_timeout, processes, len(processes))

    def refuse_loss(self, process: RankProcess, why: str) -> NoReturn:
        """Raise for a process that is dead or hangs, and that is not replaced.

        Args:
            why: the reason, for the message.

        Raises:
            WorkerLost: names the process and a report of all.
        """
        with self._reporting():
            raise loss_of(process, [why])

    @property
    def _spares(self) -> list[WorkerGroup]:
        return [*([] if self.restarts is None else [self.restarts.engines]), *self.spares]

    @property
    def watched(self) -> list[WorkerGroup]:
        """The groups whose processes are watched during a call."""
        return self.groups

    def interrupt(self) -> None:
        """Raise if calls are to end, which is checked before each call and before a report."""

    def phase_facts(self) -> dict[str, str]:
        """The phases of a failure, for its report."""
        return {"phase": " / ".join(self.phases) or "start"}

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        self.interrupt()
        try:
            yield
        except RunFailure as failure:
            if failure.report is not None:  # reported by the other view
                raise
            self.interrupt()
            step = "none yet" if self.at_step is None else str(self.at_step)
            self.mark(f"failure: {type(failure).__name__}")
            try:
                write_report(self.folder, failure, self.groups, {"step": step, **self.phase_facts()})
            except OSError as error:
                self.say(f"no report of the failure: {error}")
            raise

    def put(self, value: Any) -> ray.ObjectRef:
        """Put a value into the object store, once for all ranks; processes read its tables and arrays in place.

        Raises:
            RunFailure: as `wait`. Ray 2.60 itself ends this process, without a word, if its raylet is gone.
        """
        self.wait([])
        return ray.put(value)

    def mark(self, what: str) -> None:
        """Mark a moment that the timeline shows across all processes."""
        if self.timeline is not None:
            self.timeline.mark(what)

    def show_rewards(self, scorer: Scorer) -> None:
        """Show the scorer's workers in the timeline."""
        if self.timeline is not None:
            self.timeline.rewards = scorer.spans

    def _noted(self, what: str, facts: SpanFacts | None = None) -> AbstractContextManager[None]:
        return nullcontext() if self.timeline is None else self.timeline.span(what, facts or {})

    @contextmanager
    def timed(self, phase: str, facts: SpanFacts | None = None) -> Iterator[None]:
        """Count the seconds of a phase of the step. `facts`: shown in the timeline."""
        begun = time.perf_counter()
        self.phases.append(phase)
        try:
            with self._noted(phase, facts):
                yield
        finally:
            self.phases.pop()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun

    @contextmanager
    def step(self, step: int) -> Iterator[dict[str, float]]:
        """Time a step; metrics that the caller puts into the dictionary are logged at its end."""
        self.seconds.clear()
        metrics: dict[str, float] = {}
        self.at_step = step
        facts: SpanFacts = {"step": step}
        with self._profiling(step), self.timed(STEP, facts):
            yield metrics
            facts |= {"tokens": metrics["perf/tokens"]} if "perf/tokens" in metrics else {}
        if "perf/tokens" in metrics:
            metrics["perf/tokens_per_s"] = metrics["perf/tokens"] / self.seconds["step"]
        metrics |= {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
        if self.logger is not None:
            self.logger.log(step, metrics)
        if self.timeline is not None:
            self.wait([])
            self.write_timeline(self.timeline.collect)

    def write_timeline(self, write: Callable[[list[WorkerGroup]], None]) -> None:
        """Write the timeline; if that fails (on a full disk, say) the timeline ends, but not the run."""
        try:
            write(self.groups)
        except OSError as error:
            self.say(f"the timeline ends here: {error}")
            self.timeline = None

    @contextmanager
    def _profiling(self, step: int) -> Iterator[None]:
        """Trace ranks if the step is in `profile_steps`; a step that fails leaves no traces."""
        if step not in self.profile_steps:
            yield
            return
        there = [(group, rank) for group in self.profiled for rank in self.profile_ranks]
        ranks = [(group, rank) for group, rank in there if rank < group.world_size]
        self.wait([group.call_rank(rank, "start_profile") for group, rank in ranks])
        yield
        folder = self.folder.absolute() / PROFILES / f"step-{step}"
        paths = [str(folder / f"{group.role}-rank{rank}.json") for group, rank in ranks]
        calls = zip(ranks, paths, strict=True)
        self.wait([group.call_rank(rank, "write_profile", path) for (group, rank), path in calls])

    def save_trajectories(self, batch: pa.Table, kind: str, step: int) -> None:
        """Write trajectories: of a step ("step") as they were trained on, or of a validation after it ("val").

        The reference's most likely tokens are left out: bytes that nothing reads, far more than all else (512 a token with 64 of them).
        """
        assert self.trajectory_folder is not None
        if REF_TOP_TOKENS in batch.column_names:
            batch = batch.drop_columns(REF_TOP_TOKENS)
        write_trajectories(batch, self.trajectory_folder / f"{kind}-{step:06d}.parquet")
