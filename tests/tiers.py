"""Tiers of tests: the processes that a test starts. Each test has one tier, as a marker: `pytest -m unit`, `pytest -m "ranks or engine"`.

    unit        none; a unit test that starts one fails
    processes   others than those below: scripts, reward processes, Ray's servers and actors, shadow ranks
    ranks       gloo ranks, the fixture `ranks`
    engine      SGLang engines
    e2e         whole runs and commands
    chaos       processes that are killed, stopped or lost

Further markers: `smoke`, tests of the other tiers that `make test` runs with all unit tests, because they show that the product
works; `slow` and `gpu`, see pyproject.toml.
"""

from collections.abc import Mapping
from pathlib import PurePath

UNIT, PROCESSES, RANKS, ENGINE, E2E, CHAOS = "unit", "processes", "ranks", "engine", "e2e", "chaos"
TIERS = (UNIT, PROCESSES, RANKS, ENGINE, E2E, CHAOS)
"""By the beginning of a path in tests/: the tier of its tests. The longest entry counts; where there is none, `ranks` for tests with that fixture, else `unit`."""
BY_PATH: Mapping[str, str] = {
    "faults": CHAOS,
    "test_chaos.py": CHAOS,
}
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})


def tier_of(path: PurePath, fixtures: list[str]) -> str:
    """Args: path: of the test's file, relative to tests/; fixtures: the names of those that the test uses."""
    found = max((entry for entry in BY_PATH if path.as_posix().startswith(entry)), key=len, default=None)
    if found is not None:
        return BY_PATH[found]
    return RANKS if "ranks" in fixtures else UNIT
