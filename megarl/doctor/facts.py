"""What a machine of the cluster is and has, as facts; judged in `doctor_checks`. Runs on every node, imports little."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.util.packages import installed, pinned, requirements

PACKAGES = (
    "torch", "megatron-core", "sglang", "ray", "transformers", "pyarrow", "safetensors", "tensorboard",
    "transformer-engine", "flash-attn", "sglang-kernel", "torch-memory-saver", "py-spy",
)  # fmt: skip
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Gpu:
    """As nvidia-smi tells; bytes."""

    name: str
    driver: str
    memory: int
    used: int


@dataclass(frozen=True)
class NodeFacts:
    """Of one machine; bytes and seconds.

    Attributes:
        versions: of installed packages, by name.
        missing: packages of requirements/cpu.txt that are not installed; that of GPUs has them, too.
        cuda: the version that torch is built for; None: a build without CUDA, or no torch.
        address: what the host's own name resolves to; None: nothing.
        clock: seconds since the epoch.
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
    """Look at this machine.

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
        clock=time.time(),
        probe=Path(folder, probe).is_file(),
    )


def _cuda() -> str | None:
    """As torch's version.py says, without importing torch."""
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


def gpus_here() -> tuple[Gpu, ...]:
    """This machine's, without CUDA being initialised."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,memory.used",
        "--format=csv,noheader,nounits",
    ]
    if shutil.which(query[0]) is None:
        return ()
    listed = subprocess.run(query, capture_output=True, text=True, timeout=60)
    if listed.returncode != 0:
        return ()
    rows = [line.split(", ") for line in listed.stdout.splitlines() if line.strip()]
    return tuple(Gpu(name, driver, int(total) << 20, int(used) << 20) for name, driver, total, used in rows)
