import math

import numpy as np
import pytest
import torch

from megarl.rewards.scoring import score_trajectories


def score(responses, custom=None, sources=None, truths=None, extras=None):
    n = len(responses)
    return score_trajectories(
        uids=[f"p{i}/0" for i in range(n)],
        data_sources=sources or ["mine"] * n,
        responses=responses,
        ground_truths=truths or [""] * n,
        extra_infos=extras or [None] * n,
        custom=custom,
    )


def test_rules_are_chosen_by_data_source():
    result = score(
        ["#### 1", "#### 2", "#### 3"],
        sources=["openai/gsm8k", "megarl/arithmetic", "openai/gsm8k"],
        truths=["1", "2", "4"],
    )
    assert result.scores == [1.0, 1.0, 0.0]
    assert result.metrics == {}


def test_an_unknown_data_source_is_refused_before_anything_is_scored():
    with pytest.raises(ValueError, match=r"data_source 'mine'; known: megarl/arithmetic, openai/gsm8k"):
        score(["#### 1", "#### 1"], sources=["openai/gsm8k", "mine"])


def test_a_custom_function_gets_each_row_and_serves_every_source():
    seen = []

    def custom(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return len(seen)

    result = score(
        ["a", "b"],
        custom,
        sources=["openai/gsm8k", "mine"],
        truths=["x", "y"],
        extras=['{"index": 7}', "null"],
    )
    assert result.scores == [1.0, 2.0]
    assert seen == [("openai/gsm8k", "a", "x", {"index": 7}), ("mine", "b", "y", None)]


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.bool_(True), torch.tensor(1.0)])
def test_numbers_of_any_kind_are_scores(value):
    result = score(["a"], lambda **_: value)
    assert result.scores == [1.0]
    assert type(result.scores[0]) is float


def test_other_numbers_of_a_dict_become_metrics():
    results = {
        "a": {"score": 0.5, "accuracy": True, "answer": "12"},
        "b": {"score": 0.25, "format": np.float64(2)},
        "c": 1.0,
    }
    result = score(["a", "b", "c"], lambda solution_str, **_: results[solution_str])
    assert result.scores == [0.5, 0.25, 1.0]
    assert result.metrics.keys() == {"accuracy", "format"}
    np.testing.assert_equal(result.metrics["accuracy"], [1.0, math.nan, math.nan])
    np.testing.assert_equal(result.metrics["format"], [math.nan, 2.0, math.nan])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "is nan, not a finite number"),
        (-math.inf, "is -inf, not a finite number"),
        ("1.0", r"is '1.0' \(str\), not a number"),
        (None, r"is None \(NoneType\), not a number"),
        (np.ones(1), r"is array\(\[1\.\]\) \(ndarray\), not a number"),
        ({"accuracy": 1.0}, "is a dict without 'score'; it has accuracy"),
        ({"score": None}, r"is None \(NoneType\)"),
    ],
)
def test_anything_but_a_number_names_the_trajectory(value, message):
    with pytest.raises(ValueError, match=rf"trajectory 'p1/0' \(data_source 'mine'\) {message}"):
        score(["good", "bad"], lambda solution_str, **_: 1.0 if solution_str == "good" else value)


def test_a_function_that_raises_names_the_trajectory_and_keeps_its_cause():
    def custom(solution_str, **_):
        return {"good": 1.0}[solution_str]

    with pytest.raises(ValueError, match=r"'p1/0' \(data_source 'mine'\) raised KeyError: 'bad'") as caught:
        score(["good", "bad"], custom)
    assert isinstance(caught.value.__cause__, KeyError)


def test_no_trajectories_give_no_scores():
    result = score([])
    assert (result.scores, result.metrics) == ([], {})
