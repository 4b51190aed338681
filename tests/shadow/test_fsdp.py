"""Ranks whose models Megatron-FSDP wraps, on the CUDA branch, against the plan."""

from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, plan_memory
from megarl.shadow.comparison import compare
from megarl.shadow.dry_run import run_ranks
from tests.shadow.conftest import RECIPE, overrides

ACTOR = "actor_rollout_ref.actor.megatron"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose layers and embedding are large compared with a micro-batch, as in real models; its head is not tied."""
    folder = tmp_path_factory.mktemp("shadow-fsdp") / "model"
    sizes = {"hidden_size": 512, "ffn_hidden_size": 1536, "num_layers": 4}
    return make_tiny_model(folder, ["two words"], tie_word_embeddings=False, **sizes)


@pytest.mark.parametrize("level", [pytest.param("optim_grads", marks=pytest.mark.slow), "optim_grads_params"])
def test_ranks_take_what_was_planned(machine, wide: Path, level: str) -> None:
    """An actor with TP2 DP2 and a reference with the same layout; the last rank of a critic with DP4 that recomputes its layers, whose
    shards are no larger than the first rank's."""
    keys = [
        *overrides(wide),
        f"{ACTOR}.pipeline_model_parallel_size=1",
        f"{ACTOR}.fsdp={level}",
        f"critic.megatron={{fsdp: {level}, pipeline_model_parallel_size: 1, recompute_granularity: full}}",
    ]
    reports = run_ranks(str(RECIPE), keys, [("actor", 0), ("critic", 3)], micro_batches=2, num_processes=1)
    config, inputs = read_inputs(str(RECIPE), keys, check=False)
    plan = plan_memory(config, inputs, 80 * GIB, 0)
    rows = [row for report in reports for row in compare(plan, report)]
    resident = [row for row in rows if row.phase in ("always", "release")]
    assert {row.owner for row in resident} == {
        *(f"{role}_{part}" for role in ("actor", "critic") for part in ("weights", "gradients", "optimizer")),
        "ref_weights",
    }
    for row in resident:  # ranks' shards of a bucket differ by its padding
        assert abs(row.difference) < 0.01, row
    passes = [row for row in rows if row.phase in ("evaluate", "update", "sync")]
    assert len(passes) == 5
    for row in passes:
        if row.phase != "sync":  # two buckets of half a GiB, which these weights do not fill
            assert abs(row.difference) < 0.05, row
    gathered = [row.owner for row in passes if row.phase == "sync"]
    more = " + gathered" if level == "optim_grads_params" else ""
    assert gathered == [f"actor_sync_buffers{more}"]
    for report in reports:
        assert report["phases"]["update"]["left"] == 0
