"""From scores and log-probs to advantages: the controller's computations on a batch of trajectories."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from megarl.algorithms.kl import AdaptiveKLController, FixedKLController, LinearKLController
from megarl.config import AlgorithmConfig, RolloutCorrectionConfig
from megarl.config.schema.algorithm import GROUP_ESTIMATORS
from megarl.data.trajectories import append_column, from_ragged, ragged
from megarl.trainer.stages.advantages import Controls, compute_batch_advantages

LENGTHS = [2, 1, 2, 2]  # responses to prompts p, p, q, q
OFFSETS = np.cumsum([0, *LENGTHS])


def a_batch(**columns) -> pa.Table:
    """Four trajectories with only live tokens, on whose log-probs engine and trainer agree."""
    total = int(OFFSETS[-1])
    lists = {
        "response_ids": np.arange(total, dtype=np.int32),
        "response_mask": np.ones(total, dtype=bool),
        "rollout_log_probs": np.full(total, -1.0, np.float32),
        "old_log_probs": np.full(total, -1.0, np.float32),
    }
    own = {
        "uid": ["p/0", "p/1", "q/0", "q/1"],
        "prompt_uid": ["p", "p", "q", "q"],
        "finish_reason": ["stop", "stop", "length", "stop"],
        "score": pa.array([1.0, 0.0, 0.0, 3.0], pa.float32()),
    }
    for name, value in columns.items():
        (lists if name in lists or len(value) == total else own)[name] = value
    table = pa.table(own)
    for name, values in lists.items():
        table = table.append_column(name, from_ragged(np.asarray(values), OFFSETS))
    return table


def advantages_of(table: pa.Table) -> list[float]:
    return ragged(table, "advantages")[0].tolist()


def test_a_batch_by_hand() -> None:
    table, metrics = compute_batch_advantages(
        a_batch(), AlgorithmConfig(adv_estimator="rloo"), FixedKLController(0.1)
    )
    assert advantages_of(table) == [1, 1, -1, -3, -3, 3, 3]
    assert ragged(table, "token_level_rewards")[0].tolist() == [0, 1, 0, 0, 0, 0, 3]
    assert "returns" not in table.column_names
    assert metrics["critic/score/mean"] == 1.0
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["training/rollout_kl"] == 0.0 and metrics["training/rollout_ppl_ratio"] == 1.0


def test_a_trajectory_whose_reward_failed_takes_no_part() -> None:
    mask = np.array([1, 1, 1, 1, 1, 0, 0], dtype=bool)
    batch = a_batch(response_mask=mask, score=pa.array([1.0, 0.0, 2.0, 0.0], pa.float32()))
    table, metrics = compute_batch_advantages(
        batch, AlgorithmConfig(adv_estimator="rloo"), FixedKLController(0.1)
    )
    # q has one answer left, which has nothing to be compared with
    assert advantages_of(table) == [1, 1, -1, 0, 0, 0, 0]
    assert metrics["critic/score/mean"] == 1.0  # of the scores 1, 0 and 2
    assert metrics["critic/rewards/min"] == 0.0 and metrics["critic/rewards/mean"] == 1.0


def test_trajectories_of_a_session_are_compared_as_one() -> None:
    """Session q/0 has two paths: the reward of the last one is the session's, and both get the session's advantage."""
    paths = {"uid": ["p/0", "q/0.0", "q/0.1", "q/1.0"], "prompt_uid": ["p", "q", "q", "q"]}
    batch = a_batch(**paths, score=pa.array([1.0, 4.0, 4.0, 1.0], pa.float32()))
    table, metrics = compute_batch_advantages(
        batch, AlgorithmConfig(adv_estimator="rloo"), FixedKLController(0.1)
    )
    assert advantages_of(table) == [0, 0, 3, 3, 3, -3, -3]
    assert ragged(table, "token_level_rewards")[0].tolist() == [0, 1, 0, 0, 4, 0, 1]
    assert metrics["critic/score/mean"] == 2.0 and metrics["response_length/mean"] == 7 / 3


@pytest.mark.parametrize("estimator", sorted({*GROUP_ESTIMATORS} - {"gdpo", "gigpo"}))
def test_a_player_is_compared_with_itself_alone(estimator: str) -> None:
    """A game of two players gives the same advantages as two prompts, each answered by one of the players."""
    paths = {"uid": ["p/0.0.b", "p/0.1.w", "p/1.0.b", "p/1.1.w"], "prompt_uid": ["p"] * 4}
    apart = {"uid": ["b/0", "w/0", "b/1", "w/1"], "prompt_uid": ["b", "w", "b", "w"]}
    score = pa.array([3.0, 1.0, 0.5, 2.0], pa.float32())
    found, expected = (
        compute_batch_advantages(
            a_batch(**names, score=score), AlgorithmConfig(adv_estimator=estimator), FixedKLController(0.1)
        )
        for names in (paths, apart)
    )
    assert advantages_of(found[0]) == advantages_of(expected[0]) and any(advantages_of(found[0]))
    assert found[1] == expected[1]
    if estimator == "rloo":  # b: 3 - 0.5; w: 1 - 2
        assert advantages_of(found[0]) == [2.5, 2.5, -1, -2.5, -2.5, 1, 1]


def test_paths_of_a_player_are_one_response() -> None:
    paths = {"uid": ["p/0.0.b", "p/0.1.b", "p/0.2.w", "p/1.0.b"], "prompt_uid": ["p"] * 4}
    batch = a_batch(**paths, score=pa.array([4.0, 4.0, -4.0, 1.0], pa.float32()))
    table, metrics = compute_batch_advantages(
        batch, AlgorithmConfig(adv_estimator="rloo"), FixedKLController(0.1)
    )
    assert advantages_of(table) == [3, 3, 3, 0, 0, -3, -3]
    assert ragged(table, "token_level_rewards")[0].tolist() == [0, 0, 4, 0, -4, 0, 1]
    assert metrics["critic/score/mean"] == pytest.approx(1 / 3)


def test_the_kls_controller_counts_sessions() -> None:
    """The KL is far over its target: the coefficient grows by 0.2 * 2 sessions / 8, however many players the sessions have."""
    batch = a_batch(uid=["p/0.0.b", "p/0.1.w", "p/1.0.b", "p/1.1.w"], prompt_uid=["p"] * 4)
    batch = append_column(batch, "ref_log_probs", (np.full(7, -3.0, np.float32), OFFSETS))
    kl = AdaptiveKLController(1.0, target_kl=0.1, horizon=8)
    compute_batch_advantages(batch, AlgorithmConfig(adv_estimator="rloo", use_kl_in_reward=True), kl)
    assert kl.coef == pytest.approx(1.05)


def test_baselines_of_players_are_kept_from_step_to_step_and_in_checkpoints() -> None:
    """SPIRAL by hand: each score updates a baseline b to b / 2 + score / 2."""
    games = {"uid": ["p/0.0.b", "p/0.1.w", "p/1.0.b", "q/0.0.w"], "prompt_uid": ["p", "p", "p", "q"]}
    batch = a_batch(**games, data_source=["nim"] * 4, score=pa.array([1.0, -1.0, 2.0, 3.0], pa.float32()))
    algorithm = AlgorithmConfig(adv_estimator="spiral", baseline_decay=0.5)

    def step(controls: Controls) -> tuple[list[float], dict[str, float]]:
        table, metrics = compute_batch_advantages(batch, algorithm, controls.kl, controls.player_baselines)
        return advantages_of(table), metrics

    controls = Controls(FixedKLController(0.1), FixedKLController(0.1), 0.2, 0.2)
    advantages, metrics = step(controls)
    assert advantages == [0.5, 0.5, -0.5, 0.75, 0.75, 1.75, 1.75]  # black's b: 0.5, 1.25; white's: -0.5, 1.25
    assert (metrics["critic/baseline/nim/b"], metrics["critic/baseline/nim/w"]) == (1.25, 1.25)
    resumed = Controls(FixedKLController(0.1), FixedKLController(0.1), 0.2, 0.2)
    saved = json.loads(json.dumps(controls.state_dict(), allow_nan=False))
    resumed.load_state_dict(saved)
    assert resumed.player_baselines == controls.player_baselines == {("nim", "b"): 1.25, ("nim", "w"): 1.25}
    assert step(resumed)[0] == step(controls)[0] != advantages
    del saved["player_baselines"]  # as in a checkpoint of an earlier version
    resumed.load_state_dict(saved)
    assert step(resumed)[0] == advantages
    alone, found = compute_batch_advantages(a_batch(data_source=["nim"] * 4), algorithm, controls.kl)
    assert found["critic/baseline/nim"] == 1.5625 and advantages_of(alone)[:3] == [0.5, 0.5, -0.25]


def test_a_critics_returns_go_on_from_path_to_path() -> None:
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], np.float32)
    kept = {"prompt_uid": ["p", "q", "q", "r"], "score": pa.array([1.0, 3.0, 3.0, 1.0], pa.float32())}
    algorithm = AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.8, whiten_advantages=False)
    paths = a_batch(uid=["p/0", "q/0.0", "q/0.1", "r/0"], **kept)
    found, _ = compute_batch_advantages(
        append_column(paths, "values", (values, OFFSETS)), algorithm, FixedKLController(0.1)
    )
    # The same tokens in three trajectories, one for each session.
    bounds = OFFSETS[[0, 1, 3, 4]]
    lists = ("response_ids", "response_mask", "rollout_log_probs", "old_log_probs")
    alone = pa.table(
        {"uid": ["p/0", "q/0", "r/0"], "prompt_uid": ["p", "q", "r"], "finish_reason": ["stop"] * 3}
        | {"score": pa.array([1.0, 3.0, 1.0], pa.float32())}
        | {name: from_ragged(ragged(paths, name)[0], bounds) for name in lists}
    )
    expected, _ = compute_batch_advantages(
        append_column(alone, "values", (values, bounds)), algorithm, FixedKLController(0.1)
    )
    for name in ("advantages", "returns"):
        assert ragged(found, name)[0].tolist() == ragged(expected, name)[0].tolist()
        assert np.array_equal(ragged(found, name)[1], OFFSETS)


def test_remax_takes_the_greedy_answers_score() -> None:
    batch = append_column(a_batch(), "baseline_score", np.array([0.5, 0.5, 1.0, 1.0]))
    table, _ = compute_batch_advantages(batch, AlgorithmConfig(adv_estimator="remax"), FixedKLController(0.1))
    assert advantages_of(table) == [0.5, 0.5, -0.5, -1, -1, 2, 2]


def test_named_rewards_are_compared_by_themselves() -> None:
    """A response that is better by both rewards, whatever their scales, has twice the advantage. Deviations within groups are logged."""
    batch = append_column(a_batch(), "reward_part/score", np.array([0.0, 1.0, 0.0, 1.0]))
    batch = append_column(batch, "reward_part/short", np.array([0.0, 50.0, 0.0, 0.0]))
    algorithm = AlgorithmConfig(adv_estimator="gdpo", reward_weights={"score": 1.0, "short": 1.0})
    table, metrics = compute_batch_advantages(batch, algorithm, FixedKLController(0.1))
    found = np.array(advantages_of(table))[[0, 2, 3, 5]]
    np.testing.assert_allclose(found / found[3], [-2, 2, -1, 1], rtol=1e-5)
    assert metrics["reward/score_std"] == pytest.approx(math.sqrt(0.5))
    assert metrics["reward/short_std"] == pytest.approx(50 * math.sqrt(0.5) / 2)
    with pytest.raises(ValueError, match="no column reward_part/score, reward_part/short"):
        compute_batch_advantages(a_batch(), algorithm, FixedKLController(0.1))


def noted(*turns: list[tuple[int, str]]) -> dict[str, list]:
    """The columns of trajectories with these turns."""
    notes = [json.dumps({"numbers": {}, "error": None, "turns": own}) if own else "{}" for own in turns]
    return {"environment_notes": notes, "num_turns": [max(1, len(own)) for own in turns]}


def test_turns_that_began_in_the_same_state_are_compared() -> None:
    """State a is shared by the first turns of p's responses; state c by the second turn of one response to q and the only turn of the other."""
    turns = noted([(0, "a"), (1, "b")], [(0, "a")], [(0, "a"), (1, "c")], [(0, "c")])
    algorithm = AlgorithmConfig(adv_estimator="gigpo", gamma=0.5, norm_adv_by_std_in_grpo=False)
    table, metrics = compute_batch_advantages(a_batch(**turns), algorithm, FixedKLController(0.1))
    # p: scores 1, 0 and turns' returns 0.5, 1 | 0; q: scores 0, 3 and returns 0, 0 | 3
    assert advantages_of(table) == [0.5 + 0.25, 0.5, -0.5 - 0.25, -1.5, -1.5 - 1.5, 1.5 + 1.5, 1.5 + 1.5]
    assert metrics["critic/shared_states"] == pytest.approx(4 / 6)


