"""A calculator: the policy writes a calculation between double angle brackets and is told its value.

A turn with `<<3+4>>` is answered by a message "7" (the last such call of the turn counts); a turn without one ends the
trajectory. A call may contain decimal numbers, + - * / // % ** and brackets. A call that cannot be computed is
answered by "error: ..." and the reason.

Numbers of the trajectory: `calculator_calls` and `calculator_errors`.
"""

import ast
import operator
import re
from collections.abc import Callable

from megarl.environments.environment import Environment, StepResult, Turn, register_environment

CALL = re.compile(r"<<(.*?)>>", re.DOTALL)
MAX_CHARACTERS = 200
MAX_BITS = 256  # of an integer; bounds the cost of a power, too

Number = int | float

_BINARY: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@register_environment("calculator")
class Calculator(Environment):
    """The calculator that is described above.

    Args:
        role: role of the message with the value; the model's chat template must know it.
    """

    def __init__(self, role: str = "tool") -> None:
        self.role = role

    async def step(self, turn: Turn) -> StepResult:
        calls = CALL.findall(turn.text)
        if not calls:
            return StepResult(done=True)
        try:
            answer, failed = show(evaluate(calls[-1])), 0
        except ValueError as error:
            answer, failed = f"error: {error}", 1
        numbers = {"calculator_calls": 1.0, "calculator_errors": float(failed)}
        return StepResult([{"role": self.role, "content": answer}], numbers=numbers)


def show(number: Number) -> str:
    """A number as the policy reads it: integers without a point, others with at most 10 significant digits."""
    if isinstance(number, int) or (number.is_integer() and abs(number) < 1e15):
        return str(int(number))
    return f"{number:.10g}"


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression; only the operators above are executed.

    Raises:
        ValueError: too long, no arithmetic, division by zero, or too large a number.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("no arithmetic expression") from None
    try:
        return _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the number is too large") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow):
                _check_power(a, b)
            return _bounded(_BINARY[type(op)](a, b))
    raise ValueError("only numbers, + - * / // % ** and brackets are known")


def _check_power(base: Number, exponent: Number) -> None:
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a root of a negative number")
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise ValueError("the number is too large")


def _bounded(number: Number) -> Number:
    too_large = number.bit_length() > MAX_BITS if isinstance(number, int) else abs(number) > 2.0**MAX_BITS
    if too_large or number != number:
        raise ValueError("the number is too large")
    return number
