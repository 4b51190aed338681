import asyncio
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.environments.calculator import Calculator, evaluate, show
from megarl.environments.environment import Turn

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


def step(text, **options):
    return asyncio.run(Calculator(**options).step(Turn(0, text, [], "stop")))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3+4", "7"),
        (" 2 * (3 + 4) ", "14"),
        ("7/2", "3.5"),
        ("1/3", "0.3333333333"),
        ("6/2", "3"),
        ("-5 // 2", "-3"),
        ("-5 % 3", "1"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("0.1+0.2", "0.3"),
        ("1e3", "1000"),
        ("+3", "3"),
    ],
)
def test_values(expression, value):
    assert show(evaluate(expression)) == value


@given(st.integers(-99, 99), st.sampled_from(sorted(OPERATORS)), st.integers(1, 99))
def test_values_are_those_of_arithmetic(a, operation, b):
    assert evaluate(f"({a}) {operation} {b}") == OPERATORS[operation](a, b)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("", "no arithmetic expression"),
        ("3 +", "no arithmetic expression"),
        ("3 apples", "no arithmetic expression"),
        ("__import__('os').getpid()", "only numbers"),
        ("x", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("True", "only numbers"),
        ("[1][0]", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("1 << 2", "only numbers"),
        ("1j", "only numbers"),
        ("9**9**9**9", "too large"),
        ("2**257", "too large"),
        ("10.0**400", "too large"),
        ("9e400", "too large"),
        ("(-8)**0.5", "a root of a negative number"),
        ("1+" * 100 + "1", "more than 200 characters"),
    ],
)
def test_what_it_does_not_compute(expression, reason):
    with pytest.raises(ValueError, match=reason):
        evaluate(expression)


def test_a_call_is_answered_and_a_turn_without_one_ends():
    result = step("Tom has <<3+4>> pens")
    assert result.observation == [{"role": "tool", "content": "7"}] and not result.done
    assert result.numbers == {"calculator_calls": 1.0, "calculator_errors": 0.0}
    assert step("<<1+1>> or <<2+2>>", role="user").observation == [{"role": "user", "content": "4"}]
    failed = step("<<2+x>>")
    assert failed.observation[0]["content"].startswith("error: only numbers")
    assert failed.numbers["calculator_errors"] == 1.0
    assert step("#### 7").done and step("#### 7").score is None
