"""The benchmark scripts still run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
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


def test_plan_scale_plans_671b_parameters_for_512_ranks_within_two_gib(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    sizes = ["--train=tp1-pp16-ep32", "--rollout=tp32-ep32"]
    result = subprocess.run(
        [sys.executable, "benchmarks/plan_scale.py", *sizes, "--out", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    (figures,) = json.loads(out.read_text())["results"]
    # A copy for each tensor of an engine rank: 8 experts x 3 in 58 layers, 8 of attention in 61, 4 of a dense and 6 of
    # another layer's MLP (router and shared experts), embedding, final norm and head.
    assert figures["num_copies"] == 512 * (58 * 8 * 3 + 61 * 8 + 3 * 4 + 58 * 6 + 3)
    assert figures["fewest_buckets"] <= figures["num_buckets"] <= 1.1 * figures["fewest_buckets"]
    assert figures["peak_mib"] < 2048


def test_weight_sync_measures_all_ways_and_finds_the_formulas_bytes(tmp_path: Path) -> None:
    out = tmp_path / "sync.json"
    result = subprocess.run(
        [
            sys.executable,
            "benchmarks/weight_sync.py",
            "--cases",
            "TP4 -> TP2",
            "--layers=1",
            "--rounds=1",
            "--out",
            out,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    (figures,) = json.loads(out.read_text())["results"]
    # HybridFlow's (tp - t_g p_g) / (t_g p_g t p) M, but for norms: these are on every device already.
    formula = (4 - 2) / (2 * 4) * figures["model_bytes"]
    for way in ("megarl", "megarl p2p"):
        assert 0.98 * formula < figures[way]["bytes_received_max"] <= formula
    assert figures["full gather"]["bytes_received_max"] > 2.9 * formula
    assert all(
        len(figures[way]["seconds"]) == 1 for way in ("megarl", "megarl p2p", "adapters", "full gather")
    )
    # Adapters of rank 16 in float32: q, k, v, o, gate, up and down of 768, 256 and 2304; on two ranks that cut either
    # A or B and have the other whole.
    cut = 768 + 2 * 256 + 768 + 2 * 2304 + 2304
    whole = 3 * 768 + 768 + 2 * 768 + 768
    assert figures["adapters"]["bytes_total"] == 4 * 16 * (cut + 2 * whole)
    assert figures["megarl"]["bytes_total"] >= figures["model_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_reward_rises_with_every_estimator_and_policy_loss() -> None:
    """Ten real runs of the demo's task; the script's exit code says whether a reward did not rise."""
    result = subprocess.run(
        [sys.executable, "benchmarks/algorithms.py", "--steps", "8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1450,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    runs = json.loads((ROOT / "outputs/algorithms/results.json").read_text())["results"]
    assert len(runs) == 10 and all(run["last"] > run["first"] for run in runs)
