"""How a step with a number that is not finite ends; columns and runs are made by hand."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megarl.algorithms.kl import AdaptiveKLController
from megarl.cluster import WorkerFailed
from megarl.cluster.ranks import RankError, RankProcess
from megarl.config import TrainConfig, load_config, resolve
from megarl.data.trajectories import append_column, list_lengths, ragged, read_trajectories, replace_column
from megarl.trainer.stages.advantages import Controls, compute_batch_advantages, make_controls
from megarl.trainer.stages.nonfinite import (
    COMPUTED,
    GENERATED,
    LEARNT_FROM,
    NotFinite,
    finite_step,
    rank_errors_as_not_finite,
    require_finite,
)
from megarl.trainer.stages.saved_trajectories import read_step
from tests.trainer.trajectories import FakeRun, scored

ACTOR = "actor_rollout_ref.actor"


def settings(*overrides: str) -> TrainConfig:
    required = [
        "data.train_files=a.parquet", "data.train_batch_size=2", "data.max_prompt_length=8", "data.max_response_length=8",
        "actor_rollout_ref.model.path=m", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_max_token_len_per_gpu=16",
        f"{ACTOR}.optim.lr=1e-3", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2",
    ]  # fmt: skip
    return resolve(load_config(TrainConfig, None, [*required, *overrides]))


def batch() -> pa.Table:
    """Two prompts with two responses each, of 1 to 4 tokens."""
    return scored({"a": [1.0, 0.0], "b": [0.0, 1.0]}).table


def with_tokens(table: pa.Table, name: str, row: int | None = None, value: float = np.nan) -> pa.Table:
    """`table` with a column that is -1 at each token, except `value` at the last token of `row`."""
    offsets = np.concatenate([[0], np.cumsum(list_lengths(table, "response_ids"))]).astype(np.int64)
    flat = np.full(offsets[-1], -1.0, np.float32)
    if row is not None:
        flat[offsets[row + 1] - 1] = value
    if name in table.column_names:
        return replace_column(table, name, append_column(table, "x", (flat, offsets))["x"].chunk(0))
    return append_column(table, name, (flat, offsets))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_column_and_trajectory_are_named(value: float) -> None:
    table = batch()
    require_finite(table, [*GENERATED, *COMPUTED, *LEARNT_FROM])
    table = with_tokens(with_tokens(table, "values", 1, value), "advantages", 0, value)
    with pytest.raises(NotFinite, match=rf"^values of trajectory a/1 is {value}; .* in 1 of 4 traj") as found:
        require_finite(table, [*COMPUTED, *LEARNT_FROM])
    assert found.value.batch is table
    scores = replace_column(table, "score", pa.array(np.array([0, 1, value, value], np.float32)))
    with pytest.raises(NotFinite, match=rf"^score of trajectory b/0 is {value}; .* in 2 of 4 traj"):
        require_finite(scores, GENERATED)


def test_the_rank_that_computed_it_is_named() -> None:
    table = with_tokens(with_tokens(batch(), "old_log_probs"), "values", 2)
    part = (np.zeros(1), np.zeros(2))
    answers = [
        ("actor", [([0, 1, 2, 3], {"old_log_probs": part})]),
        ("critic", [None, ([0, 3], {"values": part}), None, ([1, 2], {"values": part})]),
    ]
    with pytest.raises(NotFinite, match="values of trajectory b/0 is nan, computed by critic rank 3; "):
        require_finite(table, COMPUTED, answers)


def test_the_engines_log_probs_are_looked_at() -> None:
    with pytest.raises(NotFinite, match=r"^rollout_log_probs of trajectory b/1 is inf"):
        require_finite(with_tokens(batch(), "rollout_log_probs", 3, np.inf), GENERATED)


def test_a_kl_that_overflows_is_found_in_the_rewards() -> None:
    """The estimate k2 squares 1e30, which overflows; the KL controller is not updated with the result."""
    config = settings("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=mse",
                      "algorithm.kl_ctrl={type: adaptive, target_kl: 0.1, horizon: 100}")  # fmt: skip
    table = with_tokens(with_tokens(batch(), "old_log_probs", 3, -1e30), "ref_log_probs")
    controls = make_controls(config.algorithm, config.actor_rollout_ref.actor, num_steps=3)
    before = controls.state_dict()
    table, _ = compute_batch_advantages(table, config.algorithm, controls.kl)
    assert isinstance(controls.kl, AdaptiveKLController) and controls.state_dict() == before
    with pytest.raises(NotFinite, match=r"^token_level_rewards of trajectory b/1 is (nan|-inf)"):
        require_finite(table, LEARNT_FROM)


def controls_of(config: TrainConfig) -> Controls:
    return make_controls(config.algorithm, config.actor_rollout_ref.actor, num_steps=4)


def test_stop_ends_the_run_and_says_how_to_go_through_it_again(tmp_path: Path) -> None:
    config, table = settings(), with_tokens(batch(), "values", 2)
    with (
        pytest.raises(NotFinite) as found,
        finite_step(FakeRun(tmp_path), config.trainer.on_nonfinite, controls_of(config), 7, {}),
    ):
        require_finite(table, COMPUTED)
    path = tmp_path / "failures" / "step-000007.parquet"
    assert str(found.value).splitlines() == [
        "step 7: values of trajectory b/0 is nan; it is not finite in 1 of 4 trajectories",
        f"its trajectories: {path}",
        f"once more: megarl replay {tmp_path} --step 7 --trajectories {path}",
        "trainer.on_nonfinite=skip goes on with the next step",
    ]
    assert np.isnan(ragged(read_trajectories(path), "values")[0]).sum() == 1
    assert (
        "values" not in read_step(path, config.data, config.actor_rollout_ref.rollout.n).column_names
    )  # so that it is computed again


def test_skip_leaves_the_step_and_its_controls_alone(tmp_path: Path) -> None:
    config = settings("algorithm.kl_ctrl={type: linear, kl_coef: 0.1, end_kl_coef: 0.3}",
                      "trainer.on_nonfinite=skip")  # fmt: skip
    run, controls, metrics = FakeRun(tmp_path), controls_of(config), {}
    with finite_step(run, "skip", controls, 1, metrics):
        controls.kl.update(0.0, 4)
        controls.clip_low = 0.1
    assert metrics == {"training/skipped": 0.0} and not list(tmp_path.iterdir())
    moved = controls.state_dict()
    with finite_step(run, "skip", controls, 2, metrics):
        controls.kl.update(0.0, 4)
        controls.player_baselines["nim", "white"] = 0.5
        require_finite(with_tokens(batch(), "rollout_log_probs", 0), GENERATED)
    assert metrics == {"training/skipped": 1.0} and controls.state_dict() == moved
    assert controls.player_baselines == {}
    (said,) = run.said
    assert (
        "the rest of the step is left out (trainer.on_nonfinite=skip): step 2: rollout_log_probs of" in said
    )
    path = tmp_path / "failures" / "step-000002.parquet"
    assert (
        np.isnan(
            ragged(read_step(path, config.data, config.actor_rollout_ref.rollout.n), "rollout_log_probs")[0]
        ).sum()
        == 1
    )


def test_other_errors_are_none_of_it(tmp_path: Path) -> None:
    config = settings("trainer.on_nonfinite=skip")
    with (
        pytest.raises(KeyError),
        finite_step(FakeRun(tmp_path), config.trainer.on_nonfinite, controls_of(config), 1, {}),
    ):
        raise KeyError("x")
    process = RankProcess(None, "actor", 1, "host", "node", "log")
    with pytest.raises(WorkerFailed), rank_errors_as_not_finite(batch()):
        raise WorkerFailed(process, RankError("ValueError", "x", "", 0.0, ""))
    with (
        pytest.raises(NotFinite, match=r"^actor: the gradient's norm is nan"),
        rank_errors_as_not_finite(batch()),
    ):
        raise WorkerFailed(
            process, RankError("FloatingPointError", "the gradient's norm is nan", "", 0.0, "")
        )


def test_a_disk_that_is_full_hides_nothing(tmp_path: Path) -> None:
    config = settings()
    (tmp_path / "failures").write_text("a file where the folder should be")
    with pytest.raises(NotFinite, match=r"values of trajectory a/0 is nan[^$]*could not be written"):
        with finite_step(FakeRun(tmp_path), config.trainer.on_nonfinite, controls_of(config), 1, {}):
            require_finite(with_tokens(batch(), "values", 0), COMPUTED)
