"""What counts as the same answer: the table in math_answers.tsv."""

from pathlib import Path

import pytest

from megarl.rewards.rules.math_answer import same_answer

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
    """But for names and bare lists, which the truth may have and the answer may not."""
    assert same_answer(truth, answer) or "=" in answer + truth


@pytest.mark.parametrize("answer", sorted({answer for _, answer, _ in ROWS if answer})[::6])
def test_every_answer_is_itself(answer: str) -> None:
    assert same_answer(answer, answer)
