r"""One formula (LaTeX, as `math_text.clean` spells it) as an exact expression of sympy, and whether two are equal.

latex2sympy2_extended reads it. What that library would read as something else is changed or refused before: it drops
the subscript of 12_3 and the prime of x', reads `2 3` as 5 and a degree as nothing, and makes decimals floats. Here a
decimal is the fraction that it is written as, and equal is what sympy proves, so no approximation equals a number.

sympy takes seconds to import, and a formula can take it all time and memory: only child processes of
`megarl.rewards.rules.math_equality` come here.
"""

import re

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef

from megarl.rewards.rules.math_text import decimal

_MOST_DIGITS = 400
_READING = ConversionConfig(lowercase_symbols=False, interpret_contains_as_eq=False)
_FUNCTIONS = frozenset("fghFGHPQ")  # any other letter before a parenthesis is a factor
_REPEATED = r"\\(?:bar|overline|dot)\s*(?:\{\d+\}|\d)"
_DECIMAL = re.compile(rf"(?<![\d.])(?:\d+\.\d*|\.\d+)(?:{_REPEATED})?")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\([^()]*\))\s*\^\\circ(?![A-Za-z])")
_QUOTIENT = re.compile(r"(?<![\w.}^/])(\d+)\s*/\s*(\d+)(?![\d.])")  # 4/3 \pi is no fourth of anything
# Not a formula: words, primes, digits with a subscript or a space between them, commands that say nothing exact.
_REFUSED = re.compile(
    r"[':]|\\text|\\approx|\\mathbb|\\(?:l?dots|cdots)|\d\s*_|\d \d|(?<![\d.])\d+\s*\\(?:bar|overline|dot)(?![A-Za-z])|(?<![\\A-Za-z])[A-Za-z]{4,}|[^\x00-\x7f]"
)
_RENAMED = {r"\gamma": "q_{gamma}", r"\Gamma": "q_{Gamma}", "I": "q_{I}"}  # constants of the library
_RENAMED_NAMES = re.compile(r"\\[gG]amma(?![A-Za-z])|(?<![\\A-Za-z])I(?![A-Za-z])")
_MIXED = re.compile(r"(?<![\w.}])(\d+) (\d+)\s*/\s*(\d+)(?![\w.])")
# Their arguments stay in braces; those of \sin and the like get parentheses: the library reads \sin{x}/2 as \sin(x/2).
_TAKES_BRACES = re.compile(
    r"\\(?:overline|underline|bar|vec|hat|widehat|dot|tilde|operatorname\*?|begin|end|mathbb|mathcal|mathfrak)\s*$"
)
_COMMANDS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1}


def read_formula(text: str) -> sympy.Basic | None:
    """The expression, evaluated; None: the text is no formula, or has no value (1/0)."""
    text = _QUOTIENT.sub(r"\\frac{\1}{\2}", _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    text = with_braces(_DEGREES.sub(r"(\1 \\cdot \\frac{\\pi}{180}) ", text))
    if not text.strip() or _REFUSED.search(text):
        return None
    numbers: dict[sympy.Symbol, sympy.Rational] = {}

    def exact(found: re.Match) -> str:
        name = f"q_{{n{len(numbers)}}}"
        value = decimal(found.group())
        numbers[sympy.Symbol(name, real=True)] = sympy.Rational(value.numerator, value.denominator)
        return f" {name} "

    text = _RENAMED_NAMES.sub(lambda found: _RENAMED[found.group()], text)
    text = _DECIMAL.sub(exact, text)
    try:
        read = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=_READING)
    except RecursionError:
        raise
    except Exception:  # the library's parser raises Exception itself, and whatever its actions run into
        return None
    if not isinstance(read, sympy.Expr):
        return None
    value = read.xreplace({**numbers, sympy.Symbol("i", real=True): sympy.I})
    value = value.replace(
        lambda part: (
            isinstance(part, AppliedUndef) and part.func.__name__ not in _FUNCTIONS and len(part.args) == 1
        ),
        lambda part: sympy.Symbol(part.func.__name__, real=True) * part.args[0],
    )
    value = value.doit()
    if value.has(sympy.nan, sympy.zoo) or value.atoms(sympy.Float):
        return None
    return value


