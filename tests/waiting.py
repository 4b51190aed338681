"""How a test waits: until something is true, not for some seconds."""

import time
from collections.abc import Callable
from typing import Any


def wait_for(
    condition: Callable[[], Any],
    seconds: float = 60.0,
    told: Callable[[], Any] = lambda: "",
    apart: float = 0.02,
) -> Any:
    """What `condition` returns, once that is true.

    Args:
        seconds: after which the test fails; many, where nothing is promised about the time: a busy machine is slow.
        told: what is said then.
        apart: seconds between two looks; more, where a look is dear.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not true within {seconds:g} s. {told()}")
        time.sleep(apart)
    return found
