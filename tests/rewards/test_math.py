import time

import pytest

from megarl.rewards import math_boxed, math_dapo

SOURCE = "lighteval/MATH"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{7", None),
        ("7", None),
    ],
)
def test_the_last_box(text, content):
    assert math_boxed.last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("7", "7", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        ("0.5", r"\frac12", True),
        ("1,000", "1000", True),
        ("1000.0", "1000", True),
        ("-3", "3", False),
        (r"x^2 + 2x + 1", "(x+1)^2", True),
        (r"x^2 + 2x", "(x+1)^2", False),
        (r"\sqrt{12}", r"2\sqrt{3}", True),
        (r"\{3, 1, 2\}", r"\{1,2,3\}", True),
        ("(2,1)", "(1,2)", False),
        (r"(-\infty, 3]", r"(-\infty,3]", True),
        (r"(-\infty, 3)", r"(-\infty,3]", False),
        (r"\text{even}", r"\text{odd}", False),
        (r"x=3", "3", True),
        ("", "", False),
        (r"}{\frac{", "3", False),
        ("1" * 3000, "2", False),
    ],
)
def test_equivalent_formulas(answer, truth, same):
    assert math_boxed.equivalent(answer, truth) is same


@pytest.mark.parametrize("answer", ["10^{10^{10}}", "100000000!"])
def test_a_comparison_without_end_is_stopped(answer):
    math_boxed.equivalent("x", "y+1")  # the library is imported
    begun = time.perf_counter()
    assert math_boxed.equivalent(answer, "9^{9^{9^9}}", time_limit=0.5) is None
    assert time.perf_counter() - begun < 5  # ten times the limit, should nothing run


def test_math_scores():
    assert math_boxed.compute_score(SOURCE, r"\boxed{ 0.5 }", r"\frac{1}{2}") == {
        "score": 1.0,
        "pred": "0.5",
        "overtime": 0.0,
    }
    # A ground truth may be a whole solution.
    assert math_boxed.compute_score(SOURCE, r"\boxed{2}", r"We get $\boxed{2}$.")["score"] == 1.0
    assert math_boxed.compute_score(SOURCE, "2", "2") == {"score": 0.0, "pred": None, "overtime": 0.0}
    late = math_boxed.compute_score(SOURCE, r"\boxed{100000000!}", "9^{9^{9^9}}", time_limit=0.5)
    assert (late["score"], late["overtime"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("response", "score", "pred"),
    [
        ("Answer: 34", 1.0, "34"),
        ("**Answer:** $\\boxed{34}$.", 1.0, "34"),
        ("Answer: 33\nAnswer: \\frac{68}{2}", 1.0, "\\frac{68}{2}"),
        ("answer : 35", -1.0, "35"),
        ("\\boxed{34}", -1.0, None),
        ("Answer: 34" + "x\n" * 150, -1.0, None),  # not within the last 300 characters
    ],
)
def test_dapo_scores(response, score, pred):
    result = math_dapo.compute_score("math_dapo", response, "34")
    assert result == {"score": score, "acc": float(score > 0), "pred": pred}
