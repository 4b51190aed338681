"""A task in a thread of its own, beside what the main thread does.

Guarantees:
- an exception of the task is raised in the main thread, at its next look or when it takes the result; told to end, the task
  does at its next look;
- what the main thread alone may do, the task asks it for: it is done while the main thread waits for the result;
- the thread keeps no process alive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from megarl.cluster import Cluster, Watch
from megarl.cluster.ranks import RankProcess
from megarl.cluster.watch import Hang

T = TypeVar("T")

_LOOK_SECONDS = 0.25
# Until the main thread goes on without a task that was told to end: it may wait for a reward, and ends after that.
_END_SECONDS = 5.0


class Ended(Exception):
    """The task was told to end."""


class Background(Generic[T]):
    """One task; `start` begins it."""

    def __init__(self, name: str) -> None:
        """`name`: the thread's."""
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

    def check(self) -> None:
        """For the main thread, to be called often: raises what the task has raised."""
        if self._failure is not None:
            raise self._failure

    def obey(self) -> None:
        """For the task, to be called often. Ended: it was told to end."""
        if self._told.is_set():
            raise Ended

    def ask(self, call: Callable[[], object]) -> None:
        """For the task: have the main thread do `call`; returns when it has. Ended: it will not."""
        done = threading.Event()
        self._asked.put((call, done))
        while not done.wait(_LOOK_SECONDS):
            self.obey()

    def result(self, look: Callable[[], object]) -> T:
        """For the main thread: wait for the task, do what it asks for, and call `look` meanwhile; raises what they do."""
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
        """For the main thread: tell the task to end, and wait for that a little while."""
        self._told.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _run(self, task: Callable[[], T]) -> None:
        try:
            self._result = task()
        except Ended:
            pass
        except BaseException as failure:  # the main thread's to raise
            self._failure = failure
        finally:
            self._asked.put(None)


class InterruptedWatch(Watch):
    """A watch of calls that are ended from outside, too: by what `interrupt` raises."""

    def __init__(
        self,
        idle_timeout: float | None,
        cluster: Cluster | None,
        interrupt: Callable[[], None],
        busy: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`busy`: marks of processes that should be at work, though no call waits for them."""
        super().__init__(idle_timeout, cluster)
        self._interrupt, self._busy = interrupt, busy

    def look(self, processes: Sequence[RankProcess], called: Collection[str]) -> Hang | None:
        self._interrupt()
        return super().look(processes, {*called, *self._busy()})
