"""The plan's seconds compared with those of a real GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.cli.main import main
from megarl.costs.hardware import TABLE

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = "recipes/qwen2.5_0.5b_ppo_single_gpu.yaml"


SECONDS = 400  # with a machine's first imports and compilations


@pytest.mark.gpu
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_planned_seconds_are_those_of_a_gpu_within_a_factor_of_two(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the phases that train are compared: SGLang's kernels may not be there."""
    monkeypatch.chdir(ROOT)
    out = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/gpu_single.py", "--train-only", "--steps", "3", "--out", str(out)]
    subprocess.run(command, check=True, timeout=SECONDS)
    figures = json.loads(out.read_text())
    known = [name for name in TABLE if name in figures["device"]]
    if not known:
        pytest.skip(f"{figures['device']} is not in the hardware table")
    sizes = ["data.max_prompt_length=512", "data.max_response_length=512"]
    assumed = ["--hardware", known[0], "--assume", "prompt=1", "--assume", "response=1"]
    assert main(["plan", "step", RECIPE, *sizes, *assumed, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["phases"]
    for phase in ("evaluate_models", "update"):
        assert 0.5 < figures["phases"][phase]["seconds"] / planned[phase]["seconds"] < 2.0, phase
