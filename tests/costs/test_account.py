"""The benchmark that measures memory with and without adapters still runs, and its measurements equal the plan."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_memory_account_measures_what_is_planned(tmp_path: Path) -> None:
    out = tmp_path / "account.json"
    command = [sys.executable, "benchmarks/memory_account.py", "--families", "qwen2", "--layouts", "dp2"]
    result = subprocess.run([*command, "--out", out], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    whole, adapted = json.loads(out.read_text())["results"]
    for entry in (whole, adapted):
        for term in ("weights", "gradients", "optimizer"):
            found, planned = entry["terms"][term]
            assert found == planned
    # Only trained weights have gradients.
    assert adapted["terms"]["gradients"][0] < 0.25 * whole["terms"]["gradients"][0]
