"""The facts of a machine of the cluster, and findings about them for a job.

`node_facts` runs on every node and imports little; `check_nodes` and `check_node` start nothing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.util.gpus import Gpu, gpus_here
from megarl.util.packages import KNOWN, PURPOSES, install_command, installed, pinned, requirements

PACKAGES = (
    "torch", "megatron-core", "sglang", "ray", "transformers", "pyarrow", "safetensors", "tensorboard",
    "transformer-engine", "fla-core", "flash-attn", "sglang-kernel", "torch-memory-saver", "py-spy",
)  # fmt: skip
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one machine, in bytes and seconds.

    Attributes:
        versions: of installed packages, by name.
        missing: packages of requirements/cpu.txt, which are also in requirements/gpu.txt, that are not installed.
        cuda: the version that torch is built for; None: a build without CUDA, or no torch.
        address: the address that the host's own name resolves to; None: none.
        clock: seconds since the epoch; where machines are compared, seconds ahead of the clock of the one that asked.
        shared_memory, disk: free bytes of /dev/shm (None: there is none) and of the run folder's file system.
        probe: whether a file that another node wrote into the run folder can be read here.
    """

    host: str
    address: str | None
    python: str
    versions: dict[str, str]
    missing: tuple[str, ...]
    cuda: str | None
    gpus: tuple[Gpu, ...]
    cores: int
    memory: int
    available: int
    shared_memory: int | None
    disk: int
    open_files: int
    clock: float
    probe: bool


def node_facts(folder: str, probe: str) -> NodeFacts:
    """The facts of this machine.

    Args:
        folder: of the run, which exists on the node that asks.
        probe: the name of a file in it.
    """
    memory = psutil.virtual_memory()
    existing = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    return NodeFacts(
        host=socket.gethostname(),
        address=_resolved(socket.gethostname()),
        python=platform.python_version(),
        versions={name: found for name in PACKAGES if (found := installed(name)) is not None},
        missing=tuple(name for name in pinned(requirements("cpu")) if installed(name) is None),
        cuda=_cuda(),
        gpus=gpus_here(),
        cores=len(os.sched_getaffinity(0)),
        memory=memory.total,
        available=memory.available,
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else None,
        disk=shutil.disk_usage(existing).free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        probe=Path(folder, probe).is_file(),
        clock=time.time(),  # last, since the others take time
    )


def _cuda() -> str | None:
    """The CUDA version in torch's version.py, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found is not None else None


def _resolved(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


GIB = 1 << 30
OK, WARNING, FAILURE = "ok", "warning", "failure"
# Each of them is in requirements/gpu.txt.
GPU_PACKAGES = {
    "transformer-engine": "fused layers, float8",
    "fla-core": "kernels of gated delta nets (Qwen3-Next, Qwen3.5)",
    "sglang-kernel": "SGLang's kernels",
    "torch-memory-saver": "an engine's memory is free while models train",
}
# The oldest driver for each major version of CUDA ("CUDA minor version compatibility" in the toolkit's release notes).
LEAST_DRIVERS = {"12": 525, "13": 580}
OPEN_FILES = 4096  # Ray's raylet and object store hold hundreds of sockets for each process of a node
CLOCK_SECONDS = 5.0
BUSY_GPU = 0.05


@dataclass(frozen=True)
class Finding:
    """A line of the table of `megarl doctor`.

    Attributes:
        level: OK, WARNING (the job may run, but worse) or FAILURE (it will not run).
        what: the subject of the check.
        found: its result.
        advice: the remedy; empty where none is needed.
        command: a command for the remedy, if there is one.
    """

    level: str
    what: str
    found: str
    advice: str = ""
    command: str = ""


def check_nodes(
    nodes: Sequence[NodeFacts], gpus: Sequence[int | None], needed: dict[str, int]
) -> list[Finding]:
    """Findings about the machines of a cluster.

    Args:
        gpus: for each machine, the GPUs that the job takes of it; None: it runs without GPUs; 0: it has no devices there, only its
            controller.
        needed: bytes of "memory", "shared_memory" and "disk" that a node should have free at least.
    """
    found = [*_between(nodes)]
    for node, taken in zip(nodes, gpus, strict=True):
        found += _check_controller(node, needed) if taken == 0 else check_node(node, taken, needed)
    return found


def check_node(node: NodeFacts, gpus: int | None, needed: dict[str, int]) -> list[Finding]:
    """Findings about one machine by itself; arguments as of `check_nodes`."""
    on_gpus = gpus is not None
    found = [*_packages(node, on_gpus), *_gpus(node, gpus), *(_drivers(node) if on_gpus else ())]
    return [*found, *_limits(node, needed)]


def _check_controller(node: NodeFacts, needed: dict[str, int]) -> list[Finding]:
    """Findings about a machine on which the job has no devices."""
    of_ranks = ("memory", "shared_memory")
    return [
        *_packages(node, on_gpus=False),
        *_limits(node, {name: least for name, least in needed.items() if name not in of_ranks}),
    ]


def _between(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Findings about facts that must be the same on all nodes."""
    first = nodes[0]
    for name in sorted({name for node in nodes for name in node.versions}):
        versions = {node.host: node.versions.get(name, "none") for node in nodes}
        if len(set(versions.values())) > 1:
            listed = ", ".join(f"{host} {version}" for host, version in versions.items())
            yield Finding(FAILURE, name, listed, "install the same version on all nodes")
    pythons = {node.host: node.python for node in nodes}
    if len(set(pythons.values())) > 1:
        yield Finding(FAILURE, "Python", str(pythons), "Ray needs the same version on all nodes")
    advice = "synchronise them (NTP): logs and the order of failures are compared by time"
    for node in nodes[1:]:
        late = node.clock - first.clock
        if abs(late) > CLOCK_SECONDS:
            yield Finding(WARNING, "clocks", f"{node.host} is {late:+.0f} s from {first.host}", advice)
    advice = "put trainer.default_local_dir on a file system that all nodes share: every rank writes its part of a checkpoint there"
    for node in nodes:
        if not node.probe:
            found = f"{node.host} does not see what {first.host} wrote there"
            yield Finding(FAILURE, "run folder", found, advice)


