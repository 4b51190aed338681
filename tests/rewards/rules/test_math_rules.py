"""The rules for mathematics, and comparisons within limits: any response gets a result, in bounded time and without an error."""

import random
import time

import pytest

from megarl.rewards.rules.math_rules import boxed_score, dapo_score, equivalent, last_boxed

SOURCE = "lighteval/MATH"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {42}", "42"),
        (r"\boxed 42$, so", "42"),
        (r"\boxed{\frac{1}{2}\\}", r"\frac{1}{2}\\"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        (r"\boxedness{7}", None),
        (r"\boxed{7} or \boxed{8", None),
        (r"\boxed{7", None),
        ("", None),
        ("7", None),
    ],
)
def test_the_last_box(text, content):
    assert last_boxed(text) == content


def test_math_scores():
    assert boxed_score(SOURCE, r"\boxed{ 0.5 }", r"\frac{1}{2}") == {
        "score": 1.0,
        "pred": "0.5",
        "overtime": 0.0,
    }
    # A ground truth may be a complete solution.
    assert boxed_score(SOURCE, r"\boxed{2}", r"We get $\boxed{2}$.")["score"] == 1.0
    assert boxed_score(SOURCE, "2", "2") == {"score": 0.0, "pred": None, "overtime": 0.0}
    late = boxed_score(SOURCE, r"\boxed{100000000!}", "9^{9^{9^9}}", time_limit=0.5)
    assert (late["score"], late["overtime"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"12.5\%", "12.5", 1.0),
        (r"50\%", "50", 1.0),
        ("2210_4", "2210_3", 0.0),
        ("0.333333", r"\frac{1}{3}", 0.0),
        ("3.141593", r"\pi", 0.0),
        (r"\text{June 20}", r"\text{June } 20", 1.0),
        (r"\frac{1}{2}\\", r"\frac{1}{2}", 1.0),
    ],
)
def test_math_is_exact(answer, truth, score):
    assert boxed_score(SOURCE, rf"So $\boxed{{{answer}}}$.", truth)["score"] == score


@pytest.mark.parametrize(
    ("response", "pred"),
    [
        ("Answer: 34", "34"),
        ("answer : 34.", "34"),
        ("Answer:\n34", "34"),
        ("Answer:\n\\boxed{34}", "34"),
        ("Answer:\n\n$$\n\\boxed{34}\n$$", "34"),
        ("Answer:\n\\[\n34\n\\]", "34"),
        ("Answer: \\boxed{\n34\n}", "34"),
        ("**Answer**: 34", "34"),
        ("**Answer:** $\\boxed{34}$.", "34"),
        ("**Answer: 34**", "34"),
        ("Answer\uff1a34", "34"),
        ("\\textbf{Answer:} 34", "34"),
        ("Answer: 33\nAnswer: \\frac{68}{2}", "\\frac{68}{2}"),
        ("Answer: The value is $34$.", "34"),
        ("Answer: 34\n\nSo the final answer:", "34"),
        ("Answer: x = 34", "x = 34"),
        ("Answer: 34 dollars", "34 dollars"),
        ("Answer: 34.0", "34.0"),
        ("so \\boxed{34}", "34"),
    ],
)
def test_dapo_right(response, pred):
    result = dapo_score("math_dapo", response, "34")
    assert result == {"score": 1.0, "acc": 1.0, "pred": pred, "overtime": 0.0}


@pytest.mark.parametrize(
    ("response", "pred"),
    [
        ("answer : 35", "35"),
        ("Answer: 34\nAnswer: 35", "35"),
        ("Answer: 34 or 35", "34 or 35"),
        ("Answer: $34$ million", "$34$ million"),
        ("Answer: -34", "-34"),
        ("Answer:", None),
        ("34", None),
        ("", None),
        ("Answer: 34" + "x\n" * 150, None),  # not within the last 300 characters
    ],
)
def test_dapo_wrong(response, pred):
    result = dapo_score("math_dapo", response, "34")
    assert result == {"score": -1.0, "acc": 0.0, "pred": pred, "overtime": 0.0}


def test_dapo_takes_a_whole_solution_as_ground_truth():
    assert dapo_score("math_dapo", "Answer: 34", r"so $\boxed{34}$")["score"] == 1.0


def test_dapo_overtime_is_wrong():
    result = dapo_score("math_dapo", "Answer: 100000000!", "9^{9^{9^9}}", time_limit=0.5)
    assert (result["score"], result["overtime"]) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("1,000", "1000.0", True),
        (r"\frac{2}{4}", "1/2", True),
        ("2 3", "23", False),
        (r"0.\overline{3}", r"\frac{1}{3}", True),
        ("0.333333", r"\frac{1}{3}", False),
        ("3.141593", r"\pi", False),
        (r"\sqrt{12}", r"2\sqrt{3}", True),
        ("", "", False),
        ("1" * 5000, "1" * 5000, True),
        ("1" * 5000, "2", False),  # more digits than Python turns into a number
        (r"\frac{1}{0}", "1/0", False),
    ],
)
def test_numbers_and_formulas(answer: str, truth: str, same: bool) -> None:
    assert equivalent(answer, truth) is same


@pytest.mark.parametrize("answer", ["10^{10^{10}}", "100000000!"])
def test_a_comparison_without_end_is_stopped(answer: str) -> None:
    equivalent("x", "y+1")  # the library is imported
    begun = time.perf_counter()
    assert equivalent(answer, "9^{9^{9^9}}", time_limit=0.5) is None
    assert time.perf_counter() - begun < 30  # many times the limit, in case the process gets no processor


@pytest.mark.parametrize(
    "answer",
    [
        "{" * 900 + "}" * 900,
        "(" * 1900,
        r"\frac" * 300,
        r"\sqrt{" * 300 + "2" + "}" * 300,
        r"\pm" * 500,
        r"\text{a} " * 200,
        "5\\text{a}" + " " * 1500 + "x",
        "." * 1900 + "x",
        "1," * 900,
        "=" * 50,
        "\x00\x01",
        "\ud800",
        "|",
        "\\",
    ],
)
def test_what_is_no_answer_is_not_right(answer: str) -> None:
    assert not equivalent(answer, "7", time_limit=0.5)


def test_random_texts_are_neither_right_nor_errors() -> None:
    pieces = [
        "\\frac",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "\\{",
        "\\}",
        ",",
        "1",
        "2",
        "x",
        "^",
        "_",
        "\\text{",
        "=",
        "<",
        "\\cup ",
        "\\pm ",
    ]
    pieces += [
        "\\\\",
        "\\%",
        "\\sqrt",
        ".",
        " ",
        "\\left",
        "\\right",
        "-",
        "+",
        "!",
        "|",
        "\\in ",
        "$",
        "\u00b2",
        "\uff0c",
        "\u0663",
    ]
    dice = random.Random(0)
    for _ in range(60):
        answer = "".join(dice.choices(pieces, k=dice.randint(1, 12)))
        assert not equivalent(answer, "7919", time_limit=2.0), answer