def test_trajectories_that_do_not_tell_of_their_turns_are_refused() -> None:
    columns = noted([], [], [], []) | {"num_turns": [2, 1, 1, 1]}
    algorithm = AlgorithmConfig(adv_estimator="gigpo")
    for batch in (a_batch(**columns), a_batch()):
        with pytest.raises(
            ValueError, match="'gigpo' needs the turns of each trajectory; the batch has none"
        ):
            compute_batch_advantages(batch, algorithm, FixedKLController(0.1))


def test_rejected_tokens_leave_the_mask_before_advantages_are_made() -> None:
    old = np.full(7, -1.0, np.float32)
    old[6] += math.log(4)  # the last token of the last trajectory, which would get its score
    correction = RolloutCorrectionConfig(rollout_rs="token", rollout_is="token", rollout_is_threshold=2.0)
    algorithm = AlgorithmConfig(adv_estimator="rloo", rollout_correction=correction)
    table, metrics = compute_batch_advantages(a_batch(old_log_probs=old), algorithm, FixedKLController(0.1))
    assert ragged(table, "response_mask")[0].tolist() == [True] * 6 + [False]
    assert table.column_names.index("response_mask") == a_batch().column_names.index("response_mask")
    assert ragged(table, "token_level_rewards")[0].tolist() == [0, 1, 0, 0, 0, 3, 0]
    assert advantages_of(table) == [1, 1, -1, -3, -3, 3, 0]
    assert ragged(table, "rollout_is_weights")[0].tolist() == [1] * 6 + [2]
    assert metrics["rollout_corr/rs_masked"] == pytest.approx(1 / 7)
    assert metrics["training/rollout_log_prob_diff_max"] == pytest.approx(math.log(4))


