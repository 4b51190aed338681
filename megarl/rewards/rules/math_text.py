r"""The text of a mathematical answer in one spelling: LaTeX as ASCII, without typesetting (`\left`, `\,`, `\dfrac`, `$`).

The same answer may still differ in spacing.
"""

import re
import unicodedata
from fractions import Fraction

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2013": "-", "\ufe63": "-",
        "\u00d7": r"\cdot ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/", "\u2044": "/", "\u2215": "/",
        "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00b0": r"^\circ ", "\u00b1": r"\pm ", "\u2213": r"\mp ",
        "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u2248": r"\approx ", "\u2208": r"\in ",
        "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2205": r"\emptyset ", "\u211d": r"\mathbb{R}", "\u221a": r"\sqrt ",
        "\u3001": ",", "\u3002": ".", "\u2032": "'", "\u2019": "'", "%": r"\%",
    }
)  # fmt: skip
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b"
_RAISED = re.compile(f"[{_SUPERSCRIPTS}]+")
_REPEATED = r"\\(?:bar|overline|dot)\s*(?:\{(\d+)\}|(\d))"
_DECIMAL = re.compile(rf"(?=\.?\d)(\d*)(?:\.(\d*)(?:{_REPEATED})?)?")
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:\\frac\{(?P<top>\d+)\}\{(?P<bottom>\d+)\}|(?P<a>\d+)/(?P<b>\d+)"
    r"|(?P<decimal>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+|\d*\.\d*\\(?:bar|overline|dot)(?:\{\d+\}|\d)))"
)
_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # all spaces but those between digits
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_TYPED = r"(?<!\\text\{)(?<!\\operatorname\{)(?<![\\A-Za-z])"


def _joined(found: re.Match) -> str:
    return found[1] + found[2].replace(" ", "")


# Commands with another spelling.
_OTHER_NAMES = {
    "leq": r"\le ", "geq": r"\ge ", "neq": r"\ne ", "lt": "<", "gt": ">", "times": r"\cdot ", "ast": r"\cdot ", "div": "/",
    "thickapprox": r"\approx ", "approxeq": r"\approx ", "simeq": r"\approx ", "lvert": "|", "rvert": "|", "vert": "|",
    "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "langle": "(", "rangle": ")",
}  # fmt: skip
# (pattern, replacement), applied one after the other.
_SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:begin|end)\{(?:equation|align|aligned|gather|math|displaymath)\*?\}", " "),
        (r"\\\$", r"\\dollar "),
        (r"(?<!\\)\$|(?<!\\)\\[()\[\]]", " "),
        (r"\\(?:left|right|m?middle)\s*\.(?!\d)", " "),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])", " "),
        (r"\{\s*,\s*\}|,\s*\\!", ","),
        (r"\\!", ""),
        (
            r"\\(?:quad|qquad|enspace|thinspace|space)(?![A-Za-z])|(?<!\\)\\[,;: ]|~|\\[hv]space\*?\{[^{}]*\}",
            " ",
        ),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:mathbf|boldsymbol|bm|vec)\s*\{([A-Za-z])\}", r"\1"),
        (r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
        (r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)|mathrm|mathbf|mathsf|mathit|mbox|hbox)\s*\{", r"\\text{"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\text\{\s*\}", " "),
        (r"\\text\{\s*(?:percent|per cent|pct)\.?\s*\}", r"\\%"),
        (r"(?<=\d)\s+percent\b", r"\\%"),
        (r"\\leqslant", r"\\le "),
        (r"\\geqslant", r"\\ge "),
        (rf"\\({'|'.join(_OTHER_NAMES)})(?![A-Za-z])", lambda found: _OTHER_NAMES[found[1]]),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\ne "),
        (r"\*\*", "^"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:R|Reals|reals)(?![A-Za-z])|\\mathbb\s*R(?![A-Za-z])", r"\\mathbb{R}"),
        (r"\\(?:degree|degrees)(?![A-Za-z])|\^\s*\{?\s*\\circ\s*\}?", r"^\\circ "),
        (r"(?<=\d)\s*\\text\{\s*degrees?\s*\}", r"^\\circ "),
        (r"(?<=\d)\s+degrees?\b", r"^\\circ "),
        # Names of functions and constants as they are typed outside of LaTeX.
        (_TYPED + r"(sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|pi)(?![A-Za-z])", r"\\\1 "),
        (_TYPED + r"(?:infinity|oo)(?![A-Za-z])", r"\\infty "),
        (r"\s+", " "),
        (r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d/])", _joined),
    )
)
_ENDS = re.compile(r"(?:\\\\|[\s.,;:])+$")
_BASE = re.compile(r"(?<=[0-9A-F])\s*_\s*\{?\s*(\d+)\s*\}?$")  # the base of a numeral; 10 says nothing
_MOST_BRACES = 4
_BEGINNINGS = re.compile(r"^(?:\\\\(?![A-Za-z])|\s)+")


