"""One Ray cluster for all tests of this room."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster import (
    Cluster,
    ProcessKind,
    ResourcePool,
    WorkerGroup,
    start_cluster,
    stop_cluster,
    wait,
)
from megarl.cluster.fork_server import start_fork_server
from tests.cluster.processes import start_controller

SLOTS = 4  # size of the pool that all tests share
SPARE_SLOTS = 2  # for tests of pools


@pytest.fixture(scope="package")  # stopped before the next room's tests: a process has one cluster at a time
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = start_cluster(None, SLOTS + SPARE_SLOTS, tmp_path_factory.mktemp("cluster"))
    yield cluster
    stop_cluster(cluster)


@pytest.fixture
def controller() -> Iterator[Callable[..., tuple[subprocess.Popen, dict[str, Any]]]]:
    """controller(name, *arguments): `start_controller`, killed at the end of the test."""
    processes = []

    def start(name: str, *arguments: Any) -> tuple[subprocess.Popen, dict[str, Any]]:
        process, report = start_controller(name, *arguments)
        processes.append(process)
        return process, report

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="package")
def pool(ray_cluster: Cluster) -> Iterator[ResourcePool]:
    pool = ResourcePool("test", 1, SLOTS, timeout=100)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def trio(pool: ResourcePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    """Three ranks for tests that leave them as they are."""
    group = start_ranks("trio", pool, 3, tmp_path_factory.mktemp("trio"))
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a fork server that has imported torch, for groups whose ranks would otherwise each import it."""
    path = str(tmp_path_factory.mktemp("torch") / "fork-server")
    process = start_fork_server(
        path, ProcessKind(("torch", "torch.distributed"), (("OMP_NUM_THREADS", "1"),))
    )
    yield path
    process.kill()
    process.wait()


@pytest.fixture
def start_group(pool: ResourcePool, tmp_path: Path) -> Iterator[Callable[..., WorkerGroup]]:
    """start_group(role, world_size, **options of WorkerGroup): a group of `tests.cluster.workers:Rank`."""
    groups = []

    def start(role: str, world_size: int, **options: Any) -> WorkerGroup:
        group = start_ranks(role, pool, world_size, tmp_path, **options)
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.shutdown()


def start_ranks(
    role: str,
    pool: ResourcePool,
    world_size: int,
    log_dir: Path,
    kind: type[WorkerGroup] = WorkerGroup,
    **options: Any,
) -> WorkerGroup:
    options = {"worker_class": "tests.cluster.workers:Rank", "init_kwargs": {}} | options
    options |= {"pool": pool, "world_size": world_size, "log_dir": log_dir}
    group = kind(role, **options)
    try:
        wait(group.started, [group], timeout=150)
    except RuntimeError:
        group.shutdown()
        raise
    return group
