import itertools
from contextlib import nullcontext

import numpy as np
import pytest

from megarl.config import SamplingConfig, ValSetConfig, val_set_sampling
from megarl.trainer.stages import validation
from megarl.trainer.stages.scoring import concat_scored
from tests.trainer.trajectories import (
    FakeRun,
    FakeScorer,
    FakeTokenizer,
    answer,
    games,
    prompts,
    score,
    scored,
)


@pytest.mark.parametrize(
    ("n", "passes", "k", "expected"),
    # 1 - C(n - c, k) / C(n, k), by hand
    [(4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 2, 2, 5 / 6), (4, 3, 2, 1.0), (4, 0, 4, 0.0), (4, 1, 4, 1.0)],
)
def test_pass_at_k_by_hand(n, passes, k, expected):
    assert validation.pass_at_k(n, passes, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_pass(n):
    for passes, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [True] * passes + [False] * (n - passes)
        choices = list(itertools.combinations(answers, k))
        assert validation.pass_at_k(n, passes, k) == pytest.approx(np.mean([any(c) for c in choices]))


def test_the_most_frequent_answer_is_scored():
    assert validation.majority_score(np.array([0.0, 1.0, 1.0]), ["3", "4", "4"]) == 1.0
    assert validation.majority_score(np.array([0.0, 0.0, 1.0]), ["3", "3", "4"]) == 0.0
    assert validation.majority_score(np.array([0.0, 1.0]), ["3", "4"]) == 0.0  # a tie: the first answer
    assert validation.majority_score(np.array([0.0, 0.0, 1.0]), [None, None, "4"]) == 1.0  # None has no vote
    assert validation.majority_score(np.array([0.0, 0.0]), [None, None]) is None


def test_metrics_of_several_answers_to_a_prompt():
    """Two prompts with four answers each, computed by hand: 1 of 4 and 3 of 4 pass."""
    batch = scored(
        {"a": [1.0, 0.0, 0.0, 0.5], "b": [1.0, 1.0, 0.0, 1.0]},
        preds=["7", "8", "8", "9", "5", "5", None, "6"],
    )
    found = validation.answer_metrics(batch, SamplingConfig(n=4))
    assert found == {
        "score/mean": pytest.approx(4.5 / 8),
        "score/megarl/arithmetic": pytest.approx(4.5 / 8),
        "mean@4": pytest.approx(4.5 / 8),
        "best@4": 1.0,
        "pass@1": pytest.approx((1 / 4 + 3 / 4) / 2),
        "pass@2": pytest.approx((1 / 2 + 1.0) / 2),
        "pass@4": 1.0,
        "maj@4": pytest.approx((0.0 + 1.0) / 2),
    }
    easier = validation.answer_metrics(batch, SamplingConfig(n=4, pass_threshold=0.5))
    assert easier["pass@1"] == pytest.approx((2 / 4 + 3 / 4) / 2)
    assert set(validation.answer_metrics(batch, SamplingConfig(n=1))) == {
        "score/mean", "score/megarl/arithmetic"
    }  # fmt: skip


def test_k_that_is_no_power_of_two_ends_the_row():
    found = validation.group_metrics([np.ones(6)], [[None] * 6], 6, 1.0)
    assert [name for name in found if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert not any(name.startswith("maj") for name in found)


def test_answers_whose_reward_failed_are_left_out():
    found = validation.answer_metrics(scored({"a": [None, 0.0], "b": [0.0, 1.0]}), SamplingConfig(n=2))
    assert found["score/mean"] == pytest.approx(1 / 3)
    assert found["mean@2"] == pytest.approx((0.0 + 0.5) / 2)
    assert found["pass@1"] == pytest.approx((0.0 + 0.5) / 2)
    assert found["pass@2"] == pytest.approx((0.0 + 1.0) / 2)  # prompt a counts with its only answer


def test_sessions_are_counted_and_players_have_metrics_of_their_own():
    """White wins the first of two games; black wins the second, in which white's reward failed."""
    found = validation.session_metrics(games("bw", "bw", scores=[-1.0, 1.0, 1.0, None]), SamplingConfig(n=2))
    assert found["player/b/score/mean"] == 0.0 and found["player/b/best@2"] == 1.0
    assert found["player/b/pass@1"] == 0.5 and found["player/b/pass@2"] == 1.0
    assert found["player/w/score/mean"] == 1.0 and found["player/w/pass@1"] == 1.0
    assert found["score/mean"] == 0.0, "the mean of -1 and 1; a session with a failed reward counts as failed"
    assert found["mean@2"] == 0.0
    alone = scored({"a": [0.0, 1.0]})
    assert validation.session_metrics(alone, SamplingConfig(n=2)) == validation.answer_metrics(
        alone, SamplingConfig(n=2)
    )


def test_a_validation_of_games_has_metrics_by_player(tmp_path, monkeypatch):
    table = games("bw", "b").table.drop_columns(["score"])

    def generate(run, engines, requests, sampling, finished):
        finished(table)
        return table

    monkeypatch.setattr(validation, "generate", generate)
    scorer = FakeScorer(lambda sample: score(sample.uid, -1.0 if sample.uid.endswith("w") else 1.0))
    rewards = validation.Rewards(FakeRun(tmp_path), scorer, FakeTokenizer())
    sets = [validation.ValidationSet("", prompts("a"), SamplingConfig(n=2))]
    _, metrics = validation.validate(rewards.run, None, sets, rewards, 9, 5, None, "validation", nullcontext)
    assert metrics["score/mean"] == 0.5, "of 0 and 1"
    assert metrics["player/b/score/mean"] == 1.0 and metrics["player/w/score/mean"] == -1.0


def test_each_data_source_of_several_has_its_own():
    batch = concat_scored(
        [scored({"a": [1.0, 0.0]}, source="math"), scored({"b": [0.0, 0.0]}, source="code")]
    )
    found = validation.answer_metrics(batch, SamplingConfig(n=2))
    assert (found["best@2"], found["best@2/math"], found["best@2/code"]) == (0.5, 1.0, 0.0)
    assert (found["score/math"], found["score/code"]) == (0.5, 0.0)


def test_a_set_overrides_val_kwargs_where_it_says_something():
    base = SamplingConfig(temperature=0.6, top_p=0.9, n=2, pass_threshold=0.5)
    assert val_set_sampling(ValSetConfig(files="x"), base) == base
    found = val_set_sampling(ValSetConfig(files="x", temperature=0.0, n=1, top_k=3), base)
    assert found == SamplingConfig(temperature=0.0, top_p=0.9, top_k=3, n=1, pass_threshold=0.5)


def test_every_set_is_answered_in_its_own_way(tmp_path, monkeypatch):
    """Two validation sets, one of them in parts: their sampling, uids, files, metrics and reports."""
    asked = []

    def generate(run, engines, requests, sampling, finished):
        asked.append(
            (requests["uid"].to_pylist(), sampling.temperature, sampling.max_new_tokens, sampling.seed)
        )
        table = answer(requests)
        finished(table)
        return table

    monkeypatch.setattr(validation, "generate", generate)
    scorer = FakeScorer(lambda sample: score(sample.uid, None if sample.uid == "c/0" else 1.0))
    rewards = validation.Rewards(FakeRun(tmp_path), scorer, FakeTokenizer())
    sets = [
        validation.ValidationSet("", prompts("a", "b", "c"), SamplingConfig()),
        validation.ValidationSet("hard", prompts("d"), SamplingConfig(n=2, temperature=0.7)),
    ]
    tables, metrics = validation.validate(
        rewards.run, None, sets, rewards, 9, 5, 2, "validation after step 3", nullcontext
    )
    # all rewards of the part with c failed, but not all of the set
    assert tables["val"].num_rows == 3 and metrics["reward/failed"] == 1.0
    assert asked == [
        (["a/0", "b/0"], 0.0, 9, 5),
        (["c/0"], 0.0, 9, 5),
        (["d/0", "d/1"], 0.7, 9, 5),
    ]
    assert metrics["hard/pass@2"] == 1.0 and metrics["score/mean"] == 1.0
    assert list(tables) == ["val", "val-hard"] and tables["val-hard"].num_rows == 2


def test_answers_to_a_set_are_kept_also_where_a_later_set_fails(tmp_path, monkeypatch):
    """An evaluation has generated for hours by then."""
    kept = {}

    def generate(run, engines, requests, sampling, finished):
        table = answer(requests)
        finished(table)
        return table

    monkeypatch.setattr(validation, "generate", generate)
    scorer = FakeScorer(lambda sample: score(sample.uid, None if sample.uid == "b/0" else 1.0))
    rewards = validation.Rewards(FakeRun(tmp_path), scorer, FakeTokenizer())
    sets = [validation.ValidationSet(name, prompts(name), SamplingConfig()) for name in "abc"]
    with pytest.raises(RuntimeError, match="rewards of all 1 trajectories failed"):
        validation.validate(rewards.run, None, sets, rewards, 9, 5, None, "evaluation", keep=kept.__setitem__)
    assert {file: table["uid"].to_pylist() for file, table in kept.items()} == {
        "val-a": ["a/0"],
        "val-b": ["b/0"],
    }
