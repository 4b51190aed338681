"""Responses that the data gives, in a step's table together with the policy's responses."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megarl.algorithms.kl import FixedKLController
from megarl.config import (
    AlgorithmConfig,
    DataConfig,
    FilterGroupsConfig,
    RolloutCorrectionConfig,
    TrainConfig,
    load_config,
    resolve,
)
from megarl.data.trajectories import (
    GIVEN,
    GIVEN_RESPONSES,
    SCORED_MASK,
    append_column,
    ragged,
    validate_trajectories,
    write_trajectories,
)
from megarl.trainer.health.monitor import repetition_metrics
from megarl.trainer.stages.advantages import compute_batch_advantages
from megarl.trainer.stages.given_responses import (
    check_given,
    draw_given,
    join_given,
    own_rows,
    split_given,
)
from megarl.trainer.stages.groups import Groups
from megarl.trainer.stages.saved_trajectories import read_step
from tests.trainer.trajectories import prompts, scored

KEYS = {"train_batch_size": 4, "max_prompt_length": 8, "max_response_length": 6}
LOSS = "actor_rollout_ref.actor.use_kl_loss=true"


def data(share: float = 0.5, **keys: int) -> DataConfig:
    return DataConfig(given_response_key="told", on_policy_share=share, **{**KEYS, **keys})


def some_prompts(*uids: str) -> pa.Table:
    """Prompts with one given response each; the second prompt has two."""
    told = [[[number, 7], [number]] if number == 1 else [[number] * 6] for number in range(len(uids))]
    return prompts(*uids).append_column(GIVEN_RESPONSES, pa.array(told, pa.list_(pa.list_(pa.int32()))))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_prompts_are_drawn_by_seed_and_step_with_the_share_as_probability(share: float) -> None:
    """Drawn for each prompt, as TRL's `random.random() <= lmbda`: the policy answers all prompts with a share of 1, none with 0."""
    asked = some_prompts(*map(str, range(200)))

    def drawn(step: int, **keys: int) -> list[str]:
        own, given = draw_given(asked, data(share, **keys), step, n=1)
        there = [] if given is None else given["prompt_uid"].to_pylist()
        assert sorted([*own["uid"].to_pylist(), *there], key=int) == asked["uid"].to_pylist()
        return own["uid"].to_pylist()

    counts = [len(drawn(step)) for step in range(20)]
    assert abs(np.mean(counts) / 200 - share) < 3 * (share * (1 - share) / 4000) ** 0.5 + 1e-12
    assert drawn(3) == drawn(3)
    if share == 0.25:
        assert drawn(3) != drawn(4) and drawn(3) != drawn(3, seed=2)


def test_without_given_responses_all_prompts_are_the_policys() -> None:
    asked = prompts("a", "b")
    assert draw_given(asked, DataConfig(**KEYS), 1, n=2) == (asked, None)
    with pytest.raises(ValueError, match=r"data\.given_response_key=told: the prompts have no column"):
        draw_given(asked, data(), 1, n=2)


def test_given_responses_are_trajectories_without_log_probs_of_an_engine() -> None:
    _, given = draw_given(some_prompts("a", "b"), data(share=0), 9, n=3)
    assert given is not None
    validate_trajectories(given)
    assert given["response_ids"].to_pylist() == [[0] * 6] * 3 + [[1, 7], [1], [1, 7]]
    assert given["finish_reason"].to_pylist() == ["length"] * 3 + ["stop"] * 3
    assert all(given["response_mask"].combine_chunks().flatten().to_pylist())
    assert not any(given["rollout_log_probs"].combine_chunks().flatten().to_pylist())
    assert given["weight_version"].to_pylist() == [9] * 6 and given["uid"][4].as_py() == "b/1"


def a_step() -> Groups:
    """Prompts a to d with two responses each; the responses of b and d are given."""
    groups = Groups(FilterGroupsConfig(), 4)
    groups.distinct(prompts("a", "b", "c", "d"))
    _, groups.given = draw_given(some_prompts("a", "b", "c", "d").take([1, 3]), data(share=0), 9, n=2)
    groups.add(scored({"a": [1.0, 0.0], "c": [0.0, 3.0]}, lengths=[2, 1, 2, 2]))
    return groups


