"""The compiled device of shadow runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.shadow import device


@pytest.mark.slow
def test_each_environment_compiles_a_device_of_its_own(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two environments with the same version of torch; the one that compiled first is deleted."""
    torch, cache = device._torch_folder(), tmp_path / "cache"
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to(torch)
    second.symlink_to(torch)
    monkeypatch.setattr(device, "_torch_folder", lambda: first)
    compiled = device.build(cache)
    assert device.build(cache) == compiled and len(list(cache.iterdir())) == 1
    first.unlink()
    monkeypatch.setattr(device, "_torch_folder", lambda: second)
    other = device.build(cache)
    assert other != compiled
    # The library finds torch's libraries. It is loaded in another process, since it stays loaded.
    subprocess.run([sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", other], check=True)
