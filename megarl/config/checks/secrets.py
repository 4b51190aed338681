"""Secrets have no place in a configuration: it is printed, saved beside the run, and given to trackers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from megarl.config.schema.options import walk_values

_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_SECRET_NAME = re.compile(
    r"(?i)(?:.*[_-])?(?:api[_-]?key|secret(?:[_-]key)?|password|(?:access|api|auth|bearer|hf)[_-]token)"
)
_ADVICE = "put it into an environment variable, or a file of the library that asks for it"


def secret_problems(config: Any) -> Iterator[str]:
    """URLs with passwords, and free keys (the arguments of a user's own function) that are named like secrets.

    What is found is not shown.
    """
    for key, _, value in walk_values(config):
        for place, name, text in _texts(key, "", value):
            if _PASSWORD_IN_URL.search(text):
                yield f"{place} is a URL with a password, which would be printed and saved: {_ADVICE}"
            elif name and _SECRET_NAME.fullmatch(name):
                yield f"{place} is named like a secret, which would be printed and saved: {_ADVICE}"


def _texts(place: str, name: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """(dotted key, its own name where it is a free one, value) of each text in a value."""
    if isinstance(value, str):
        yield place, name, value
    elif isinstance(value, Mapping):
        for own, inner in value.items():
            yield from _texts(f"{place}.{own}", str(own), inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(f"{place}[{number}]", name, inner)
    elif is_dataclass(value):
        for member in fields(value):
            yield from _texts(f"{place}.{member.name}", "", getattr(value, member.name))