def with_braces(text: str) -> str:
    r"""`\frac12`, `\sqrt2` and `x^10` with their arguments in braces, other groups in parentheses."""
    out: list[str] = []
    position = 0
    while position < len(text):
        command = next(
            (name for name in _COMMANDS if re.match(re.escape(name) + "(?![A-Za-z])", text[position:])), None
        )
        if command is not None:
            out.append(command)
            position += len(command)
            option = re.match(r"\s*\[([^\[\]]*)\]", text[position:]) if command == "\\sqrt" else None
            if option is not None:
                out.append(f"[{option[1]}]")
                position += option.end()
            for _ in range(_COMMANDS[command]):
                argument, position = _argument(
                    text, position, whole_numbers=command == "\\sqrt" and "\\sqrt " in text
                )
                out.append("{" + argument + "}")
        elif text[position] in "^_":
            argument, end = _argument(text, position + 1, whole_numbers=True)
            out.append(text[position] + "{" + argument + "}")
            position = end
        elif text[position] == "{" and not _TAKES_BRACES.search("".join(out)):
            argument, position = _argument(text, position)
            out.append("(" + argument + ")")
        elif text[position] == "\\":
            token = re.match(r"\\(?:[A-Za-z]+|.)?", text[position:], re.DOTALL)
            assert token is not None
            out.append(token.group())
            position += token.end()
        else:
            out.append(text[position])
            position += 1
    return "".join(out)


def _argument(text: str, position: int, whole_numbers: bool = False) -> tuple[str, int]:
    """The next argument, its own arguments in braces, and where it ends: a group, a command, a character, or, with
    `whole_numbers`, all digits of a number and its sign.
    """
    while position < len(text) and text[position] == " ":
        position += 1
    if position < len(text) and text[position] == "{":
        depth, begin = 0, position + 1
        while position < len(text):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            position += 1
            if depth == 0:
                return with_braces(text[begin : position - 1]), position
        return with_braces(text[begin:]), position
    pattern = (
        r"-?\d+(?:\.\d+)?|-?\.\d+|-?\\[A-Za-z]+|-?[A-Za-z]|\([^()]*\)|."
        if whole_numbers
        else r"\\[A-Za-z]+|."
    )
    found = re.match(pattern, text[position:], re.DOTALL)
    if found is None:
        return "", position
    if found.group().lstrip("-") in _COMMANDS:  # x^\frac12
        end = position + found.end()
        begin = position
        for _ in range(_COMMANDS[found.group().lstrip("-")]):
            _, end = _argument(text, end)
        return with_braces(text[begin:end]), end
    return found.group(), position + found.end()


def same_value(ours: sympy.Basic, theirs: sympy.Basic) -> bool:
    """Whether sympy proves that two expressions are equal."""
    if ours == theirs:
        return True
    if ours.has(sympy.oo, -sympy.oo) or theirs.has(sympy.oo, -sympy.oo):
        return False
    if ours.free_symbols != theirs.free_symbols and not (ours.free_symbols and theirs.free_symbols):
        return is_zero(sympy.simplify(ours) - sympy.simplify(theirs))
    return is_zero(ours - theirs)


def is_zero(difference: sympy.Expr) -> bool:
    """Whether sympy proves that an expression is zero, for all values of its symbols."""
    expanded = sympy.expand(difference)
    if expanded.is_Rational:
        return expanded == 0
    if _is_not_zero(difference):  # a proof would be looked for, for seconds
        return False
    return expanded == 0 or sympy.simplify(difference) == 0 or difference.equals(0) is True


def _is_not_zero(difference: sympy.Expr) -> bool:
    """Whether numbers show it: the value at one point, to so many digits that it is not 0."""
    point = {
        symbol: sympy.Rational(17 + 12 * place, 11)
        for place, symbol in enumerate(_sorted_symbols(difference))
    }
    try:
        value = difference.subs(point).evalf(15, maxn=_MOST_DIGITS, strict=True)
    except (PrecisionExhausted, NotImplementedError, ValueError, TypeError):  # it is 0, or no number
        return False
    return bool(value.is_comparable or value.is_complex) and value != 0


def _sorted_symbols(value: sympy.Expr) -> list[sympy.Symbol]:
    return sorted(value.free_symbols, key=str)
