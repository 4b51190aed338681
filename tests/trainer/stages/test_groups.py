import numpy as np
import pytest

from megarl.config import FilterGroupsConfig, OverlongBufferConfig
from megarl.trainer.stages.groups import Groups, metric_values
from megarl.trainer.stages.scoring import punish_overlong
from tests.trainer.trajectories import games, prompts, scored


def collector(num_prompts, limit=10, metric="score"):
    options = FilterGroupsConfig(enable=True, metric=metric, max_num_gen_batches=limit)
    return Groups(options, num_prompts)


def test_without_dynamic_sampling_the_first_generation_is_the_batch():
    groups = Groups(FilterGroupsConfig(), 2)
    batch = scored({"a": [1.0, 1.0], "b": [0.0, 1.0]}, acc=[1.0, 1.0, 0.0, 1.0])
    assert not groups.complete
    groups.add(batch)
    assert groups.complete
    unscored = ["environment_score"]  # is NaN, which does not equal itself
    assert groups.batch().drop_columns(unscored).equals(batch.table.drop_columns(unscored))
    assert groups.metrics() == {"reward/failed": 0.0, "reward/acc": 0.75}


def test_groups_without_spread_are_replaced_until_the_step_is_full():
    groups = collector(3)
    groups.distinct(prompts("a", "b", "c"))
    groups.add(scored({"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 0.0]}))
    assert not groups.complete
    groups.distinct(prompts("d", "e", "f", "g"))
    groups.add(scored({"d": [0.5, 0.5], "e": [1.0, 0.5], "f": [0.0, 1.0], "g": [1.0, 0.0]}))
    assert groups.complete
    assert groups.batch()["uid"].to_pylist() == ["b/0", "b/1", "e/0", "e/1", "f/0", "f/1"]
    assert groups.batch()["score"].to_pylist() == [0.0, 1.0, 1.0, 0.5, 0.0, 1.0]
    assert groups.metrics() == {
        "reward/failed": 0.0,
        "filter_groups/generations": 2.0,
        "filter_groups/dropped": 3.0,
        "filter_groups/surplus": 1.0,
        "filter_groups/score_before": pytest.approx(7.5 / 14),
    }
    assert groups.generated_tokens == sum(range(1, 7)) + sum(range(1, 9))


def test_samplers_are_told_of_all_that_was_scored():
    groups = collector(1)
    groups.distinct(prompts("a", "b"))
    groups.add(scored({"a": [1.0, 1.0], "b": [0.0, None]}))  # a failed score makes no difference
    assert not groups.complete
    asked = groups.distinct(prompts("a"))
    groups.add(scored({uid: [0.0, 1.0] for uid in asked["uid"].to_pylist()}))
    uids, scores = groups.prompt_scores()
    assert uids == ["a", "a", "b", "a", "a"] and scores.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_a_prompt_that_comes_again_in_a_step_gets_a_uid_of_its_own():
    groups = collector(2)
    assert groups.distinct(prompts("a", "b"))["uid"].to_pylist() == ["a", "b"]
    again = groups.distinct(prompts("b", "c", "a"))
    assert again["uid"].to_pylist() == ["b~2", "c", "a~2"]
    assert groups.distinct(prompts("a", "a"))["uid"].to_pylist() == ["a~3", "a~4"]
    assert again["ground_truth"].to_pylist() == ["truth of b", "truth of c", "truth of a"]


def test_too_many_generations_are_an_error_that_says_what_to_do():
    groups = collector(2, limit=2)
    groups.add(scored({"a": [1.0, 1.0], "b": [0.0, 1.0]}))
    with pytest.raises(
        ValueError, match=r"2 generations.*1 of the 2 prompts.*score was 0\.875.*gen_batch_size"
    ):
        groups.add(scored({"c": [1.0, 1.0], "d": [1.0, 1.0]}))
    endless = collector(1, limit=0)
    for _ in range(50):
        endless.add(scored({"a": [1.0, 1.0]}))
    assert not endless.complete


def test_the_metric_is_what_the_key_says():
    batch = scored({"a": [1.0, 1.0], "b": [0.0, 2.0]}, lengths=[1, 8, 1, 1], format=[0.0, 1.0, 1.0, 1.0])
    punished = punish_overlong(batch, OverlongBufferConfig(enable=True, len=2), 8)
    assert metric_values(punished, "score").tolist() == [1.0, 1.0, 0.0, 2.0]
    assert metric_values(punished, "seq_reward").tolist() == [1.0, 0.0, 0.0, 2.0]
    assert metric_values(punished, "acc").tolist() == [1.0, 1.0, 0.0, 2.0]
    assert metric_values(punished, "format").tolist() == [0.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"metric='accuracy'.*score, seq_reward, format"):
        metric_values(punished, "accuracy")
    by_reward = collector(1, metric="seq_reward")
    by_reward.add(punished)
    assert by_reward.batch()["prompt_uid"].to_pylist() == ["a", "a"]
    assert by_reward.metrics()["reward/overlong_penalty"] == -0.25


def test_a_group_whose_rewards_all_failed_lacks_no_metric():
    """Groups of a stream are scored a few at a time, and one whose rewards fail may be alone."""
    failed = scored({"a": [None, None]})
    assert not failed.numbers and np.isnan(metric_values(failed, "accuracy")).all()
    groups = collector(1, metric="accuracy")
    groups.add(failed)
    assert groups.num_dropped == 1


def test_equal_scores_with_different_overlong_penalties_do_not_differ():
    """In float32 a score that a penalty was added to and taken off again is rounded."""
    batch = scored({"a": [0.1] * 8, "b": [0.1] * 7 + [0.2]}, lengths=[*range(30, 38)] * 2)
    groups = collector(1)
    groups.add(punish_overlong(batch, OverlongBufferConfig(enable=True, len=12), 40))
    assert groups.complete and groups.num_dropped == 1
    assert groups.batch()["prompt_uid"].to_pylist() == ["b"] * 8


def test_acc_of_its_own_counts_before_the_score():
    batch = scored({"a": [0.1, 0.9]}, acc=[1.0, 1.0])
    assert np.array_equal(metric_values(batch, "acc"), [1.0, 1.0])


def test_a_prompt_teaches_if_a_player_has_different_scores():
    """White wins every game of a: players have different scores, but each has the same in all games. In b black's scores differ."""
    groups = collector(1)
    groups.add(games("bw", "bw", scores=[-1.0, 1.0, -1.0, 1.0]))
    assert not groups.complete and groups.num_dropped == 1
    groups.add(games("bw", "w", "bw", prompt="b", scores=[0.0, 1.0, 1.0, 0.5, 1.0]))
    assert groups.complete and groups.batch()["prompt_uid"].to_pylist() == ["b"] * 5
    assert groups.metrics()["filter_groups/score_before"] == pytest.approx(3.5 / 9)
    assert groups.metrics()["reward/w/mean"] == 1.0


def test_samplers_are_told_of_each_player():
    groups = Groups(FilterGroupsConfig(), 1)
    groups.distinct(prompts("a"))
    groups.add(games("bw", "bbw", scores=[-1.0, 1.0, 2.0, 2.0, -2.0]))
    uids, scores = groups.prompt_scores()
    assert uids == ["a"] * 4 and scores.tolist() == [-1.0, 1.0, 2.0, -2.0]
