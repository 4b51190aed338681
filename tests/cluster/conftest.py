"""One Ray cluster for all tests of this room."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.cluster import Cluster, ResourcePool, WorkerGroup, start_cluster, stop_cluster, wait

SLOTS = 4


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = start_cluster(None, SLOTS, tmp_path_factory.mktemp("cluster"))
    yield cluster
    stop_cluster(cluster)


@pytest.fixture
def pool(ray_cluster: Cluster) -> Iterator[ResourcePool]:
    pool = ResourcePool("test", 1, SLOTS, timeout=30)
    yield pool
    pool.close()


@pytest.fixture
def start_group(pool: ResourcePool, tmp_path: Path) -> Iterator[Callable[..., WorkerGroup]]:
    """start_group(role, world_size, **options of WorkerGroup): a started group of `tests.cluster.workers:Rank`."""
    groups = []

    def start(role: str, world_size: int, **options) -> WorkerGroup:
        options = {
            "worker_class": "tests.cluster.workers:Rank",
            "init_kwargs": {},
            "log_dir": tmp_path,
        } | options
        group = WorkerGroup(role, pool=pool, world_size=world_size, **options)
        groups.append(group)
        wait(group.started, [group], timeout=60)
        return group

    yield start
    for group in groups:
        group.shutdown()
