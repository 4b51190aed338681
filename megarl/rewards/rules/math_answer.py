r"""Whether two mathematical answers are the same: numbers and formulas with or without a unit, lists, sets, tuples,
intervals and their unions, equations, inequalities, matrices, words.

Equal answers
- Numbers and formulas that sympy proves to be equal. An approximation never equals an exact value: 0.333333 is not 1/3.
- A list or a set in any order; a tuple in its order; `\pm a` is a list of two. An interval with its kinds of ends.
- A unit, `\%` or a degree sign may be left out on one side, but must not differ; 12.5\% is 12.5 and also 0.125.
- `x = 3` where the truth is 3, or 3 where it is `x = 3`, but not `y = 3`; equations and inequalities with the same solutions.
- 2210_3 equals only itself: another base, or none, is another number.
- Words, whatever their letter case.

Formulas (LaTeX, as `math_text.clean` spells them) become exact expressions of sympy, read by latex2sympy2_extended. Notations
that the library misreads are changed or refused before: it drops the subscript of 12_3 and the prime of x', reads `2 3` as 5
and a degree as nothing, and makes decimals floats. Here a decimal is the fraction that it is written as, and two values are
equal if sympy proves it, so no approximation equals a number.

sympy takes seconds to import, and a formula can take all its time and memory: only child processes of
`megarl.rewards.rules.math_rules` compare answers here.
"""

import re

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef

from megarl.rewards.rules.math_parts import (
    NAME,
    Answer,
    Matrix,
    Parts,
    Quantity,
    Relation,
    SetExpression,
    read,
)
from megarl.rewards.rules.math_text import clean, decimal, folded

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
# The arguments of these stay in braces; the arguments of \sin and the like get parentheses: the library reads \sin{x}/2 as \sin(x/2).
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
    except Exception:  # the library's parser raises Exception itself, and its actions raise anything
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
    if _is_not_zero(difference):  # sympy would look for a proof for seconds
        return False
    return expanded == 0 or sympy.simplify(difference) == 0 or difference.equals(0) is True


def _is_not_zero(difference: sympy.Expr) -> bool:
    """Whether the value at one point, to so many digits that it cannot be 0, shows that an expression is not zero."""
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


_MOST_PARTS = 64


def same_answer(answer: str, truth: str) -> bool:
    """Whether two texts of answers say the same."""
    return _same(clean(answer), clean(truth))


def _same(ours: str, truth: str) -> bool:
    if folded(ours) == folded(truth):
        return folded(truth) != ""
    return _compare(read(ours), read(truth))


def _compare(ours: Answer, truth: Answer) -> bool:
    if (isinstance(ours, Relation) and ours.is_equation) or (
        isinstance(truth, Relation) and truth.is_equation
    ):
        return _same_equation(ours, truth)
    if isinstance(ours, Matrix) and isinstance(truth, Matrix):
        return _same_matrix(ours, truth)
    if isinstance(ours, Quantity) and isinstance(truth, Quantity):
        return _same_quantity(ours, truth) or _same_region(ours, truth)
    if isinstance(ours, Parts) and isinstance(truth, Parts):
        return _same_parts(ours, truth)
    if isinstance(ours, Parts | Quantity) and isinstance(truth, Parts | Quantity):  # {5} and 5
        both = [Parts((side.text,), "list") if isinstance(side, Quantity) else side for side in (ours, truth)]
        if all(side.kind in ("list", "set") for side in both):
            return _same_parts(*both)
    return _same_region(ours, truth)


def _same_equation(ours: Answer, truth: Answer) -> bool:
    """At least one is an equation; of a chain, its first and last sides count."""
    if not isinstance(truth, Relation):
        assert isinstance(ours, Relation)
        return _compare(read(ours.sides[-1]), truth)
    if not isinstance(ours, Relation):
        named = truth.is_equation and NAME.fullmatch(truth.sides[0]) is not None
        return named and _compare(ours, read(truth.sides[-1]))
    if not (ours.is_equation and truth.is_equation):
        return False
    if folded(ours.sides[0]) == folded(truth.sides[0]):
        return _same(ours.sides[-1], truth.sides[-1])
    ends = [_difference(side.sides[0], side.sides[-1]) for side in (ours, truth)]
    return ends[0] is not None and ends[1] is not None and _ratio(ends[0], ends[1]) is not None


def _difference(left: str, right: str) -> sympy.Expr | None:
    sides = read_formula(left), read_formula(right)
    return None if sides[0] is None or sides[1] is None else sides[0] - sides[1]


def _ratio(ours: sympy.Expr, truth: sympy.Expr) -> sympy.Expr | None:
    """`ours / truth` if it is a number but 0; None: it is not."""
    if not truth.free_symbols or ours.free_symbols != truth.free_symbols or is_zero(truth):
        return None
    ratio = sympy.simplify(ours / truth)
    return ratio if ratio.is_number and ratio.is_nonzero else None


def _same_matrix(ours: Matrix, truth: Matrix) -> bool:
    if [len(row) for row in ours.rows] != [len(row) for row in truth.rows]:
        return False
    return all(
        _same(entry, right)
        for row, true_row in zip(ours.rows, truth.rows, strict=True)
        for entry, right in zip(row, true_row, strict=True)
    )


