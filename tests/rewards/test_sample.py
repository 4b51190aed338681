import math
import pickle
from enum import StrEnum

import numpy as np
import pytest

from megarl.rewards.sample import Score, read_result


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.bool_(True), np.array(1.0)])
def test_numbers_of_any_kind_are_scores(value):
    score = read_result("u", value, 0.5)
    assert score == Score("u", 1.0, {}, {}, None, 0.5)
    assert type(score.score) is float


def test_a_dict_has_numbers_and_notes_beside_the_score():
    result = {
        "score": 0.5,
        "accuracy": True,
        "length": np.int64(3),
        "why": "too short",
        "trace": [1],
        "pred": 12,
    }
    score = read_result("u", result, 0.0)
    assert (score.score, score.numbers) == (0.5, {"accuracy": 1.0, "length": 3.0})
    assert score.notes == {"why": "too short", "pred": "12"}
    assert read_result("u", {"score": 0, "pred": None}, 0.0).notes == {}


def test_texts_of_any_kind_are_notes_that_every_process_can_read():
    class Verdict(StrEnum):  # pickle finds no class that is local, or in the controller's main file
        RIGHT = "right"

    score = read_result("u", {"score": 1.0, "verdict": Verdict.RIGHT, "name": np.str_("x")}, 0.0)
    assert score.notes == {"verdict": "right", "name": "x"}
    assert pickle.loads(pickle.dumps(score)) == score


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "is nan, not a finite number"),
        (-math.inf, "is -inf, not a finite number"),
        ("1.0", r"is '1.0' \(str\), not a number"),
        (None, r"is None \(NoneType\), not a number"),
        (np.ones(1), r"is array\(\[1\.\]\) \(ndarray\), not a number"),
        ({"accuracy": 1.0}, "is a dict without 'score'; it has accuracy"),
        ({}, "it has no keys"),
        ({"score": None}, r"is None \(NoneType\)"),
    ],
)
def test_anything_but_a_number_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        read_result("u", value, 0.0)


def test_a_dict_may_have_the_scores_of_steps():
    found = read_result("u", {"score": 1.0, "steps": [(2, 0.5), [np.int64(5), np.float32(-1)]]}, 0.0, 5)
    assert found.steps == ((2, 0.5), (5, -1.0)) and found.numbers == {}
    assert read_result("u", {"score": 1.0, "steps": []}, 0.0, 5).steps == ()
    assert read_result("u", {"score": 1.0, "steps": 3}, 0.0, 5).numbers == {
        "steps": 3.0
    }  # a number like any other


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([3], r"steps\[0\] is 3; it must be \(characters up to the step's end, score\)"),
        ([(3, 1.0), (4.0, 1.0)], r"steps\[1\] is \(4.0, 1.0\); it must be"),
        ([(3, "good")], r"steps\[0\] is \(3, 'good'\); it must be"),
        ([(3, math.nan)], r"the score of steps\[0\] is nan"),
        (
            [(0, 1.0)],
            r"steps\[0\] ends at character 0; ends must grow, from 1 to the response's 5 characters",
        ),
        ([(3, 1.0), (3, 1.0)], r"steps\[1\] ends at character 3; ends must grow"),
        ([(6, 1.0)], r"steps\[0\] ends at character 6; ends must grow, from 1 to the response's 5"),
    ],
)
def test_wrong_steps_are_named(steps, message):
    with pytest.raises(ValueError, match=message):
        read_result("u", {"score": 1.0, "steps": steps}, 0.0, 5)
