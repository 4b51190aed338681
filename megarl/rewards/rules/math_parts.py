r"""The kind of an answer: a quantity, a list, a set, a tuple or interval, a relation, an expression of sets, a matrix.

The texts within are left as texts. `math_text.clean` has been over all of them. A quantity is a formula, and the unit that may
stand behind it (`5\text{ cm}`, `5 cm`, `\$5`, `50\%`, `90^\circ`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.rewards.rules.math_text import unwrapped

# In \text{} any word is a unit but these, which change the number or answer before them.
_NO_UNITS = re.compile(
    r"(?:hundred|thousand|million|billion|trillion|dozen|quarter|third|tenth|hundredth|time)s?|half|halves|score|squared|"
    r"cubed|factorial|plus|minus|over|base|and|or|not|if|when|where|for|with|mod|is|to|than|only"
)
_ONE_NAME = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre", "in inch inche",
        "ft foot feet", "yd yard", "mi mile", "g gram", "kg kilogram", "lb pound", "oz ounce", "l liter litre",
        "ml milliliter millilitre", "s sec second", "min minute", "h hr hour", "day", "week", "month", "year",
        "dollar", "cent", "degree", "%", "mph", "unit", "sq square", "cubic cu", "per", "way", "point", "digit", "student", "people person",
        "radian rad", "gallon", "acre", "page", "marble", "apple", "coin", "side", "integer", "solution", "term", "edge",
        "kmh", "kph", "euro", "egg", "ball", "hz", "kn", "n", "j", "w", "v", "pa", "mol", "k",
    )
    for name in names.split()
}  # fmt: skip
_OTHER_WAYS = tuple(
    (re.compile(pattern), other)
    for pattern, other in (
        (r"\bsq (\w+)", r"\1 ^ 2"),
        (r"\bcubic (\w+)", r"\1 ^ 3"),
        (r"\bper\b", "/"),
        (r"\bmph\b", "mi / h"),
        (r"\b(?:kmh|kph|kmph)\b", "km / h"),
    )
)
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREE = re.compile(r"(.*\S)\s*\^\\circ\s*(?:\\text\{\s*([CFK])\s*\}|([CFK]))?", re.DOTALL)
_POWER = r"(?:\s*\^\s*(?:\d|\{\s*-?\d\s*\}))?"
_TEXT_UNIT = re.compile(r"(.*?[\w})!|])\s*((?:\\text\{[^{}]*\}" + _POWER + r"|\s|/|\\cdot ?)+)", re.DOTALL)
_PLAIN_UNIT = re.compile(
    r"([-+.,\d\s]*\d|[-+]?\\frac\{\d+\}\{\d+\}|[-+]?\d+\s*/\s*\d+|.*\\pi|.*\\sqrt\{?\d+\}?)\s*([A-Za-z]{2,}(?:/[A-Za-z]+)?(?:[\s-]+[A-Za-z]{2,})*"
    + _POWER
    + ")"
)


@dataclass(frozen=True)
class Quantity:
    """`text`: all of it; `unit`: its name in one spelling, "" without one."""

    text: str
    formula: str
    unit: str


def split_unit(text: str) -> Quantity:
    """A text as formula and unit."""
    formula, unit = _split(text)
    return Quantity(text, formula.strip(), unit)


def _split(text: str) -> tuple[str, str]:
    if r"\dollar" in text:
        return re.sub(r"\\dollar\s*", "", text), "dollar"
    if text.endswith(r"\%"):
        return text[:-2], "%"
    found = _DEGREE.fullmatch(text)
    if found is not None and not _FUNCTION.search(found[1]):
        scale = found[2] or found[3]
        return found[1], f"degree {scale}" if scale else "degree"
    found = _TEXT_UNIT.fullmatch(text)
    if found is not None and r"\text" in found[2] and not found[1].endswith(r"\text"):
        words = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", found[2])
        unit = _unit(words)
        if unit:
            return found[1], unit
    found = _PLAIN_UNIT.fullmatch(text)
    if found is not None:
        words = re.split(r"[\s-]+", re.sub(_POWER + "$", "", found[2]).strip())
        if all(_singular(word) in _ONE_NAME for word in words):
            return found[1], _unit(found[2])
    return text, ""


def _unit(words: str) -> str:
    """A unit in one spelling; "" where the words are none."""
    names = re.findall(
        r"[A-Za-z]+|[/^]|-?\d+", words.replace("{", "").replace("}", "").replace("\\cdot", " ")
    )
    if (
        not names
        or not any(name.isalpha() for name in names)
        or any(_NO_UNITS.fullmatch(name.casefold()) for name in names)
    ):
        return ""
    unit = " ".join(_ONE_NAME.get(_singular(name), _singular(name)) for name in names)
    for pattern, other in _OTHER_WAYS:
        unit = pattern.sub(other, unit)
    return unit


def _singular(word: str) -> str:
    folded = word.casefold()
    if folded in _ONE_NAME or len(folded) < 3:
        return folded
    return folded.removesuffix("s") if not folded.endswith("ss") else folded


_SIGNS = {
    "=": "=",
    "<": "<",
    ">": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\ne": "!=",
    r"\in": "in",
    r"\approx": "~",
}
_SIGN = re.compile(r"\\(?:le|ge|ne|in|approx)(?![A-Za-z])|[=<>]")
_OR = re.compile(
    r",?\s*(?:\\text\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![A-Za-z])|\\vee(?![A-Za-z]))\s*"
)
_AND = re.compile(r",?\s*(?:\\text\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z]))\s*|;\s*")
_COMMA = re.compile(r",\s*")
_SET_SIGN = re.compile(r"\\(?:cup|cap|setminus|backslash)(?![A-Za-z])")
# Outside of brackets.
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d|,\d)(?![^()\[\]{}]*[)\]}])")
_LETTERS = r"\([A-Za-z](?:,\s*[A-Za-z])*\)"
NAME = re.compile(
    rf"(?!\\pi|[ei](?![A-Za-z(_']))\\?[A-Za-z]+(?:_(?:\{{[^{{}}]*\}}|\w))?'*\s*(?:{_LETTERS})?|{_LETTERS}|\\text\{{[^{{}}]*\}}"
)
_CHOICE = re.compile(r"\\text\{\s*\(?([A-Z])\)?\s*\}")
_MATRIX = re.compile(r"\\begin\{([bpBvV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)


@dataclass(frozen=True)
class Parts:
    """Several answers, as texts: a bare list, a set, or the parts of a tuple or interval."""

    parts: tuple[str, ...]
    kind: str  # "list", "set", "()", "[)", ...


@dataclass(frozen=True)
class Relation:
    """`sides[0] signs[0] sides[1] ...`"""

    sides: tuple[str, ...]
    signs: tuple[str, ...]

    @property
    def is_equation(self) -> bool:
        return set(self.signs) == {"="}


@dataclass(frozen=True)
class SetExpression:
    """Sets, as texts, joined by `signs`: \\cup, \\cap, \\setminus; or alternative inequalities."""

    sets: tuple[str, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """Its entries, as texts."""

    rows: tuple[tuple[str, ...], ...]


Answer = Parts | Relation | SetExpression | Matrix | Quantity


def read(text: str) -> Answer:
    """A cleaned text as an answer of its kind."""
    text = _CHOICE.sub(r"\1", text) if _CHOICE.fullmatch(text) else text
    alternatives = split(text, _OR)[0]
    if len(alternatives) > 1:
        if all(_is_inequality(part) for part in alternatives):
            return SetExpression(tuple(alternatives), (r"\cup",) * (len(alternatives) - 1))
        text = ", ".join(alternatives)
    parts = items(", ".join(split(text, _AND)[0]), is_bare=True)
    if len(parts) > 1:
        return Parts(_with_both_signs(parts), "list")
    text = parts[0] if parts else ""
    sides, signs = split(text, _SIGN)
    if signs:
        return _relation(sides, [_SIGNS[sign] for sign in signs])
    sets, operators = split(text, _SET_SIGN)
    if operators:
        return SetExpression(
            tuple(sets), tuple(operator.replace("backslash", "setminus") for operator in operators)
        )
    both = _with_both_signs([text])
    if len(both) > 1 and not text.startswith(r"\{"):
        return Parts(both, "list")
    return _bracketed(text) or _matrix(text) or split_unit(text)


def split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between separators outside of all brackets, and the separators."""
    parts, separators, depth, begin, position = [], [], 0, 0, 0
    while position < len(text):
        found = separator.match(text, position) if depth == 0 else None
        if found is not None:
            parts.append(text[begin:position].strip())
            separators.append(found.group().strip())
            begin = position = found.end()
            continue
        token = re.match(r"\\(?:begin|end)\{\w+\}|\\(?:[A-Za-z]+|.)|.", text[position:], re.DOTALL)
        assert token is not None
        if token.group() in ("(", "[", "{", r"\{") or token.group().startswith(r"\begin"):
            depth += 1
        elif token.group() in (")", "]", "}", r"\}") or token.group().startswith(r"\end"):
            depth -= 1
        position += token.end()
    return [*parts, text[begin:].strip()], separators


