"""Ranks use the cores near their GPUs, read from a tree of files like those of an NVIDIA driver and of Linux."""

import os
from pathlib import Path

import pytest

from megarl.cluster import worker as affinity
from megarl.cluster.worker import Cores, cores_near, use_cores

CPUS = ("0-47,96-143", "48-95,144-191")  # of a server with two sockets and two threads a core
ALL = frozenset(range(192))
FIRST = frozenset((*range(48), *range(96, 144)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Eight GPUs, four at each socket; bus addresses as in a DGX H100, in capitals in the driver's files."""
    addresses = ("1B", "43", "52", "61", "9D", "C3", "D1", "DF")
    for number, address in enumerate(addresses):
        card = tmp_path / f"proc/driver/nvidia/gpus/0000:{address}:00.0"
        card.mkdir(parents=True)
        (card / "information").write_text(
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-{address}-uuid\nDevice Minor: \t {number}\n"
        )
        device = tmp_path / f"sys/bus/pci/devices/0000:{address.lower()}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{number // 4}\n")
    for node, cpus in enumerate(CPUS):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    return tmp_path


def test_a_rank_has_the_cores_of_its_gpus_socket(root: Path) -> None:
    assert cores_near(["3"], 8, ALL, root) == Cores(FIRST, 96 // 12)
    assert cores_near(["4"], 8, ALL, root) == Cores(ALL - FIRST, 8)
    assert cores_near(["GPU-D1-uuid"], 8, ALL, root).cpus == ALL - FIRST
    assert cores_near(["0", "1", "2"], 8, ALL, root).cpus == FIRST  # an engine of several GPUs
    assert cores_near(["3"], 8, frozenset(range(40, 60)), root) == Cores(frozenset(range(40, 48)), 1)


def test_what_has_no_one_socket_is_bound_to_none(root: Path, tmp_path: Path) -> None:
    everywhere = Cores(ALL, 192 // 24)
    assert cores_near(["3", "4"], 8, ALL, root) == everywhere
    assert cores_near(["MIG-5"], 8, ALL, root) == everywhere
    assert cores_near(["0"], 8, ALL, tmp_path / "of another machine") == everywhere
    only = frozenset({50})  # the process was given no core near its GPU
    assert cores_near(["0"], 8, only, root) == Cores(only, 1)
    (root / "sys/bus/pci/devices/0000:1b:00.0/numa_node").write_text("-1\n")  # as virtual machines report
    assert cores_near(["0"], 8, ALL, root) == everywhere


def test_a_process_is_bound_and_told_how_many_threads_it_has(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(affinity, "FILE_SYSTEM", root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(ALL))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: bound.append(cpus))
    assert use_cores({"CUDA_VISIBLE_DEVICES": "1"}, 8) == {"OMP_NUM_THREADS": "8"}
    assert use_cores({"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "4"}, 8) == {}
    assert bound == [FIRST, FIRST]
    assert use_cores({"CUDA_VISIBLE_DEVICES": ""}, 0) == {} and len(bound) == 2
