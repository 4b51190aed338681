"""Trajectories as a run writes them, read back to train on the step again."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from megarl.config import TrainConfig, load_config, resolve
from megarl.data.routing import ROUTED_EXPERTS, RoutingShape, routing_column
from megarl.data.sessions import players
from megarl.data.trajectories import SCORED_MASK, append_column, ragged, sequence_lengths, write_trajectories
from megarl.trainer.loops import offline
from megarl.trainer.stages.advantages import compute_batch_advantages, make_controls
from megarl.trainer.stages.saved_trajectories import count_steps, read_step, step_file
from tests.trainer.trajectories import games, scored

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture
def config() -> TrainConfig:
    """A configuration that rejects tokens whose ratio is over 2."""
    return resolve(load_config(TrainConfig, None, [
        "data.train_files=a.parquet", "data.train_batch_size=2", "data.max_prompt_length=8", "data.max_response_length=8",
        "actor_rollout_ref.model.path=m", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_max_token_len_per_gpu=16",
        f"{ACTOR}.optim.lr=1e-3", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2",
        "algorithm.rollout_correction={rollout_rs: token, rollout_rs_threshold: 2.0}",
    ]))  # fmt: skip


def test_tokens_that_were_rejected_are_there_again(config: TrainConfig, tmp_path: Path) -> None:
    generated = scored({"a": [1.0, 0.0], "b": [0.0, 1.0]}).table
    sampled, offsets = ragged(generated, "rollout_log_probs")
    policy = np.array(sampled)
    policy[[2, 5]] += 3.0  # a ratio of 20
    batch = append_column(generated, "old_log_probs", (policy, offsets))
    batch, _ = compute_batch_advantages(
        batch, config.algorithm, make_controls(config.algorithm, config.actor_rollout_ref.actor, 1).kl
    )
    assert ragged(batch, "response_mask")[0].sum() == len(policy) - 2
    write_trajectories(batch, step_file(tmp_path, 1))
    found = read_step(step_file(tmp_path, 1), config.data, config.actor_rollout_ref.rollout.n)
    assert {SCORED_MASK, "old_log_probs", "advantages"}.isdisjoint(found.column_names)
    for name in found.column_names:
        if name != "environment_score":  # is NaN
            assert found[name].combine_chunks().equals(generated[name].combine_chunks()), name


def written_with_experts(folder: Path) -> pa.ChunkedArray:
    """Write the trajectories of step 1 with experts of each token; returns their column."""
    table = scored({"a": [1.0, 0.0], "b": [0.0, 1.0]}).table
    shape = RoutingShape(2, 2, 8)
    drawn = np.random.default_rng(3)
    experts = [
        drawn.integers(0, 8, (length - 1, shape.layers, shape.top_k), shape.dtype)
        for length in sequence_lengths(table)
    ]
    table = table.append_column(ROUTED_EXPERTS, routing_column(experts, shape))
    write_trajectories(table, step_file(folder, 1))
    return table[ROUTED_EXPERTS]


def test_the_experts_that_the_engine_chose_are_there_again(config: TrainConfig, tmp_path: Path) -> None:
    """Training on saved trajectories replays the experts as the run that generated them did."""
    column = written_with_experts(tmp_path)
    found = read_step(step_file(tmp_path, 1), config.data, config.actor_rollout_ref.rollout.n)
    assert found[ROUTED_EXPERTS].to_pylist() == column.to_pylist()


def test_experts_that_the_log_prob_pass_records_are_not_there_before_it(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pass adds their column to the step's trajectories, as in the run."""
    written_with_experts(tmp_path)
    monkeypatch.setattr(offline, "learn", lambda config, run, roles, read, *rest: (read, {}))
    state = SimpleNamespace(controls=None, ptx_batches=None)
    for mode, kept in (("trainer", False), ("rollout", True)):
        actor = replace(config.actor_rollout_ref.actor, router_replay=mode)
        own = replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, actor=actor))
        work = offline.learning_from(own, None, None, state, partial(step_file, tmp_path))
        assert (ROUTED_EXPERTS in work(1, {}).column_names) is kept, mode


def test_players_are_there_again(config: TrainConfig, tmp_path: Path) -> None:
    """Sessions may have any number of trajectories: the size of a step is counted in sessions."""
    parts = [games("bw", "-", prompt="a").table, games("w", "bww", prompt="b").table]
    write_trajectories(pa.concat_tables(parts), step_file(tmp_path, 1))
    found = read_step(step_file(tmp_path, 1), config.data, config.actor_rollout_ref.rollout.n)
    assert players(found).tolist() == ["b", "w", "", "w", "b", "w", "w"]


def test_what_cannot_be_a_step(config: TrainConfig, tmp_path: Path) -> None:
    table = scored({"a": [1.0, 0.0], "b": [0.0, 1.0]}).table
    path = write_trajectories(table, tmp_path / "a.parquet")
    three = replace(config, data=replace(config.data, train_batch_size=3))
    with pytest.raises(ValueError, match=r"a.parquet has 4 trajectories; .* is 3 x 2"):
        read_step(path, three.data, three.actor_rollout_ref.rollout.n)
    short = replace(config, data=replace(config.data, max_prompt_length=1, max_response_length=3))
    with pytest.raises(ValueError, match=r"has a trajectory of \d tokens; .* is 1 \+ 3"):
        read_step(path, short.data, short.actor_rollout_ref.rollout.n)
    requests = table.select([name for name in table.column_names if name != "score"])
    with pytest.raises(ValueError, match="has no column 'score'"):
        read_step(
            write_trajectories(requests, tmp_path / "b.parquet"),
            config.data,
            config.actor_rollout_ref.rollout.n,
        )


def test_steps_are_counted_without_a_gap(tmp_path: Path) -> None:
    for step in (1, 2, 4):
        step_file(tmp_path, step).write_text("")
    assert count_steps(tmp_path, None) == count_steps(tmp_path, 2) == 2 and count_steps(tmp_path, 1) == 1
    with pytest.raises(
        ValueError, match=r"there is no step-000003\.parquet, and trainer\.total_training_steps=4"
    ):
        count_steps(tmp_path, 4)
    with pytest.raises(ValueError, match=r"there is no step-000001\.parquet$"):
        count_steps(tmp_path / "none", None)
