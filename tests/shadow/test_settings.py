"""Settings of a job that change what a rank's CUDA branch does: each runs through its steps on tiny ranks, in one process."""

import json
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, plan_memory
from megarl.shadow import dry_run
from megarl.shadow.comparison import compare
from megarl.shadow.requests import Request
from tests.shadow.conftest import RECIPE, overrides

POLICY = "actor_rollout_ref"
MEGATRON = f"{POLICY}.actor.megatron"
GRPO = ("critic=null", "algorithm.adv_estimator=grpo")
CASES = {
    "context parallel": [f"{MEGATRON}.pipeline_model_parallel_size=1", f"{MEGATRON}.context_parallel_size=2"],
    "virtual stages, gradients reduced meanwhile, no distributed optimizer": [
        f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
        f"{MEGATRON}.overlap_grad_reduce=true",
        f"{MEGATRON}.use_distributed_optimizer=false",
    ],
    "optimizer on the host, engines in float8, unchanged slices not sent": [
        f"{POLICY}.actor.optim.optimizer_cpu_offload=true",
        f"{POLICY}.rollout.quantization=fp8",
        f"{POLICY}.rollout.quantization_block_size=[16,16]",
        f"{POLICY}.rollout.sync_skip_unchanged=true",
    ],
    "float16": [f"{MEGATRON}.dtype=float16"],
    "merged adapters on a base in float8": [
        *(f"{POLICY}.model.lora.{key}" for key in ("rank=8", "base_dtype=float8", "base_block=16")),
        f"{POLICY}.rollout.lora_sync=merged",
    ],
    "a middle stage, norms of queries and keys": [
        f"{MEGATRON}.tensor_model_parallel_size=1",
        f"{MEGATRON}.pipeline_model_parallel_size=4",
    ],
}
OTHER_MODEL = {"a middle stage, norms of queries and keys": "qwen3"}  # the families of other models
RANK = 2  # a rank of the second stage, where there are two


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model's folder of each case."""
    folder = tmp_path_factory.mktemp("models")
    for family in set(OTHER_MODEL.values()):
        sizes = {"hidden_size": 128, "ffn_hidden_size": 384, "num_layers": 4}
        make_tiny_model(folder / family, ["two words"], family=family, **sizes)
    return {name: folder / OTHER_MODEL[name] if name in OTHER_MODEL else model for name in CASES}


@pytest.fixture(scope="module")
def found(machine, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The report of a rank for each case."""
    folder = tmp_path_factory.mktemp("settings")
    outs = {name: folder / f"{number}.jsonl" for number, name in enumerate(CASES)}
    requests = [
        Request(str(RECIPE), keys_of(name, models[name]), [("actor", RANK)], str(outs[name]), micro_batches=4)
        for name in CASES
    ]
    dry_run.start(requests, folder / "log").wait()
    lines = {name: out.read_text().splitlines() if out.exists() else [] for name, out in outs.items()}
    failed = next((name for name, each in lines.items() if not each), None)
    assert failed is None, f"{failed}: {(folder / 'log').read_text()[-3000:]}"
    return {name: json.loads(each[0]) for name, each in lines.items()}


def keys_of(name: str, model: Path) -> list[str]:
    return [*overrides(model), *GRPO, *CASES[name]]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_runs_through_its_steps_and_takes_what_was_planned(
    found, name: str, models: dict[str, Path]
) -> None:
    report, keys = found[name], keys_of(name, models[name])
    assert set(report["phases"]) == {"evaluate", "first_update", "update", "sync", "save", "load"}
    assert report["phases"]["update"]["left"] == 0
    config, inputs = read_inputs(str(RECIPE), keys, check=False)
    rows = list(compare(plan_memory(config, inputs, 80 * GIB, 0), report))
    for row in rows:
        if row.phase == "always":
            assert row.planned == row.found, row
        elif row.phase in ("evaluate", "update"):
            assert abs(row.difference) < 0.05, row
        elif row.phase == "sync":  # two buckets of half a GiB, which these weights do not fill
            assert row.planned > row.found, row
    assert len(rows) >= 6 and report["saved"] > 0
    # Packing a bucket takes few launches, also where weights are computed from float8 blocks and adapters.
    assert all(launches <= 10 for _, launches in report["sent_buckets"])
