"""Comparisons within limits: whatever a response holds, an answer comes, in bounded time and without an error."""

import random
import time

import pytest

from megarl.rewards.rules.math_equality import equivalent


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
    assert time.perf_counter() - begun < 5  # ten times the limit, should nothing run


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
