"""Coroutines that run together, and their results as they come: for callers that are no coroutines."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


class NothingCompleted(Exception):
    """No coroutine has ended in time."""


def as_completed(
    loop: asyncio.AbstractEventLoop,
    coroutines: Sequence[Coroutine[Any, Any, Result]],
    timeout: float,
    last_sign: Callable[[], float] = lambda: 0.0,
) -> Iterator[list[Result]]:
    """Run all coroutines on a loop; each time that some have ended, the results of all that have.

    The loop runs while the next results are waited for, not while the caller works on the last ones. Coroutines
    that still run when one raises, or when this generator is closed, are cancelled and waited for.

    Args:
        timeout: seconds in which at least one must end, or give a sign of life.
        last_sign: when it last did, by `time.monotonic`.

    Raises:
        NothingCompleted: none did.
        Exception: what a coroutine raises.
    """
    unread = {loop.create_task(coroutine) for coroutine in coroutines}
    done: list[asyncio.Task[Result]] = []
    some = asyncio.Event()

    def note(task: asyncio.Task[Result]) -> None:
        done.append(task)
        some.set()

    for task in unread:
        task.add_done_callback(note)
    try:
        while unread:
            _run_until(loop, some, timeout, last_sign)
            part, done[:] = list(done), []
            some.clear()
            results = [task.result() for task in part]
            unread.difference_update(part)
            yield results
    finally:
        for task in unread:
            task.cancel()
        if unread:
            loop.run_until_complete(asyncio.gather(*unread, return_exceptions=True))


def _run_until(
    loop: asyncio.AbstractEventLoop, event: asyncio.Event, timeout: float, last_sign: Callable[[], float]
) -> None:
    begun = time.monotonic()
    while not event.is_set():
        rest = max(begun, last_sign()) + timeout - time.monotonic()
        if rest <= 0:
            raise NothingCompleted(f"no answer within {timeout} s")
        with suppress(TimeoutError):
            loop.run_until_complete(asyncio.wait_for(event.wait(), rest))
