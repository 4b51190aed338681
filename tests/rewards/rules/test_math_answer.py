"""Which answers count as equal: the table in math_answers.tsv."""

import random
from pathlib import Path

import pytest
import sympy

from megarl.rewards.rules.math_answer import read_formula, same_answer, same_value
from megarl.rewards.rules.math_text import clean, number

LINES = (Path(__file__).parent / "math_answers.tsv").read_text().splitlines()
ROWS = [line.split("\t") for line in LINES if not line.startswith("#")]


@pytest.mark.parametrize(("verdict", "answer", "truth"), ROWS)
def test_an_answer_is_right_or_wrong(verdict: str, answer: str, truth: str) -> None:
    assert same_answer(answer, truth) is {"right": True, "wrong": False}[verdict]


def test_the_table_is_large_and_says_nothing_twice() -> None:
    assert len({(answer, truth) for _, answer, truth in ROWS}) == len(ROWS) > 350
    assert 100 < sum(verdict == "wrong" for verdict, _, _ in ROWS) < 250


@pytest.mark.parametrize(("verdict", "answer", "truth"), [row for row in ROWS if row[0] == "right"][::8])
def test_the_same_is_the_same_both_ways(verdict: str, answer: str, truth: str) -> None:
    """Except for names and bare lists, which the truth may have and the answer may not."""
    assert same_answer(truth, answer) or "=" in answer + truth


@pytest.mark.parametrize("answer", sorted({answer for _, answer, _ in ROWS if answer})[::6])
def test_every_answer_is_itself(answer: str) -> None:
    assert same_answer(answer, answer)


X, Y = sympy.symbols("x y", real=True)


def expression(dice: random.Random, depth: int) -> sympy.Expr:
    if depth == 0:
        leaves = [
            sympy.Integer(dice.randint(1, 30)),
            sympy.Rational(dice.randint(1, 9), dice.randint(2, 9)),
            X,
            Y,
            sympy.pi,
        ]
        return dice.choice(leaves)
    one, other = (expression(dice, depth - 1) for _ in range(2))
    return dice.choice(
        [
            one + other,
            one - other,
            one * other,
            one / (1 + other**2),
            one**2,
            sympy.sqrt(other**2 + 1),
            sympy.sin(one),
        ]
    )


@pytest.mark.parametrize("seed", range(15))
def test_what_sympy_writes_is_read_back(seed: int) -> None:
    original = expression(random.Random(seed), 2)
    read = read_formula(clean(sympy.latex(original)))
    assert read is not None and same_value(read, original)
    again = read_formula(clean(sympy.latex(sympy.expand(original), mul_symbol="dot", fold_short_frac=True)))
    assert again is not None and same_value(again, original)
    near = read_formula(clean(f"{sympy.latex(original)} + {sympy.latex(sympy.Rational(1, 10**9))}"))
    assert near is not None and not same_value(near, original)


@pytest.mark.parametrize("digits", [3, 6, 15, 40])
@pytest.mark.parametrize(
    "text", [r"\pi", r"\sqrt{2}", r"\frac{1}{3}", "e", r"\log_2 3", r"\sin 1", r"\sqrt{2}+\sqrt{3}"]
)
def test_no_approximation_is_a_number(text: str, digits: int) -> None:
    exact = read_formula(clean(text))
    assert exact is not None
    near = read_formula(str(sympy.N(exact, digits)))
    assert near is not None and near.is_Rational and not same_value(near, exact)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", "12"),
        ("-1,200.5", "-2401/2"),
        ("+.5", "1/2"),
        (r"0.1\overline{6}", "1/6"),
        (r"-\frac{3}{4}", "-3/4"),
        ("3/4", "3/4"),
        ("1/0", None),
        ("1,20", None),
        ("1 2", None),
        (".", None),
        ("x", None),
    ],
)
def test_plain_numbers(text: str, value: str | None) -> None:
    assert number(text) == (None if value is None else sympy.Rational(value))


@pytest.mark.parametrize(
    "text", ["2 3", "x'", "12_3", r"\text{a}", "3:4", r"\frac{1}{0}", "}{", "words", r"\frac", "", "1 = 1"]
)
def test_what_is_no_formula(text: str) -> None:
    assert read_formula(text) is None