def _packages(node: NodeFacts, on_gpus: bool) -> Iterator[Finding]:
    advice, command = "install it as below", install_command(on_gpus)
    for name, purpose in PURPOSES.items():
        version = node.versions.get(name)
        if version is None:
            yield Finding(FAILURE, name, f"not installed on {node.host}: {purpose}", advice, command)
        elif name in KNOWN and not version.startswith(KNOWN[name]):
            known = " or ".join(KNOWN[name])
            yield Finding(WARNING, name, f"{version} on {node.host}", f"megarl was tried with {known}")
        else:
            yield Finding(OK, name, f"{version} on {node.host}")
    others = [name for name in node.missing if name not in PURPOSES]
    if others:
        what = f"not installed on {node.host}: {', '.join(others)}"
        yield Finding(FAILURE, "what these import", what, advice, command)
    for name, purpose in GPU_PACKAGES.items() if on_gpus else ():
        if name not in node.versions:
            yield Finding(WARNING, name, f"not installed on {node.host}: {purpose}", advice, command)


def _gpus(node: NodeFacts, wanted: int | None) -> Iterator[Finding]:
    if wanted is None:
        yield Finding(OK, "devices", f"processes on {node.cores} cores of {node.host}, no GPUs")
        return
    listed = f"{len(node.gpus)} on {node.host}"
    listed += f", {node.gpus[0].name}, driver {node.gpus[0].driver}" if node.gpus else ""
    if len(node.gpus) < wanted:
        yield Finding(FAILURE, "GPUs", listed, f"the job takes {wanted} of them")
        return
    yield Finding(OK, "GPUs", listed)
    for number, gpu in enumerate(node.gpus[:wanted]):
        if gpu.used > BUSY_GPU * gpu.memory:
            found = f"{gpu.used / GIB:.1f} of {gpu.memory / GIB:.0f} GiB in use on {node.host}"
            yield Finding(FAILURE, f"GPU {number}", found, "end what runs there (nvidia-smi)")


def _drivers(node: NodeFacts) -> Iterator[Finding]:
    """Whether torch finds the GPUs."""
    if "torch" in node.versions and node.cuda is None:
        what = f"torch on {node.host} is built without it"
        yield Finding(FAILURE, "CUDA", what, "install another torch, as below", install_command(on_gpus=True))
    least = LEAST_DRIVERS.get((node.cuda or "").split(".")[0])
    for driver in sorted({gpu.driver for gpu in node.gpus}):
        if least is not None and int(driver.split(".")[0]) < least:
            # A warning: with NVIDIA's cuda-compat libraries, which images have, GPUs of data centers run nonetheless.
            found = f"{driver} on {node.host}, and torch is built for CUDA {node.cuda}"
            advice = (
                f"install driver {least} or newer (or, for GPUs of data centers, the package cuda-compat)"
            )
            yield Finding(WARNING, "GPU driver", found, advice)


def _limits(node: NodeFacts, needed: dict[str, int]) -> Iterator[Finding]:
    """Room in memory and on the disk, open files, and the host's own name."""
    for name, what, free in (
        ("memory", "memory", node.available),
        ("shared_memory", SHARED_MEMORY, node.shared_memory),
        ("disk", "disk of the run folder", node.disk),
    ):
        if free is None:
            yield Finding(WARNING, what, f"not there on {node.host}", "weights then go through /tmp, a disk")
            continue
        least, found = needed.get(name, 0), f"{free / GIB:.1f} GiB free on {node.host}"
        if free < least:
            yield Finding(FAILURE, what, found, f"the job needs about {least / GIB:.1f} GiB there")
        else:
            yield Finding(OK, what, found)
    if node.open_files < OPEN_FILES:
        found = f"{node.open_files} on {node.host}"
        yield Finding(WARNING, "open files", found, f"ulimit -n {OPEN_FILES} or more")
    if node.address is None:
        found = f"{node.host} does not resolve to an address on itself"
        yield Finding(FAILURE, "host name", found, "add it to /etc/hosts or DNS")
