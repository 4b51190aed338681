"""A file system of its own for tests that fill it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[Path]:
    """Mounts a file system of that size at `folder`; skips the test where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"mounting a small file system needs root: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        # lazily: processes that a failed test left running may still have files open there
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
