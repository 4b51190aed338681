"""Fixtures that more than one room's tests use."""

import signal
from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_configure() -> None:
    # A shell starts what it puts in the background with Ctrl-C ignored, which processes inherit; tests send it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes a minute more: runs with --slow"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that act as ranks over gloo; see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()
