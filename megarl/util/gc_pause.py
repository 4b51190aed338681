"""Planning without Python's garbage collector, which takes up to half of its time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Garbage in cycles is not looked for meanwhile, in any thread; also a decorator.

    A plan makes millions of tuples, all to be kept and none in a cycle. The collector would go through all that there are
    again and again, because so many are new.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
