r"""A quantity: a formula, and the unit that may stand behind it (`5\text{ cm}`, `5 cm`, `\$5`, `50\%`, `90^\circ`)."""

import re
from dataclasses import dataclass

# In \text{} any word is a unit but these: they make another number or answer of what stands before them.
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
    """`text` is the whole, `unit` its name in one spelling, or "": there is none."""

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
