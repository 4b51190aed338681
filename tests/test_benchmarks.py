"""The benchmark scripts still run."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "--hidden-size=64",
    "--length=32",
    "--batch-tokens=256",
    "--micro-batch-tokens=64",
    "--steps=2",
    "--warmup=1",
]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "benchmarks/megatron_step.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_megatron_step_measures_layouts_on_the_same_work(tmp_path: Path) -> None:
    result = run(*SMALL, "--out", str(tmp_path / "step.json"), "--layouts", "1", "pp2")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "step.json").read_text())
    one, pp2 = report["results"]
    assert (one["ranks"], pp2["ranks"]) == (1, 2)
    assert abs(one["first_loss"] - pp2["first_loss"]) < 1e-4
    assert one["last_loss"] < one["first_loss"]
    for entry in (one, pp2):
        rate = entry["tokens_per_second"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert len(entry["seconds_per_step"]) == 2


def test_megatron_step_refuses_what_cannot_be_compared() -> None:
    result = run(*SMALL, "--layouts", "dp3")
    assert result.returncode == 2
    assert "layout 'dp3': --batch-tokens 256 must be a multiple of 192" in result.stderr
