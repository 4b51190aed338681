"""Fixtures that more than one room's tests use."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import RankPool

TESTS = Path(__file__).parent
# What `pytest -n 2 --dist loadgroup` gives to one process: a file, or a room whose tests share an engine or a cluster.
# The rooms of long tests come first, so that both processes end at about the same time.
ONE_PROCESS = ("rollout", "cluster")
LONGEST_FIRST = ("rollout", "trainer", "faults", "cluster", "megatron")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_configure() -> None:
    # A shell starts what it puts in the background with Ctrl-C ignored, which processes inherit; tests send it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("dist", "no") != "no" or hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place(_room(item)))  # stable
        for item in items:
            room = _room(item)
            item.add_marker(pytest.mark.xdist_group(room if room in ONE_PROCESS else str(item.path)))
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes a minute more: runs with --slow"))


def _room(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def _place(room: str) -> int:
    return LONGEST_FIRST.index(room) if room in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that act as ranks over gloo; see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()
