"""The benchmark scripts still run."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.costs.flops import LayerFlops, ModelFlops
from megarl.shadow import device

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "--hidden-size=64", "--length=32", "--batch-tokens=256", "--micro-batch-tokens=64", "--steps=2", "--warmup=1",
)  # fmt: skip


def run(script: str, *arguments: str, timeout: int = 450) -> subprocess.CompletedProcess:
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def report_of(folder: Path, script: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark; returns the report that it writes."""
    out = folder / "report.json"
    result = run(script, *arguments, "--out", str(out))
    assert result.returncode == 0, result.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_megatron_step_measures_layouts_on_the_same_work(tmp_path: Path) -> None:
    one, pp2 = report_of(tmp_path, "megatron_step.py", *SMALL, "--layouts", "1", "pp2")["results"]
    assert (one["ranks"], pp2["ranks"]) == (1, 2)
    assert abs(one["first_loss"] - pp2["first_loss"]) < 1e-4
    assert one["last_loss"] < one["first_loss"]
    for entry in (one, pp2):
        rate = entry["tokens_per_second"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert len(entry["seconds_per_step"]) == 2


def test_megatron_step_refuses_what_cannot_be_compared() -> None:
    result = run("megatron_step.py", *SMALL, "--layouts", "dp3")
    assert result.returncode == 2
    assert "layout 'dp3': --batch-tokens 256 must be a multiple of 192" in result.stderr


def test_plan_scale_plans_671b_parameters_for_512_ranks_within_two_gib(tmp_path: Path) -> None:
    sizes = ("--train=tp1-pp16-ep32", "--rollout=tp32-ep32")
    (figures,) = report_of(tmp_path, "plan_scale.py", *sizes)["results"]
    # A copy for each tensor of an engine rank: 8 experts x 3 in 58 layers, 8 of attention in 61, 4 of a dense and 6 of
    # another layer's MLP (router and shared experts), embedding, final norm and head.
    assert figures["num_copies"] == 512 * (58 * 8 * 3 + 61 * 8 + 3 * 4 + 58 * 6 + 3)
    assert figures["fewest_buckets"] <= figures["num_buckets"] <= 1.1 * figures["fewest_buckets"]
    assert figures["peak_mib"] < 2048


def test_weight_sync_measures_all_ways_and_finds_the_formulas_bytes(tmp_path: Path) -> None:
    options = ("--cases", "TP4 -> TP2", "--layers=1", "--rounds=1")
    (figures,) = report_of(tmp_path, "weight_sync.py", *options)["results"]
    # HybridFlow's (tp - t_g p_g) / (t_g p_g t p) M, except for norms, which are on every device already.
    formula = (4 - 2) / (2 * 4) * figures["model_bytes"]
    for way in ("megarl", "megarl p2p"):
        assert 0.98 * formula < figures[way]["bytes_received_max"] <= formula
    assert figures["full gather"]["bytes_received_max"] > 2.9 * formula
    assert all(
        len(figures[way]["seconds"]) == 1 for way in ("megarl", "megarl p2p", "adapters", "full gather")
    )
    # Adapters of rank 16 in float32: q, k, v, o, gate, up and down of 768, 256 and 2304; two ranks cut either
    # A or B and have the other one unsharded.
    cut = 768 + 2 * 256 + 768 + 2 * 2304 + 2304
    whole = 3 * 768 + 768 + 2 * 768 + 768
    assert figures["adapters"]["bytes_total"] == 4 * 16 * (cut + 2 * whole)
    assert figures["megarl"]["bytes_total"] >= figures["model_bytes"]


def test_sampling_reads_each_logit_once_and_sglang_many_times(tmp_path: Path) -> None:
    problem = device.missing()
    if problem is not None:
        pytest.skip(problem)
    found = {row["way"]: row for row in report_of(tmp_path, "sampling.py", "--requests=8")["results"]}
    ours = found.pop("megarl")
    logits = 8 * 151936
    assert ours["launches"] == 2 and ours["bytes"] == 4 * logits
    assert ours["memory"] < 0.01 * ours["bytes"]
    assert len(found) == 2
    for row in found.values():
        assert row["launches"] > 8 and row["bytes"] > 10 * ours["bytes"] and row["memory"] >= 8 * logits


def test_packing_is_more_even_than_the_usual_ways(tmp_path: Path) -> None:
    report = report_of(tmp_path, "packing.py", "--batches=2", "--dp", "2", "32")
    # The command has no path of this machine.
    assert report["command"] == "python benchmarks/packing.py --batches=2 --dp 2 32"
    found = {(r["task"], r["way"], r["dp"]): r for r in report["results"]}
    assert len(found) == 2 * 4 * 2
    for task in ("gsm8k", "reasoning"):
        ours = found[task, "megarl", 32]
        assert ours["padding"] == 0 < ours["padding_cp2"] < 0.02
        for way in ("in order", "LPT", "Karmarkar-Karp"):
            assert ours["rank_cost"] < found[task, way, 32]["rank_cost"]
            assert ours["micro_batches"] <= found[task, way, 32]["micro_batches"]
    assert found["gsm8k", "megarl", 32]["micro_cost"] < 0.03 < found["gsm8k", "in order", 32]["micro_cost"]


def test_dispatch_counts_the_controllers_seconds(tmp_path: Path) -> None:
    sizes = (
        "--ranks=16", "--tp=2", "--pp=2", "--hosts=1", "--trajectories=256", "--shortest=20", "--longest=200",
    )  # fmt: skip
    (found,) = report_of(tmp_path, "dispatch.py", *sizes, "--steps=1", "--kinds=PPO", "--store-gib=0.5")[
        "results"
    ]
    assert len(found["steps"]) == 1
    best = found["best"]
    assert 256 * (100 + 20) <= best["tokens"] <= 256 * (300 + 200)
    # 4 bytes per token; then, for each token of the responses, also old log-probs, values, advantages and returns.
    assert 4 * best["tokens"] <= best["bytes_put"][0]
    assert best["bytes_put"][1] > best["bytes_put"][0] + 4 * 4 * (best["tokens"] - 256 * 300)
    phases = best["phases"]
    assert list(phases) == ["sync", "generate", "evaluate_models", "update"]
    assert found["dispatch"] == sum(spent["controller"] for spent in phases.values())
    assert all(spent["controller"] > 0 for spent in phases.values())


def test_the_tables_of_results_are_those_of_the_raw_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    record = importlib.import_module("record")
    page, readme = ((ROOT / name).read_text() for name in ("docs/results.md", "README.md"))
    assert f"{record.BEGIN}\n\n{record.table(record.RESULTS)}\n\n{record.END}" in page
    assert f"{record.BEGIN}\n\n{record.short_table(record.RESULTS)}\n\n{record.END}" in readme
    recorded = {file.stem for file in record.RESULTS.glob("*.json")}
    assert recorded <= set(record.RECORDINGS)
    for name in recorded:
        assert f"[{name}.json]" in page
    # Another figure gives another table: no part of it is written by hand.
    report = json.loads((record.RESULTS / "dispatch.json").read_text())
    report["results"][0]["dispatch"] = 0.12345 * 60
    (tmp_path / "dispatch.json").write_text(json.dumps(report))
    for text, table in ((page, record.table), (readme, record.short_table)):
        copy = tmp_path / "copy.md"
        copy.write_text(text)
        record.write_table(copy, table(tmp_path))
        written = copy.read_text()
        assert "12.3% of a step of 60 s" in written
        assert "chaos.json" not in written and "kills and stops of a real run" not in written
        assert written.partition(record.BEGIN)[0] == text.partition(record.BEGIN)[0]
        assert written.partition(record.END)[2] == text.partition(record.END)[2]


@pytest.mark.slow
@pytest.mark.parametrize("train_only", [False, True])
def test_gpu_single_runs_on_a_cpu_with_a_tiny_model(train_only: bool, tmp_path: Path) -> None:
    out = tmp_path / "single.json"
    options = ("--shrink", "--steps=1", "--out", str(out), *(["--train-only"] if train_only else []))
    result = run("gpu_single.py", *options)
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    phases = report["phases"]
    assert ("generate" in phases) != train_only
    assert ("no SGLang" in report["what"]) == train_only == ("the training phases alone" in result.stdout)
    for phase in ("evaluate_models", "update", "step"):
        figures = phases[phase]
        assert figures["tokens_per_s"] == pytest.approx(8 * (64 + 16) / figures["seconds"])
    assert report["peak_mib"] > 300  # of processes that have all imported torch


def test_gpu_single_says_that_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run("gpu_single.py")
    assert result.returncode == 2
    assert "there is no CUDA GPU here; --shrink runs the same code" in result.stderr


def test_operations_of_a_step_on_a_single_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked by hand: 2 operations per weight and token forward, 6 with backward; logits at response tokens only."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("gpu_single")
    config = module.resolve(module.load_config(module.TrainConfig, module.RECIPE, []))
    job = module.Job({}, batch=2, prompt=30, response=10)
    layer = LayerFlops(dense=100, experts=0, active=0, pair=8, decode_pair=8, is_moe=False, shared=False)
    flops = {"lm": ModelFlops((layer, layer), head=50), "value": ModelFlops((layer, layer), head=5)}
    body = 2 * 40 * (2 * 2 * 100 + 2 * 8 * 41 / 2)  # 2 texts of 40 tokens, 2 layers, 20.5 pairs a token
    lm, value = body + 2 * 10 * 2 * 50, body + 2 * 10 * 2 * 5
    found = module.phase_flops(config, job, flops)
    assert found == {"generate": lm, "evaluate_models": 2 * lm + value, "update": 3 * (lm + value)}
    steps = [{"timing_s/update": seconds, "timing_s/step": 2 * seconds} for seconds in (4.0, 1.0, 2.0)]
    phases = module.phase_figures(steps, job, found, peak=3 * (lm + value))
    assert phases["update"] == {"seconds": 2.0, "tokens_per_s": 40.0, "mfu": 0.5}
    assert phases["step"] == {"seconds": 4.0, "tokens_per_s": 20.0, "mfu": None}
    assert set(phases) == {"update", "step"}
    assert (
        module.why_no_engine(True, lambda name: None if name == "sgl_kernel" else name)
        == "sgl_kernel not installed"
    )
    assert module.why_no_engine(False, lambda name: name) is None


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_reward_rises_with_every_estimator_and_policy_loss() -> None:
    """Ten real runs of the demo's task; the script's exit code says whether a reward did not rise."""
    result = run("algorithms.py", "--steps", "8", timeout=1450)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = json.loads((ROOT / "outputs/algorithms/results.json").read_text())["results"]
    assert len(runs) == 10 and all(run["last"] > run["first"] for run in runs)


def test_gpu_single_asks_for_the_gpu_that_torch_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine with several GPUs, torch's device 0 need not be nvidia-smi's."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("gpu_single")
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "asked $*"\n')
    (tmp_path / "python").write_text("#!/bin/sh\necho 8c2b-1f\n")
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    module.first_gpu.cache_clear()
    asked = "asked --id=GPU-8c2b-1f --query-gpu=memory.used --format=csv,noheader,nounits"
    assert module.ask_gpu("memory.used") == asked
    module.first_gpu.cache_clear()


def test_gateway_serves_sessions_alone_and_together(tmp_path: Path) -> None:
    alone, together = report_of(tmp_path, "gateway.py", "--sessions=4", "--at-once=2", "--turns=2")["results"]
    assert (alone["at_once"], together["at_once"]) == (1, 2)
    for found in (alone, together):
        assert found["sessions_per_second"] > 0 and 0 < found["median_ms"] <= found["p95_ms"]
