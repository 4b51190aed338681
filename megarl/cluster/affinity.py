"""Which of a machine's cores a rank with GPUs uses: those beside its GPUs, and a share of them for torch's own threads.

Copies between a GPU and memory of the other socket cross the link between sockets, at half the speed or less; memory is given by the
socket of the core that touches it first. Ray (2.60, `set_omp_num_threads_if_unset`) would leave each rank one thread, since ranks
book a part of a core.

Nothing is asked of a driver: which GPU has which number, and where it is, is read from the files of the NVIDIA driver and of Linux. Where
they are not there, such as in some containers, ranks are bound to nothing.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROCESSES_OF_A_GPU = 3  # that compute at a time at most: a rank, an engine's owner and its scheduler
ROOT = Path("/")


@dataclass(frozen=True)
class Cores:
    """`cpus`: that a process may use. `threads`: of torch's operations on them."""

    cpus: frozenset[int]
    threads: int


def use_cores(env: Mapping[str, str], num_gpus: int) -> dict[str, str]:
    """Bind this process, if it has GPUs, to the cores beside them.

    Args:
        env: of the process: CUDA_VISIBLE_DEVICES, and OMP_NUM_THREADS where that is given already.
        num_gpus: of the machine.

    Returns: what to add to its environment.
    """
    if not env.get("CUDA_VISIBLE_DEVICES"):
        return {}
    found = cores_beside(
        env["CUDA_VISIBLE_DEVICES"].split(","), num_gpus, frozenset(os.sched_getaffinity(0)), ROOT
    )
    os.sched_setaffinity(0, found.cpus)  # of this thread and those that it starts
    return {} if "OMP_NUM_THREADS" in env else {"OMP_NUM_THREADS": str(found.threads)}


def cores_beside(gpu_ids: Sequence[str], num_gpus: int, allowed: frozenset[int], root: Path) -> Cores:
    """Of the `allowed` cores those of the NUMA node that has all GPUs of `gpu_ids`, or all where there is none.

    Args:
        gpu_ids: numbers, in the order of bus addresses as nvidia-smi has them, or UUIDs.
        root: of the file system.
    """
    nodes = _nodes(root)
    own = {nodes.get(gpu) for gpu in gpu_ids}
    (node,) = own if len(own) == 1 else (None,)
    beside = allowed & _cpus_of(root, node) if node is not None else frozenset()
    if not beside:
        return Cores(allowed, _share(allowed, num_gpus))
    neighbours = {address for address, (_, other) in _gpus(root).items() if other == node}
    return Cores(beside, _share(beside, len(neighbours)))


def _share(cpus: frozenset[int], num_gpus: int) -> int:
    return max(1, len(cpus) // (PROCESSES_OF_A_GPU * max(1, num_gpus)))


def _nodes(root: Path) -> dict[str, int | None]:
    """By number and by UUID, the NUMA node of each GPU; None: Linux does not know it."""
    found: dict[str, int | None] = {}
    for number, (uuid, node) in enumerate(_gpus(root).values()):
        found |= {str(number): node, uuid: node}
    return found


def _gpus(root: Path) -> dict[str, tuple[str, int | None]]:
    """(UUID, NUMA node) by bus address, in the order of these."""
    found = {}
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        uuid = re.search(r"^GPU UUID:\s*(\S+)", (folder / "information").read_text(), re.MULTILINE)
        place = root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node"
        node = int(place.read_text()) if place.exists() else -1
        found[folder.name] = (uuid[1] if uuid is not None else "", node if node >= 0 else None)
    return found


def _cpus_of(root: Path, node: int) -> frozenset[int]:
    """A list such as "0-3,8-11"."""
    cpus: set[int] = set()
    for part in (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1)) if first else set()
    return frozenset(cpus)
