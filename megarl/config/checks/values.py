"""Checks of single values: choices and bounds, names that plugins may add to, and secrets.

Secrets have no place in a configuration: it is printed, saved in the run folder, and given to trackers.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from megarl.config.problems import did_you_mean
from megarl.config.schema import walk_values
from megarl.config.schema.commands import EvalConfig, TrainConfig

_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_SECRET_NAME = re.compile(
    r"(?i)(?:.*[_-])?(?:api[_-]?key|secret(?:[_-]key)?|password|(?:access|api|auth|bearer|hf)[_-]token)"
)
_ADVICE = "put it into an environment variable, or a file of the library that asks for it"


def secret_problems(config: Any) -> Iterator[str]:
    """URLs with passwords, and free keys (the arguments of a user's own function) that are named like secrets.

    Their values are not shown.
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


def value_problems(config: Any) -> Iterator[str]:
    """Choices and bounds, as declared beside each key."""
    for key, member, value in walk_values(config):
        rules = member.metadata
        for item in value if isinstance(value, tuple) else (value,):
            if item is None:
                continue
            choices = rules.get("choices")
            if choices is not None and item not in choices:
                hint = did_you_mean(str(item), choices)
                yield f"{key}={item!r} is unknown; megarl has {', '.join(choices)}{hint}"
            yield from _bound_problems(key, item, rules)
        if rules.get("ge") == -1 and value == 0:
            meaning = "never" if key.endswith("_freq") else "all"
            yield f"{key}=0: it must be -1 ({meaning}) or at least 1"


_BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("greater than", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("less than", operator.lt),
    "le": ("at most", operator.le),
}


def _bound_problems(key: str, value: Any, rules: Any) -> Iterator[str]:
    bounds = [(*told, rules[name]) for name, told in _BOUNDS.items() if rules.get(name) is not None]
    if not all(holds(value, bound) for _, holds, bound in bounds):
        valid = " and ".join(f"{words} {bound:g}" for words, _, bound in bounds)
        yield f"{key}={value} is out of range: it must be {valid}"


def given_keys(section: Any, names: Collection[str] | None = None) -> list[str]:
    """The keys of a section, or those of `names`, whose values are not their defaults."""
    return [
        member.name
        for member in fields(section)
        if (names is None or member.name in names) and getattr(section, member.name) != member.default
    ]


def registered_problems(
    config: TrainConfig | EvalConfig, key: str, name: str, built_in: Sequence[str]
) -> Iterator[str]:
    """A name that a plugin may register: with `plugins` it is looked up after they are imported."""
    if name not in built_in and not config.plugins:
        yield f"{key}={name!r} is unknown; megarl has {', '.join(built_in)}{did_you_mean(name, built_in)}"