def test_a_rejected_trajectory_takes_no_part_but_its_score_is_logged() -> None:
    old = np.full(7, -1.0, np.float32)
    old[5:] += math.log(4)
    algorithm = AlgorithmConfig(
        adv_estimator="rloo", rollout_correction=RolloutCorrectionConfig(rollout_rs="sequence")
    )
    table, metrics = compute_batch_advantages(a_batch(old_log_probs=old), algorithm, FixedKLController(0.1))
    assert advantages_of(table) == [1, 1, -1, 0, 0, 0, 0]
    assert metrics["critic/score/max"] == 3.0 and metrics["critic/rewards/max"] == 1.0


def test_without_old_log_probs_of_its_own_nothing_is_compared() -> None:
    algorithm = AlgorithmConfig(
        adv_estimator="rloo", rollout_correction=RolloutCorrectionConfig(bypass_mode=True)
    )
    _, metrics = compute_batch_advantages(a_batch(), algorithm, FixedKLController(0.1))
    assert not [name for name in metrics if name.startswith(("training/", "rollout_corr/"))]


def test_the_kl_in_the_reward_and_its_schedule() -> None:
    ref = np.full(7, -1.5, np.float32)  # a KL of 0.5 a token
    batch = a_batch(ref_log_probs=ref)
    controller = LinearKLController(0.1, 0.3, num_steps=3)
    algorithm = AlgorithmConfig(adv_estimator="rloo", use_kl_in_reward=True)
    found = [compute_batch_advantages(batch, algorithm, controller) for _ in range(3)]
    assert [metrics["actor/kl_coef"] for _, metrics in found] == pytest.approx([0.1, 0.2, 0.3])
    assert found[0][1]["actor/ref_kl"] == pytest.approx(0.5)
    # p: 1 - 0.1 and -0.05, q: -0.1 and 3 - 0.1: differences 0.95 and 3
    expected = torch.tensor([0.95, 0.95, -0.95, -3, -3, 3, 3])
    torch.testing.assert_close(torch.tensor(advantages_of(found[0][0])), expected)