def _same_parts(ours: Parts, truth: Parts) -> bool:
    if max(len(ours.parts), len(truth.parts)) > _MOST_PARTS:
        return False
    kinds = {ours.kind, truth.kind}
    if kinds <= {"list", "set"}:
        if "set" in kinds:
            return all(any(_same(one, other) for other in truth.parts) for one in ours.parts) and all(
                any(_same(other, one) for other in ours.parts) for one in truth.parts
            )
        if len(ours.parts) != len(truth.parts):
            return False
        # Such as x = 1, y = 2 and 1, 2.
        if (_names(truth) and not _names(ours)) or (_names(ours) and not _names(truth)):
            return all(map(_same, ours.parts, truth.parts))
        left = list(truth.parts)
        for part in ours.parts:
            match = next((other for other in left if _same(part, other)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    if len(kinds) > 1 and kinds != {"()", "list"}:  # (1, 2) may be written without parentheses
        return False
    return len(ours.parts) == len(truth.parts) and all(map(_same, ours.parts, truth.parts))


def _names(parts: Parts) -> bool:
    """Whether its parts are equations of different names."""
    read_parts = [read(part) for part in parts.parts]
    names = {part.sides[0] for part in read_parts if isinstance(part, Relation) and part.is_equation}
    return len(names) > 1


def _same_quantity(ours: Quantity, truth: Quantity) -> bool:
    if ours.unit and truth.unit and ours.unit != truth.unit:
        return False
    if folded(ours.formula) == folded(truth.formula):
        return folded(truth.formula) != ""
    values = read_formula(ours.formula), read_formula(truth.formula)
    if values[0] is None or values[1] is None:
        return False
    if same_value(*values):
        return True
    factor = sympy.Rational(1, 100) if "%" in (ours.unit, truth.unit) else sympy.pi / 180
    scaled = [
        value * factor if side.unit in ("%", "degree") else value
        for side, value in zip((ours, truth), values, strict=True)
    ]
    return ours.unit != truth.unit and {ours.unit, truth.unit} <= {"", "%", "degree"} and same_value(*scaled)


def _same_region(ours: Answer, truth: Answer) -> bool:
    """Sets of real numbers, and inequalities: by their solutions, or in several unknowns by their difference."""
    if isinstance(ours, Relation) and isinstance(truth, Relation) and _same_inequality(ours, truth):
        return True
    regions = _region(ours), _region(truth)
    if regions[0] is None or regions[1] is None:
        return False
    unknowns = [
        {side.sides[1] if len(side.sides) == 3 else side.sides[0]}
        for side in (ours, truth)
        if isinstance(side, Relation)
    ]
    if len(unknowns) == 2 and _unknown(ours) != _unknown(truth):
        return False
    return regions[0] == regions[1] or regions[0].symmetric_difference(regions[1]) == sympy.S.EmptySet


def _same_inequality(ours: Relation, truth: Relation) -> bool:
    if len(ours.signs) != 1 or len(truth.signs) != 1:
        return False
    differences = _difference(*ours.sides), _difference(*truth.sides)
    if differences[0] is None or differences[1] is None:
        return False
    ratio = _ratio(differences[0], differences[1])
    turned = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
    if ratio is None or ratio.is_positive is None:
        return False
    return ours.signs[0] == (truth.signs[0] if ratio.is_positive else turned.get(truth.signs[0]))


def _unknown(side: Answer) -> frozenset:
    assert isinstance(side, Relation)
    read_sides = [read_formula(text) for text in side.sides]
    return frozenset().union(*(value.free_symbols for value in read_sides if value is not None))


def _region(side: Answer) -> sympy.Set | None:
    """The answer as a set of real numbers; None: it is no such set."""
    if isinstance(side, Quantity):
        return {r"\mathbb{R}": sympy.S.Reals, r"\emptyset": sympy.S.EmptySet}.get(side.text.strip())
    if isinstance(side, Parts):
        values = [read_formula(part) for part in side.parts]
        if any(value is None or not value.is_extended_real for value in values):
            return None
        if side.kind == "set":
            return sympy.FiniteSet(*values)
        if side.kind == "list" or len(values) != 2:
            return None
        return sympy.Interval(*values, left_open=side.kind[0] == "(", right_open=side.kind[1] == ")")
    if isinstance(side, SetExpression):
        sets = [_region(read(text)) for text in side.sets]
        if any(one is None for one in sets):
            return None
        region = sets[0]
        for sign, other in zip(side.signs, sets[1:], strict=True):
            region = {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}[
                sign
            ](region, other)
        return region
    return _solutions(side) if isinstance(side, Relation) else None


def _solutions(relation: Relation) -> sympy.Set | None:
    """The real numbers for which a chain of relations in one unknown holds."""
    values = [read_formula(side) for side in relation.sides]
    if any(value is None for value in values) or "in" in relation.signs:
        return None
    unknowns = set().union(*(value.free_symbols for value in values))
    if len(unknowns) != 1:
        return None
    region: sympy.Set = sympy.S.Reals
    kinds = {"=": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, ">": sympy.Gt, "<=": sympy.Le, ">=": sympy.Ge}
    for left, sign, right in zip(values, relation.signs, values[1:], strict=False):
        condition = kinds[sign](left, right)
        region = region.intersect(
            condition.as_set()
            if condition not in (True, False)
            else (sympy.S.Reals if condition else sympy.S.EmptySet)
        )
    return region
