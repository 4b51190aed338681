"""How a test waits: until a condition is true, not for some seconds."""

import time
from collections.abc import Callable
from typing import Any


def wait_for(
    condition: Callable[[], Any],
    seconds: float = 60.0,
    told: Callable[[], Any] = lambda: "",
    apart: float = 0.02,
) -> Any:
    """The first true result of `condition`.

    Args:
        seconds: the limit after which the test fails; large where the time has no guarantee, since a busy machine is slow.
        told: what the failure reports.
        apart: seconds between two checks; more where a check is expensive.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not true within {seconds:g} s. {told()}")
        time.sleep(apart)
    return found