def items(text: str, is_bare: bool) -> tuple[str, ...]:
    """The parts between commas. Commas in numbers are no separators where others have a space behind them, as in
    `1,000, 2,000`, and in a bare `1,000`.
    """
    if (is_bare and ", " not in text) or re.search(r"\d,\d{3}, ", text):
        text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)
    return tuple(part for part in split(text, _COMMA)[0] if part)


def _relation(sides: list[str], signs: list[str]) -> Answer:
    """A chain; `x \\in S` is S, and of `a \\approx b` only a counts, or b where a is a mere name or empty."""
    if "~" in signs:
        at = signs.index("~")
        before, is_name = sides[: at + 1], at == 0 and (not sides[0] or NAME.fullmatch(sides[0]))
        if is_name:
            return read(sides[1]) if len(sides) == 2 else _relation(sides[1:], signs[1:])
        return _relation(before, signs[:at]) if at else read(before[0])
    if not sides[0] and signs[0] == "=":
        return read(sides[1]) if len(sides) == 2 else _relation(sides[1:], signs[1:])
    if signs == ["in"]:
        return read(sides[1])
    return Relation(tuple(sides), tuple(signs))


def _bracketed(text: str) -> Answer | None:
    inner = unwrapped(text, r"\{", r"\}")
    if inner is not None and not re.search(r"\\mid|[:|]", inner):
        return Parts(_with_both_signs(items(inner, is_bare=False)), "set")
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    parts = items(text[1:-1], is_bare=False)
    closes_at_end = split(text, re.compile(r"(?!)"))[0] == [text] and _depth_is_positive(text[:-1])
    if len(parts) > 1 and closes_at_end:
        return Parts(parts, text[0] + text[-1])
    inner = unwrapped(text, "(", ")")
    return None if inner is None else read(inner)


def _depth_is_positive(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            return False
    return True


def _matrix(text: str) -> Matrix | None:
    found = _MATRIX.fullmatch(text)
    if found is None or found[1] in ("vmatrix", "Vmatrix"):
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2]) if row.strip()]
    return Matrix(tuple(tuple(entry.strip() for entry in row.split("&")) for row in rows))


def _with_both_signs(parts: Sequence[str]) -> tuple[str, ...]:
    r"""Each part; of `a \pm b \mp c` both `a + b - c` and `a - b + c`."""
    both = []
    for part in parts:
        if re.search(r"\\(?:pm|mp)(?![A-Za-z])", part):
            upper = re.sub(r"\\mp(?![A-Za-z])", "-", re.sub(r"\\pm(?![A-Za-z])", "+", part))
            lower = re.sub(r"\\mp(?![A-Za-z])", "+", re.sub(r"\\pm(?![A-Za-z])", "-", part))
            both += [upper.removeprefix("+").strip(), lower.removeprefix("+").strip()]
        else:
            both.append(part)
    return tuple(both)


def _is_inequality(text: str) -> bool:
    return bool({"<", ">", r"\le", r"\ge", r"\ne"} & set(split(text, _SIGN)[1]))
