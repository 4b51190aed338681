"""Whole runs in which a policy learns from a teacher alone: it comes closer, and rewards have no part in it."""

from pathlib import Path

import pytest

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from tests.fixtures.runs import PPO, on, steps, succeed
from tests.trainer.roles.test_weight_sync import SMALL

ACTOR = "actor_rollout_ref.actor"
WAYS = {
    "sampled": [
        "actor_rollout_ref.ref.megatron={pipeline_model_parallel_size: 2}",
        f"{ACTOR}.kl_loss_type=k2",
    ],
    "whole": [
        f"{ACTOR}.kl_loss_type=full",
        f"{ACTOR}.kl_loss_beta=0.5",
        "actor_rollout_ref.model.lora.rank=8",
        "actor_rollout_ref.rollout.lora_sync=merged",
    ],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the task's tokens, wider than its model."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    make_tiny_model(folder, arithmetic_texts(), hidden_size=192, num_layers=2, seed=5)
    return folder


@pytest.mark.parametrize("way", ["sampled", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_policy_comes_closer_to_its_teacher(task: Path, teacher: Path, tmp_path: Path, way: str) -> None:
    """In processes of its own by its log-probs, or in the actor's by its whole distributions, where the actor has adapters."""
    said = succeed(
        "train", *PPO, *on(task, tmp_path), *SMALL, f"actor_rollout_ref.ref.model.path={teacher}", f"{ACTOR}.pg_loss_coef=0",
        f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=1", "trainer.total_training_steps=6", *WAYS[way],
    )  # fmt: skip
    found = steps(tmp_path)
    first, last = found[0]["actor/kl_loss"], found[-1]["actor/kl_loss"]
    assert last < 0.9 * first, (first, last, said)
    for step in found:
        assert step["actor/loss"] == pytest.approx(step["actor/kl_loss"], rel=1e-5)
        assert step["actor/pg_loss"] != step["actor/loss"]
