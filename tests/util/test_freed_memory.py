"""Freed memory is kept, and given back when that is asked for; in a process of its own."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A hundred times 64 MiB that are used and freed; then what is left of them in memory, and what after giving it back.
USE = """
import ctypes, json, resource, sys, threading
import psutil
from megarl.util.freed_memory import keep_freed_memory, return_freed_memory
libc, size = ctypes.CDLL(None), 64 << 20
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "keep":
    keep_freed_memory()
def use(times):
    for _ in range(times):
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
def resident():
    return psutil.Process().memory_info().rss >> 20
def measure():
    before = resident()
    use(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use(100)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    kept = resident() - before
    return_freed_memory()
    print(json.dumps({"faults": faults, "kept": kept, "left": resident() - before}))
thread = threading.Thread(target=measure)  # as an actor's call is not in its process's first thread
thread.start()
thread.join()
"""


def measured(how: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", USE, how], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_is_kept_and_given_back() -> None:
    """In MiB, and faults of 4 KiB pages, or of larger ones."""
    usual, kept = measured("usual"), measured("keep")
    assert kept["faults"] * 20 < usual["faults"]
    assert usual["kept"] < 16 and kept["kept"] >= 60 and kept["left"] < 16
