"""Collecting and learning at the same time: a background task, and the view of run and roles that each of two threads has.

Guarantees of a background task:
- An exception of the task is raised in the main thread, when it next looks at the task or takes the result. A task that is told to end
  does so when it next looks.
- The task asks the main thread for operations that the main thread alone may do: they are done while it waits for the result.
- Its thread keeps no process alive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Generic, TypeVar

from megarl.cluster import Cluster, Watch, WorkerGroup
from megarl.cluster.ranks import RankProcess
from megarl.cluster.watch import Hang
from megarl.trainer.roles.device_memory import Recover, nobody_is_served, nothing_is_replaced
from megarl.trainer.roles.restarts import DeferredRestarts
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.run import Run
from megarl.trainer.stages.nonfinite import NotFinite

View = tuple[Run, Roles]


@dataclass
class RunView(Run):
    """The view that one of two concurrent threads has of a run.

    Attributes:
        own_groups: the groups that this thread calls.
        check: raises if this thread's calls are to end.
        other_phases: the open phases of the other thread.
    """

    own_groups: list[WorkerGroup] = field(default_factory=list)
    check: Callable[[], None] = lambda: None
    other_phases: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run, **own: Any) -> RunView:
        """A view of a run, with which it shares everything but the fields `own`."""
        return cls(**{member.name: getattr(run, member.name) for member in fields(Run)} | own)

    @property
    def watched(self) -> list[WorkerGroup]:
        return self.own_groups

    def interrupt(self) -> None:
        self.check()

    def phase_facts(self) -> dict[str, str]:
        others = {"meanwhile": " / ".join(self.other_phases)} if self.other_phases else {}
        return super().phase_facts() | others


T = TypeVar("T")


@contextmanager
def in_background(
    run: Run,
    roles: Roles,
    step: int,
    name: str,
    task: Callable[[View], T],
    join: Callable[[Background[T], Run, Run], None],
    goes_on: bool,
    busy: Callable[[], Collection[str]] = tuple,
) -> Iterator[View]:
    """Collect in a thread during a block that learns in step `step`; gives the view of (run, roles) for the block.

    Engines that are lost during the block are restarted after it, with the next version of the weights.

    Args:
        name: of the thread.
        task: collects, with its own view.
        join: waits at the end for the task; given the views of run that the task and the block have.
        goes_on: whether the task is waited for where the block raises NotFinite, because the run goes on.
        busy: marks of processes that should be working although no call waits for them.

    Raises:
        The exceptions of the task, at the next call that the block waits for.
    """
    background: Background[T] = Background(name)
    assert roles.restarts is not None, "a run with engines"
    deferred = DeferredRestarts(roles.restarts, background.ask, version=step + 1)
    collector, learner = make_views(run, roles, background, deferred, busy)
    background.start(partial(task, collector))
    try:
        try:
            yield learner
        except NotFinite:
            if goes_on:
                join(background, collector[0], learner[0])
            raise
        join(background, collector[0], learner[0])
    except BaseException:
        background.end()
        raise


def make_views(
    run: Run,
    roles: Roles,
    background: Background[Any],
    deferred: DeferredRestarts,
    busy: Callable[[], Collection[str]],
) -> tuple[View, View]:
    """Two views of (run, roles): of the background thread that collects, and of the main thread that learns.

    Each watches the processes of its own groups, ends when the other fails, and times its own phases.
    """
    # The reward model scores what the engines generate, so that it belongs to the collecting view.
    scoring = [roles.reward_model.group] if roles.reward_model is not None else []
    collecting = [roles.engines, *scoring]
    learning = [group for group in run.groups if group not in collecting]
    assert run.watch is not None, "a run with engines"
    idle_timeout, cluster = run.watch.idle_timeout, run.watch.cluster
    phases = [*run.phases]  # shared with the other view, for reports of failures
    collector = RunView.of(
        run,
        own_groups=collecting,
        watch=InterruptedWatch(idle_timeout, cluster, background.obey, busy),
        check=background.obey,
        seconds={},
        phases=phases,
        other_phases=run.phases,
        restarts=deferred if run.restarts is not None else None,
    )
    learner = RunView.of(
        run,
        own_groups=learning,
        watch=InterruptedWatch(idle_timeout, cluster, background.check),
        check=background.check,
        other_phases=phases,
    )
    return (
        (
            collector,
            _with_memory_of(roles, collector, collecting, deferred.replace_lost, deferred.serve_all),
        ),
        (learner, _with_memory_of(roles, learner, learning, nothing_is_replaced, nobody_is_served)),
    )


def _with_memory_of(
    roles: Roles, run: Run, groups: list, recover: Recover, serve: Callable[[], object]
) -> Roles:
    return replace(roles, memory=roles.memory.view(run, groups, recover, serve))


_LOOK_SECONDS = 0.25
# The main thread continues after this time without a task that was told to end; the task may wait for a reward and end later.
_END_SECONDS = 5.0


class Ended(Exception):
    """Raised in a task that was told to end."""


class Background(Generic[T]):
    """One task; `start` begins it."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self._name = name
        self._told = threading.Event()
        self._failure: BaseException | None = None
        self._result: T
        self._asked: queue.SimpleQueue[tuple[Callable[[], object], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def start(self, task: Callable[[], T]) -> None:
        self._thread = threading.Thread(target=self._run, args=(task,), name=self._name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the task has ended, however it did."""
        return self._thread is not None and not self._thread.is_alive()

    def check(self) -> None:
        """For the main thread, to be called often: raises the exception of the task, if it has failed."""
        if self._failure is not None:
            raise self._failure

    def obey(self) -> None:
        """For the task, to be called often.

        Raises:
            Ended: the main thread told the task to end.
        """
        if self._told.is_set():
            raise Ended

    def ask(self, call: Callable[[], object]) -> None:
        """For the task: run `call` in the main thread, and return after it.

        Raises:
            Ended: the main thread told the task to end.
        """
        done = threading.Event()
        self._asked.put((call, done))
        while not done.wait(_LOOK_SECONDS):
            self.obey()

    def result(self, look: Callable[[], object]) -> T:
        """For the main thread: wait for the task, running the calls that it asks for, and `look` between them.

        Raises the exceptions of all three.
        """
        assert self._thread is not None, "it was started"
        while True:
            try:
                asked = self._asked.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                look()
                continue
            if asked is None:
                break
            call, done = asked
            call()
            done.set()
        self._thread.join()
        self.check()
        return self._result

    def end(self) -> None:
        """For the main thread: tell the task to end, and wait a few seconds for it."""
        self._told.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _run(self, task: Callable[[], T]) -> None:
        try:
            self._result = task()
        except Ended:
            pass
        except BaseException as failure:  # raised by the main thread
            self._failure = failure
        finally:
            self._asked.put(None)


class InterruptedWatch(Watch):
    """A watch of calls that can also be ended from outside: `interrupt` then raises."""

    def __init__(
        self,
        idle_timeout: float | None,
        cluster: Cluster | None,
        interrupt: Callable[[], None],
        busy: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`busy`: marks of processes that should be working although no call waits for them."""
        super().__init__(idle_timeout, cluster)
        self._interrupt, self._busy = interrupt, busy

    def look(self, processes: Sequence[RankProcess], called: Collection[str]) -> Hang | None:
        self._interrupt()
        return super().look(processes, {*called, *self._busy()})
