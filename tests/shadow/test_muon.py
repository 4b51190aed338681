"""Ranks whose matrices Muon updates, on the CUDA branch, against the plan."""

from pathlib import Path

from examples.tiny_model import make_tiny_model
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, plan_memory
from megarl.shadow.comparison import compare
from megarl.shadow.dry_run import run_ranks
from tests.shadow.conftest import RECIPE, overrides


def test_ranks_take_what_was_planned(machine, tmp_path: Path) -> None:
    """TP2 DP2, with so few tokens that the largest matrix determines an update's peak."""
    sizes = {"hidden_size": 512, "ffn_hidden_size": 4096, "num_layers": 2}
    folder = make_tiny_model(tmp_path / "model", ["two words"], tie_word_embeddings=False, **sizes)
    keys = [
        *overrides(folder),
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
        "actor_rollout_ref.actor.optim.optimizer=muon",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
    ]
    (report,) = run_ranks(str(RECIPE), keys, [("actor", 0)], micro_batches=2, num_processes=1)
    config, inputs = read_inputs(str(RECIPE), keys, check=False)
    rows = [*compare(plan_memory(config, inputs, 80 * GIB, 0), report)]
    for row in rows:
        if row.phase in ("always", "release"):
            assert abs(row.difference) < 0.001, row
        elif row.phase in ("evaluate", "update"):
            assert abs(row.difference) < 0.05, row
    (update,) = (row for row in rows if row.phase == "update")
    # For gate and up, which two ranks share: the mean, the shards one by one and together, the normalised matrix, two copies of it
    # in bfloat16, and the products of 512 x 512.
    own = 4096 * 512
    assert update.planned == 4 * own + 16 * 2 * own + 4 * 512**2
    assert report["phases"]["update"]["left"] == 0