def clean(text: str) -> str:
    """The answer in one spelling; spaces have a meaning only next to commas and between words and numbers."""
    text = _RAISED.sub(lambda found: "^{" + _digits(found.group()) + "}", text)
    text = "".join(_ascii(character) for character in text).translate(_CHARACTERS).replace(r"\\%", r"\%")
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _BEGINNINGS.sub("", _ENDS.sub("", text))
    text = _BASE.sub(lambda found: "" if found[1] == "10" else f"_{{{found[1]}}}", text)
    for _ in range(_MOST_BRACES):
        inner = unwrapped(text, "{", "}")
        if inner is None:
            break
        text = _BEGINNINGS.sub("", _ENDS.sub("", inner))
    return text


def folded(text: str) -> str:
    r"""For comparing answers as texts: `\text{}` is left out, spacing too, and letter case where there are words."""
    plain = _TEXT.sub(r"\1", text)
    is_words = (plain != text and re.search("[A-Za-z]{2}", plain)) or re.search(
        r"(?<![\\A-Za-z])[A-Za-z]{4,}", plain
    )
    plain = _SPACE.sub("", plain).rstrip(".")
    return plain.casefold() if is_words or plain.casefold() in ("yes", "no") else plain


def number(text: str) -> Fraction | None:
    r"""The number that `12`, `-1,200.5`, `0.\overline{3}`, `3/4` or `\frac{3}{4}` is; None: the text is no such number."""
    found = _NUMBER.fullmatch(_SPACE.sub("", text))
    if found is None:
        return None
    if found["top"] is not None:
        top, bottom = int(found["top"]), int(found["bottom"])
    elif found["a"] is not None:
        top, bottom = int(found["a"]), int(found["b"])
    else:
        value = decimal(found["decimal"].replace(",", ""))
        return -value if found["sign"] == "-" else value
    if bottom == 0:
        return None
    return Fraction(-top if found["sign"] == "-" else top, bottom)


def decimal(text: str) -> Fraction:
    r"""The number that `12`, `12.5`, `.5` or `0.1\overline{6}` is."""
    found = _DECIMAL.fullmatch(text)
    assert found is not None, text
    decimals, repeated = found[2] or "", found[3] or found[4] or ""
    value = Fraction(int((found[1] or "0") + decimals), 10 ** len(decimals))
    if repeated:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(decimals))
    return value


def unwrapped(text: str, left: str, right: str) -> str | None:
    """The text between `left` at the beginning and the `right` that closes it; None: that is not at the end."""
    end = closing(text, left, right) if text.startswith(left) else None
    return text[len(left) : end] if end is not None and end + len(right) == len(text) else None


def closing(text: str, left: str, right: str) -> int | None:
    """Where the `right` begins that closes the `left` at the beginning of a text; None: none does."""
    depth, position = 0, 0
    while position < len(text):
        if text.startswith(left, position):
            depth += 1
            position += len(left)
        elif text.startswith(right, position):
            depth -= 1
            if depth == 0:
                return position
            position += len(right)
        else:
            position += 2 if text[position] == "\\" else 1  # an escaped brace closes nothing
    return None


def _digits(raised: str) -> str:
    return "".join("0123456789-"[_SUPERSCRIPTS.index(character)] for character in raised)


def _ascii(character: str) -> str:
    """Full-width forms, digits of any script, fractions in one character and spaces as ASCII; others as they are."""
    if character.isascii():
        return character
    if unicodedata.category(character) in ("Zs", "Cf"):
        return " " if unicodedata.category(character) == "Zs" else ""
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.decimal(character))
    folded = unicodedata.normalize("NFKC", character)
    if unicodedata.decomposition(character).startswith("<fraction>") and folded[-1].isdigit():
        top, bottom = folded.split("\u2044")
        return rf"\frac{{{top}}}{{{bottom}}}"
    return folded if unicodedata.decomposition(character).startswith("<wide>") else character
