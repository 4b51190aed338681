"""What `make` reports before it installs anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("answers", ["echo Python 3.10.12; exit 1", "exit 127"])
def test_a_python_that_will_not_do_is_refused(tmp_path: Path, answers: str) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("Makefile", "setup.py"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    python = folder / "python3"
    python.write_text(f"#!/bin/sh\n{answers}\n")
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={python}"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "megarl needs Python >= 3.11" in done.stderr
    assert "Name another: make demo PYTHON=" in done.stderr
    assert not (folder / ".venv").exists()
