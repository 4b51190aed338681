"""Fixtures that more than one room's tests use."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from megarl.util.memory import without_collection
from tests.ranks import RankPool

# Python keeps its compiled files, and pytest the tests whose assertions it has rewritten, even where PYTHONDONTWRITEBYTECODE is set, as in
# many container images: to make them again would take each process of each session as long as all other imports.
sys.dont_write_bytecode = False
# Two threads of a tiny operation wait for each other longer than the operation takes, and several times as long on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each property gets enough random examples to show a mistake that is not rare; each session draws others. Any may take long on a busy machine.
settings.register_profile("tests", max_examples=25, deadline=None)
settings.load_profile("tests")
# Fixtures of models and runs that several rooms' tests share.
pytest_plugins = ["tests.tiers", "tests.fixtures.runs", "tests.fixtures.tiny_models"]
TESTS = Path(__file__).parent
# With several processes (`pytest -n 3`), one process gets all files of these rooms, whose tests share engines, shadow ranks or a cluster.
ONE_PROCESS = ("rollout", "shadow", "cluster")
# And one process gets all of these files, which parse the complete package: it is parsed once.
WITH = dict.fromkeys(("tests/test_security.py", "tests/util/test_packages.py"), "tests/test_repository.py")
# Long tests come first (rooms, and a file), then the other files that start processes, so that all processes end at about the same time.
LONGEST_FIRST = ("rollout", "shadow", "trainer", "faults", "launch", "test_wheel.py", "cluster", "megatron")
# Among the files that start no process, those of these rooms take longest and come first.
LONGEST_UNITS = ("test_recipes.py", "checkpoints", "plan", "weight_sync")


class ByFileOrRoom(LoadFileScheduling):
    """A process takes one file at a time (with others, by `WITH`), or one room of `ONE_PROCESS`; in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        room = Path(file).relative_to("tests").parts[0]
        return room if room in ONE_PROCESS else WITH.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    config.option.loadscopereorder = False
    return ByFileOrRoom(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption(
        "--container-image", help="an image with python3: run the sandboxes of docker and podman for real"
    )


def pytest_configure() -> None:
    # A shell starts background commands with Ctrl-C ignored, and child processes inherit this; tests send Ctrl-C.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Objects that the tests import are never garbage, so the garbage collector need not search them, neither during the imports nor between
    tests."""
    with without_collection():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        places: dict[Path, int] = {}
        for item in items:
            places[item.path] = min(_place(item), places.get(item.path, _place(item)))
        items.sort(key=lambda item: places[item.path])  # stable
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes a minute more: runs with --slow"))


def _place(item: pytest.Item) -> int:
    room = item.path.relative_to(TESTS).parts[0]
    if room in LONGEST_FIRST:
        return LONGEST_FIRST.index(room)
    unit = item.get_closest_marker("unit") is not None
    return len(LONGEST_FIRST) + unit + (unit and room not in LONGEST_UNITS)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that act as ranks over gloo; see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()