def test_a_step_has_its_prompts_in_their_order_and_rewards_of_the_policys_alone() -> None:
    groups = a_step()
    table = groups.batch()
    validate_trajectories(table)
    assert table["prompt_uid"].to_pylist() == [*"aabbccdd"]
    assert table[GIVEN].to_pylist() == [False, False, True, True] * 2
    assert table["score"].to_pylist() == [1, 0, 0, 0, 0, 3, 0, 0]
    uids, scores = groups.prompt_scores()
    assert uids == [*"aacc"] and scores.tolist() == [1, 0, 0, 3]
    assert own_rows(table).drop_columns("score").num_rows == 4
    assert own_rows(table)["prompt_uid"].to_pylist() == [*"aacc"]
    assert repetition_metrics(own_rows(table)) == repetition_metrics(scored({"a": [1.0, 0.0], "c": [0.0, 3.0]}, lengths=[2, 1, 2, 2]).table)  # fmt: skip
    own, given, is_given = split_given(table)
    assert comparable(join_given(own, given, is_given)).equals(comparable(table))


def comparable(table: pa.Table) -> pa.Table:
    """The table without its column of NaN."""
    return table.drop_columns(["environment_score"])


def test_advantages_and_metrics_are_those_of_the_policys_responses_alone() -> None:
    """This holds also with rejection of tokens, which needs the engine's log-probs: given responses have none."""
    table = a_step().batch()
    mask, offsets = ragged(table, "response_mask")
    table = append_column(table, "old_log_probs", (np.linspace(-2.5, -0.5, len(mask)), offsets))
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token", rollout_rs_threshold=1.5)
    algorithm = AlgorithmConfig(adv_estimator="rloo", rollout_correction=correction)
    found, metrics = compute_batch_advantages(table, algorithm, FixedKLController(0.1))
    alone, expected = compute_batch_advantages(own_rows(table), algorithm, FixedKLController(0.1))
    assert metrics.pop("given/share") == 0.5
    assert metrics.pop("given/response_length/mean") == (2 + 1 + 6 + 6) / 4
    assert metrics == expected and metrics["training/rollout_kl"] != 0
    own, given, _ = split_given(found)
    assert comparable(own).equals(comparable(alone))
    assert given["response_mask"].to_pylist() == split_given(table)[1]["response_mask"].to_pylist()
    for name in ("advantages", "token_level_rewards"):
        assert not any(given[name].combine_chunks().flatten().to_pylist())
    assert all(given[SCORED_MASK].combine_chunks().flatten().to_pylist())


def test_a_step_may_have_given_responses_alone() -> None:
    groups = Groups(FilterGroupsConfig(), 2)
    asked = groups.distinct(some_prompts("a", "b"))
    own, groups.given = draw_given(asked, data(share=0), 9, n=2)
    assert not own.num_rows and groups.complete
    assert groups.metrics() == {} and groups.prompt_scores()[0] == []
    table, metrics = compute_batch_advantages(groups.batch(), AlgorithmConfig(), FixedKLController(0.1))
    assert metrics == {"given/share": 1.0, "given/response_length/mean": (6 + 6 + 2 + 1) / 4}
    assert table[GIVEN].to_pylist() == [True] * 4
    assert not any(table["advantages"].combine_chunks().flatten().to_pylist())


def make_config(*overrides: str) -> TrainConfig:
    return resolve(load_config(TrainConfig, "recipes/distillation_cpu.yaml", overrides))


def test_saved_trajectories_remember_which_are_given(tmp_path: Path) -> None:
    """Training on them again is refused if the configured loss does not allow given responses."""
    path = write_trajectories(a_step().batch(), tmp_path / "step.parquet")
    read = read_step(path, data(), n=2)
    assert read[GIVEN].to_pylist() == [False, False, True, True] * 2
    exact = (LOSS, "actor_rollout_ref.actor.kl_loss_type=top_k")
    check_given(read, make_config(*exact))
    check_given(own_rows(read), make_config())
    with pytest.raises(ValueError, match=r"trajectories with given responses: .* kl_loss_type=full or top_k"):
        check_given(read, make_config(LOSS, "actor_rollout_ref.actor.kl_loss_type=k2"))
