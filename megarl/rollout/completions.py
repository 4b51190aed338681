"""Runs coroutines together and returns their results as they come, for callers that are not coroutines; limits of their time."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
_PART = 1.0  # seconds of a limit that are waited for at a time


class NothingCompleted(Exception):
    """No coroutine ended in time."""


class Flight(Generic[Result]):
    """Coroutines that continue from call to call. The loop runs only while a call waits for results; the engine works all the time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Result]] = set()
        self._done: list[asyncio.Task[Result]] = []
        # `_some`: a coroutine has ended. `_enough`: all have ended or one has failed.
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._busy, self._begun = 0.0, 0.0

    @property
    def busy(self) -> float:
        """Seconds so far in which a coroutine ran or waited; the end of one counts when the loop sees it."""
        return self._busy + (time.monotonic() - self._begun if self._running else 0.0)

    @property
    def _running(self) -> int:
        return len(self._tasks) - len(self._done)

    def __len__(self) -> int:
        """The number of coroutines whose results were not taken yet."""
        return len(self._tasks)

    def add(self, coroutines: Sequence[Coroutine[Any, Any, Result]]) -> None:
        """Start coroutines, and run them to their first wait."""
        tasks = [self._loop.create_task(coroutine) for coroutine in coroutines]
        if tasks and not self._running:
            self._begun = time.monotonic()
        self._tasks.update(tasks)
        self._enough.clear()
        for task in tasks:
            task.add_done_callback(self._note)
        self._loop.run_until_complete(asyncio.sleep(0))

    def wait(self, seconds: float, *, for_all: bool = False) -> bool:
        """Wait until a coroutine has ended since the last `take`, or with `for_all` until all have or one has failed, at most `seconds`;
        returns whether that happened."""
        event = self._enough if for_all else self._some
        if not event.is_set():
            with suppress(TimeoutError):
                self._loop.run_until_complete(asyncio.wait_for(event.wait(), seconds))
        return event.is_set()

    def take(self, seconds: float) -> list[Result]:
        """Results of all coroutines that have ended since the last call, after `seconds`, or as soon as all have ended or one has failed.

        Raises their exceptions.
        """
        if self._tasks:
            self.wait(seconds, for_all=True)
        ended, self._done = self._done, []
        self._some.clear()
        self._tasks.difference_update(ended)
        return [task.result() for task in ended]

    def cancel(self) -> None:
        """Cancel all coroutines, and wait for their ends; their results are lost."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._tasks, self._done = set(), []
        self._some.clear()

    def _note(self, task: asyncio.Task[Result]) -> None:
        self._done.append(task)
        if not self._running:
            self._busy += time.monotonic() - self._begun
        self._some.set()
        if len(self._done) == len(self._tasks) or task.cancelled() or task.exception() is not None:
            self._enough.set()


def as_completed(
    loop: asyncio.AbstractEventLoop,
    coroutines: Sequence[Coroutine[Any, Any, Result]],
    timeout: float,
    last_sign: Callable[[], float] = lambda: 0.0,
) -> Iterator[list[Result]]:
    """Run all coroutines on a loop; yield the new results each time that some have ended.

    The loop runs while the next results are waited for, not while the caller works on the last ones. Coroutines
    that still run when one raises, or when this generator is closed, are cancelled and waited for.

    Args:
        timeout: seconds within which at least one coroutine must end, or a sign of life come.
        last_sign: the time of the last sign of life, by `time.monotonic`.

    Raises:
        NothingCompleted: none ended in time.
        Exception: any exception of a coroutine.
    """
    flight: Flight[Result] = Flight(loop)
    try:
        flight.add(coroutines)
        while len(flight):
            begun = time.monotonic()
            while not flight.wait(max(begun, last_sign()) + timeout - time.monotonic()):
                if max(begun, last_sign()) + timeout <= time.monotonic():
                    raise NothingCompleted(f"no answer within {timeout} s")
            yield flight.take(0.0)
    finally:
        flight.cancel()


async def within(seconds: float, awaited: Awaitable[Result]) -> Result:
    """The result of `awaited`. Time in which the event loop stands still, as between two calls of a `Flight`, does not count.

    Raises:
        TimeoutError: it took longer, and was cancelled.
    """
    task = asyncio.ensure_future(awaited)
    try:
        while seconds > 0:
            begun, part = time.monotonic(), min(seconds, _PART)
            await asyncio.wait({task}, timeout=part)
            if task.done():
                return task.result()
            if time.monotonic() - begun < part + _PART:
                seconds -= part
        raise TimeoutError
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Gate:
    """A gate that coroutines pass while it is open; it counts those that are inside."""

    def __init__(self) -> None:
        self._opened, self._left = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self.inside = 0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        """Let no more coroutines in; those inside stay."""
        self._opened.clear()

    async def opened(self) -> None:
        """Wait until it is open."""
        await self._opened.wait()

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Wait until the gate is open, and be inside for the block."""
        await self.opened()
        self.inside += 1
        self._left.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._left.set()

    async def left(self, seconds: float) -> bool:
        """Wait until no coroutine is inside, at most `seconds`; returns whether none is."""
        if self.inside:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), seconds)
        return not self.inside
