"""How a key of the configuration is declared, and a walk over all keys of a schema.

A schema is a frozen dataclass whose fields are keys made by `option` or sections (other such dataclasses). The
declaration of a key serves its checks, error messages and the reference page of the documentation; nothing of it
is written elsewhere.
"""

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeGuard


def option(
    help: str,
    default: Any = MISSING,
    *,
    choices: tuple[str, ...] | None = None,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    is_path: bool = False,
    formula: str | None = None,
    refused: Mapping[Any, str] | None = None,
) -> Any:
    """A key: what it means (with its unit), its default (without one it is required), and its valid values.

    Bounds and choices hold for each element of a list; null, where the type allows it, is always valid.
    `is_path`: a leading `~`, and `recipe:NAME` (megarl/config/loading/recipes.py), are expanded when the configuration is read.
    `formula`: what is computed with the key, for the reference page.
    `refused`: values that other trainers have and megarl refuses while it reads them, each with what to do instead.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "gt": gt,
        "ge": ge,
        "lt": lt,
        "le": le,
        "is_path": is_path,
        "formula": formula,
        "refused": refused,
    }
    return field(default=default, metadata=metadata)


def section(help: str, default_factory: Any = MISSING) -> Any:
    """A group of keys; without a default factory it holds a required key."""
    return field(default_factory=default_factory, metadata={"help": help})


def optional_section(help: str) -> Any:
    """A group of keys that may be absent: null."""
    return field(default=None, metadata={"help": help})


@cache
def field_types(schema: type) -> Mapping[str, Any]:
    """Field name -> type, with the annotations of the dataclass evaluated (once: this takes longer than all other work of reading a key)."""
    return typing.get_type_hints(schema)


def members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a type: of `int | None` (int, NoneType), of any other itself."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _is_schema(kind: Any) -> TypeGuard[type]:
    return is_dataclass(kind)


@cache
def section_type(kind: Any) -> type | None:
    """The dataclass of a section (which may be optional); None for a key."""
    return next((member for member in members(kind) if _is_schema(member)), None)


@cache
def table_type(kind: Any) -> type | None:
    """The dataclass of the values where a key is a mapping of free names to sections; else None."""
    for member in members(kind):
        if typing.get_origin(member) is dict:
            inner = typing.get_args(member)[1]
            return inner if _is_schema(inner) else None
    return None


def is_free(kind: Any) -> bool:
    """Whether a key is a mapping whose names and values are its reader's: `dict[str, Any]`."""
    return any(
        typing.get_args(member) == (str, Any) for member in members(kind) if typing.get_origin(member) is dict
    )


def type_text(kind: Any) -> str:
    """A type in words, as users write its values in YAML."""
    names = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
    texts = []
    for member in members(kind):
        if member in names:
            texts.append(names[member])
        elif typing.get_origin(member) is tuple:
            args = typing.get_args(member)
            items = {str: "texts", int: "integers", float: "numbers"}[args[0]]
            texts.append(f"a list of {items}" if Ellipsis in args else f"a list of {len(args)} {items}")
        elif typing.get_origin(member) is dict:
            texts.append("free keys" if is_free(member) else "named sections")
        else:
            texts.append("a section of keys")
    return " or ".join(texts)


def is_required(member: Field) -> bool:
    """Whether a key (or a section as a whole) has no default."""
    return member.default is MISSING and member.default_factory is MISSING


def walk(schema: type, prefix: str = "") -> Iterator[tuple[str, Field, Any]]:
    """Every key and section of a schema in its order: (dotted key, field, type).

    The names in a table of sections are free; its keys appear with `<name>` in their place.
    """
    kinds = field_types(schema)
    for member in fields(schema):
        key, kind = f"{prefix}{member.name}", kinds[member.name]
        yield key, member, kind
        inner, table = section_type(kind), table_type(kind)
        if inner is not None:
            yield from walk(inner, f"{key}.")
        elif table is not None:
            yield from walk(table, f"{key}.<name>.")


def walk_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Field, Any]]:
    """Every key of a configuration: (dotted key, field, value); a section that is null or empty is a key."""
    schema: type = type(config)
    kinds = field_types(schema)
    for member in fields(config):
        key, value = f"{prefix}{member.name}", getattr(config, member.name)
        if is_dataclass(value):
            yield from walk_values(value, f"{key}.")
        elif isinstance(value, dict) and value and not is_free(kinds[member.name]):
            for name, entry in value.items():
                yield from walk_values(entry, f"{key}.{name}.")
        else:
            yield key, member, value


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key; None where the configuration has no such key or section."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return config


def with_value(config: Any, key: str, value: Any) -> Any:
    """The configuration with another value of a dotted key."""
    first, _, rest = key.partition(".")
    if isinstance(config, dict):
        return {**config, first: with_value(config[first], rest, value) if rest else value}
    return replace(config, **{first: with_value(getattr(config, first), rest, value) if rest else value})
