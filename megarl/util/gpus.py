"""The GPUs of a machine, without initialising CUDA."""

import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU as reported by nvidia-smi; memory in bytes, used 0 where that is not reported."""

    name: str
    driver: str
    memory: int
    used: int


def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs of this machine, without initialising CUDA."""
    fields = "--query-gpu=name,driver_version,memory.total,memory.used"
    query = ["nvidia-smi", fields, "--format=csv,noheader,nounits"]
    if shutil.which(query[0]) is None:
        return ()
    listed = subprocess.run(query, capture_output=True, text=True, timeout=60)
    if listed.returncode != 0:
        return ()
    rows = [line.split(", ") for line in listed.stdout.splitlines() if line.strip()]
    return tuple(Gpu(name, driver, *_memory(total, used)) for name, driver, total, used in rows)


def _memory(total: str, used: str) -> tuple[int, int]:
    """Bytes in all and in use, of MiB. A GPU that shares the memory of its machine (GB10) has "[N/A]" for both."""
    if total.isdecimal() and used.isdecimal():
        return int(total) << 20, int(used) << 20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
