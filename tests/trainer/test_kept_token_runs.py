"""A complete run that samples from a part of the vocabulary, with a critic, a reference and an engine of several devices."""

from pathlib import Path

import numpy as np
import pytest

from megarl.data.kept import KEPT_COUNTS
from megarl.data.trajectories import ragged, read_trajectories
from tests.fixtures.runs import PPO, megarl, on, steps, succeed


@pytest.mark.slow
def test_updates_are_on_policy_exactly_and_can_be_replayed(task: Path, tmp_path: Path) -> None:
    """Two steps with one update each; a forward pass before it computes old log-probs, since rewards include the KL to the reference."""
    succeed(
        "train", *PPO, *on(task, tmp_path), "trainer.total_training_steps=2", "trainer.save_freq=1",
        "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.rollout.top_p=0.2", "actor_rollout_ref.rollout.top_k=300",
        "actor_rollout_ref.rollout.min_p=0.001", "actor_rollout_ref.rollout.temperature=0.9",
    )  # fmt: skip
    first, second = steps(tmp_path)
    for number, step in enumerate((first, second), 1):
        assert step["actor/ratio_mean"] == 1.0 and step["actor/ppo_kl"] == 0.0 == step["actor/pg_clipfrac"]
        assert step["training/rollout_log_prob_diff_max"] < 1e-4
        batch = read_trajectories(tmp_path / "rollouts" / f"step-{number:06d}.parquet")
        counts, log_probs = ragged(batch, KEPT_COUNTS)[0], ragged(batch, "old_log_probs")[0]
        assert 1 <= counts.min() < counts.max() <= 300 and step["rollout/kept_tokens/max"] == counts.max()
        assert not log_probs[counts == 1].any()
        assert step["rollout/kept_tokens/alone"] == pytest.approx(np.mean(counts == 1))
        assert step["actor/entropy"] < np.log(counts).mean()
    # As in a run without kept tokens, the policy equals the reference at first.
    assert first["actor/ref_kl"] == 0.0 != second["actor/ref_kl"]
    replayed = megarl("replay", tmp_path, "--step", "2")
    assert replayed.returncode == 0 and "numbers are equal bit for bit" in replayed.stdout
