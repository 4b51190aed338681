"""The lines that a framework's process prints for each step, for `run.py` to find in its log. Imports nothing of any framework."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

MARK = "PEERS-STEP "


class StepClock:
    """Times the phases of steps from within a framework's process, and prints a line at the end of each step."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.begun: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begun

    def timed(self, name: str, function: Callable, only: Callable[[], bool] = lambda: True) -> Callable:
        """`function`, whose calls count as a phase whenever `only` is true."""

        @wraps(function)
        def call(*args, **kwargs):
            if not only():
                return function(*args, **kwargs)
            with self.phase(name):
                return function(*args, **kwargs)

        return call

    def begin(self) -> None:
        self.phases.clear()
        self.begun = time.time()

    def end(self, **facts: float) -> None:
        """Print the step that has begun, and begin the next one."""
        now = time.time()
        line = {"begin": self.begun, "end": now, "phases": self.phases, **facts}
        print(MARK + json.dumps(line), flush=True)
        self.begin()
