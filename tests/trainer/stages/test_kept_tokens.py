"""Trajectories with kept tokens: which losses refuse them, their metrics, and kept tokens of saved trajectories."""

from pathlib import Path

import numpy as np
import pytest

from megarl.config import DataConfig
from megarl.data.kept import KEPT_COUNTS, KEPT_IDS
from megarl.data.trajectories import append_column, write_trajectories
from megarl.trainer.stages.kept_tokens import check_kept, kept_metrics
from megarl.trainer.stages.saved_trajectories import read_step
from tests.data.test_kept import made
from tests.data.test_trajectories import make_trajectories
from tests.trainer.stages.test_given_responses import LOSS, make_config


def test_they_are_refused_where_distributions_are_compared() -> None:
    exact = make_config(LOSS, "actor_rollout_ref.actor.kl_loss_type=full")
    with pytest.raises(
        ValueError,
        match=r"trajectories with kept tokens with actor_rollout_ref.actor.kl_loss_type=full: the exact KL",
    ):
        check_kept(made(), exact)
    check_kept(made(), make_config(LOSS, "actor_rollout_ref.actor.kl_loss_type=k2"))
    check_kept(make_trajectories(), exact)


def test_metrics_are_of_tokens_that_the_policy_chose() -> None:
    """The policy drew eight of ten tokens: from 1, 2, 3, 2, 1, 1, 3 and 1 kept tokens."""
    table = made().take([0, 1, 3])
    found = {name.rpartition("/")[2]: value for name, value in kept_metrics(table).items()}
    assert found == pytest.approx({"mean": 14 / 8, "max": 3.0, "alone": 0.5})
    assert kept_metrics(make_trajectories()) == {}


def test_saved_ones_have_them(tmp_path: Path) -> None:
    table = append_column(made(), "score", np.zeros(4))
    path = write_trajectories(table, tmp_path / "step-000001.parquet")
    data = DataConfig(train_batch_size=2, max_prompt_length=8, max_response_length=8, train_files="x")
    read = read_step(path, data, 2)
    for name in (KEPT_IDS, KEPT_COUNTS):
        assert read[name].to_pylist() == table[name].to_pylist()
