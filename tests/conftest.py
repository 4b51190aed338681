"""Fixtures that more than one room's tests use."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that act as ranks over gloo; see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()
