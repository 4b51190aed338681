"""Options of another package that a key passes on by their own names: which are known, which are refused and why, and their types.

Guarantee: an option that megarl sets itself, or with which one of its guarantees would fall, is refused with the reason and, where there is
one, with the key to use.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from megarl.util.record_fields import RecordField


@dataclass(frozen=True)
class OptionTable:
    """What megarl knows of another package's options.

    Attributes:
        package: its name and the version that the table was written for.
        refused: regular expression of whole names -> why, and what to do instead. The first one that fits counts.
        known: name -> what it does, of options that were looked at and may be set. All others are passed on, too.
        names: by option, values that are written as text where the package has a Python object.
    """

    package: str
    refused: Mapping[str, str]
    known: Mapping[str, str]
    names: Mapping[str, tuple[str, ...]]

    def why_refused(self, name: str) -> str | None:
        """The reason not to take an option; None: it is taken."""
        return next((why for pattern, why in self.refused.items() if re.fullmatch(pattern, name)), None)


def option_problems(
    key: str, given: Mapping[str, Any], table: OptionTable, fields: Mapping[str, RecordField]
) -> Iterator[str]:
    """What is wrong with the options under a key.

    Args:
        fields: the package's own; empty: it is not installed here, so that names and types are not checked.
    """
    for name, value in given.items():
        why = table.why_refused(name)
        if why is not None:
            yield f"{key}.{name}: {why}"
        elif fields and name not in fields:
            near = get_close_matches(name, fields, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{key}.{name}: {table.package} has no such option{hint}"
        elif name in table.names:
            if value not in table.names[name]:
                yield f"{key}.{name}={value!r}: it is one of {', '.join(table.names[name])}"
        elif fields and not fields[name].takes(value):
            field = fields[name]
            valid = f"one of {', '.join(map(str, field.choices))}" if field.choices else field.type_text
            yield f"{key}.{name}={value!r}: {table.package} takes {valid}"


def unknown_options(given: Collection[str], table: OptionTable) -> list[str]:
    """Options that are passed on without anything known of their effect on megarl's guarantees."""
    return [name for name in given if name not in table.known and table.why_refused(name) is None]


def options_text(table: OptionTable) -> Iterator[str]:
    """The table for the reference page, as Markdown."""
    yield f"Refused, by names of {table.package} (regular expressions of whole names):\n"
    rows = "\n".join(f"| {_names(pattern)} | {cell(why)} |" for pattern, why in table.refused.items())
    yield f"| option | why, and what to use |\n|---|---|\n{rows}\n"
    yield "Looked at, and passed on:\n"
    rows = "\n".join(f"| `{name}` | {cell(text)} |" for name, text in table.known.items())
    yield f"| option | what it does |\n|---|---|\n{rows}\n"


def _names(pattern: str) -> str:
    return ", ".join(f"`{part}`" for part in pattern.split("|"))


def cell(text: str) -> str:
    """A text in a cell of a table in Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;")
