"""The GPUs of a machine, without initialising CUDA."""

import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU as reported by nvidia-smi; memory in bytes."""

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
    return tuple(Gpu(name, driver, int(total) << 20, int(used) << 20) for name, driver, total, used in rows)
