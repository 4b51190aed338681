"""What nvidia-smi lists."""

from pathlib import Path

import psutil
import pytest

from megarl.util.gpus import Gpu, gpus_here


def lists(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: str) -> None:
    script = folder / "nvidia-smi"
    script.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_gpus_are_read(tmp_path, monkeypatch):
    lists(tmp_path, monkeypatch, "NVIDIA H200, 570.1, 143771, 4", "NVIDIA H200, 570.1, 143771, 99000")
    assert gpus_here() == (
        Gpu("NVIDIA H200", "570.1", 143771 << 20, 4 << 20),
        Gpu("NVIDIA H200", "570.1", 143771 << 20, 99000 << 20),
    )


def test_a_gpu_without_memory_of_its_own_has_the_machines(tmp_path, monkeypatch):
    lists(tmp_path, monkeypatch, "NVIDIA GB10, 580.95, [N/A], [N/A]")
    (gpu,) = gpus_here()
    assert gpu == Gpu("NVIDIA GB10", "580.95", psutil.virtual_memory().total, 0)
