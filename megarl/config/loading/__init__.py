"""From a YAML file and overrides to a typed configuration, and back; and which command a recipe belongs to.

Guarantees: no key is ignored; every problem is reported at once, with where it was written; what `save_config`
writes, `load_config` reads as an equal configuration.

Neither pydantic (2.14) nor OmegaConf's structured configs (2.4) builds the sections: pydantic takes "1e-8" for a number and 1 for true, or
else refuses mappings for sections, and it takes over a second to import it and to build the validators of `TrainConfig`; OmegaConf stops at
the first wrong key.
"""

import json
import math
import os
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megarl.config.loading.document import (
    UNRESOLVED,
    Entry,
    Tree,
    YamlDumper,
    entries,
    interpolate,
    merge,
    parse_override,
    plain,
    read_file,
)
from megarl.config.loading.recipes import PREFIX, recipe_path, run_by
from megarl.config.problems import key_advice, nearest_keys, raise_if_any
from megarl.config.schema import (
    field_types,
    is_free,
    is_required,
    members,
    section_type,
    table_type,
    type_text,
    walk,
)
from megarl.config.schema.commands import EvalConfig, TrainConfig
from megarl.config.schema.supervised import DPOConfig, RMConfig, SFTConfig
from megarl.util.files import write_text

T = TypeVar("T")

_LARGEST_EXACT_FLOAT = 2**53
_ACTOR = "actor_rollout_ref.actor"
# Pairs of keys that say the same thing: only one of each may be given.
_SAME_THING = (
    (f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.clip_grad"),
    ("critic.grad_clip", "critic.optim.clip_grad"),
    ("data.tokenizer", "actor_rollout_ref.model.tokenizer_path"),
    *(
        (f"{_ACTOR}.clip_range", f"{_ACTOR}.{name}")
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    ),
)


def load_config(schema: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """The configuration that a YAML file (and the files it names as `base`) and overrides describe.

    Args:
        schema: the dataclass of the command, such as TrainConfig.
        path: the file, or `recipe:NAME`, one that comes with megarl; None: overrides alone.
        overrides: `a.b.c=value` each, later ones win; the value is YAML. Hydra's `+` and `++` before the key change
            nothing.

    Raises:
        ValueError: a missing file, text that is not YAML, or, all in one message: unknown keys with the nearest
            valid ones (or, for keys of other trainers, what to write instead), values of a wrong type, missing required
            keys, two keys that say the same thing, interpolations that lead nowhere.
    """
    return load_with_origins(schema, path, overrides)[0]


def load_with_origins(
    schema: type[T], path: str | Path | None, overrides: Sequence[str] = ()
) -> tuple[T, dict[str, str]]:
    """`load_config`, and where each value that was given stands: dotted key -> file and line, or override."""
    tree = read_file(Path(path)) if path is not None else {}
    problems: list[str] = []
    for override in overrides:
        try:
            tree = merge(tree, parse_override(override))
        except ValueError as error:
            problems.append(str(error))
    tree = interpolate(tree, lambda: _defaults(schema, tree), problems)
    builder = _Builder(schema, problems)
    config = builder.section(schema, tree, "")
    origins = {key: entry.where for key, entry in entries(tree)}
    problems += _said_twice(tree)
    raise_if_any(f"configuration {path}" if path is not None else "configuration", problems)
    return config, origins


def _said_twice(tree: Tree) -> Iterator[str]:
    """Keys that say the same thing and were both given (null is not given)."""
    given = {key: entry.where for key, entry in entries(tree) if entry.value is not None}
    for one, other in _SAME_THING:
        if one in given and other in given:
            yield f"{given[one]}: {one} and {other} ({given[other]}) say the same thing; give one of them"


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts, lists and scalars."""
    return {member.name: plain_value(getattr(config, member.name)) for member in fields(config)}


def save_config(config: Any, path: str | Path) -> Path:
    """Write a configuration as YAML, every key of it; the file is complete or absent."""
    text = yaml.dump(to_dict(config), Dumper=YamlDumper, sort_keys=False, allow_unicode=True, width=110)
    write_text(path, text)
    return Path(path)


def plain_value(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {name: plain_value(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _defaults(schema: type, tree: Tree) -> dict[str, Any]:
    """The defaults of all keys, of optional sections only where the tree has them."""
    values: dict[str, Any] = {}
    for member in fields(schema):
        inner = section_type(field_types(schema)[member.name])
        given = tree.get(member.name)
        if inner is not None and (member.default is not None or isinstance(given, dict)):
            values[member.name] = _defaults(inner, given if isinstance(given, dict) else {})
        elif member.default is not MISSING:
            values[member.name] = plain_value(member.default)
    return values


class _Builder:
    """Builds the sections of `whole` from a tree; mistakes are added to `problems`."""

    def __init__(self, whole: type, problems: list[str]) -> None:
        self._whole = whole
        self._problems = problems

    def section(self, schema: type, tree: Tree, prefix: str) -> Any:
        """An instance of `schema`, or None if something below it is wrong."""
        kinds = field_types(schema)
        num_problems = len(self._problems)
        for name in tree:
            if name not in kinds:
                self._unknown(schema, tree[name], name, prefix)
        values = {}
        for member in fields(schema):
            key = f"{prefix}{member.name}"
            if member.name in tree:
                values[member.name] = self._value(key, member, kinds[member.name], tree[member.name])
            elif is_required(member):
                self._missing(key, member, kinds[member.name])
        return schema(**values) if len(self._problems) == num_problems else None

    def _value(self, key: str, member: Field, kind: Any, value: Tree | Entry) -> Any:
        inner, table = section_type(kind), table_type(kind)
        if isinstance(value, dict):
            if inner is not None:
                return self.section(inner, value, f"{key}.")
            if table is not None:
                return self._table(table, value, f"{key}.")
            if is_free(kind):
                return plain(value)
            self._misplaced(value, key, kind)
            return None
        if value.value is UNRESOLVED:
            return None  # reported by `interpolate`
        try:
            converted = _convert(kind, value)
        except TypeError:
            hint = " (leave it out for its defaults)" if inner is not None and value.value is None else ""
            self._problems.append(
                f"{value.where}: {key}: expected {type_text(kind)}, found {_show(value)}{hint}"
            )
            return None
        refused = member.metadata.get("refused") or {}
        if converted in refused:
            self._problems.append(f"{value.where}: {key}={value.text}: {refused[converted]}")
            return None
        if not member.metadata.get("is_path"):
            return converted
        try:
            return _expand(converted)
        except ValueError as error:
            self._problems.append(f"{value.where}: {key}: {error}")
            return None

    def _table(self, schema: type, tree: Tree, prefix: str) -> dict[str, Any]:
        table = {}
        for name, value in tree.items():
            if isinstance(value, Entry):
                self._problems.append(
                    f"{value.where}: {prefix}{name}: expected a section of keys, found {_show(value)}"
                )
            else:
                table[name] = self.section(schema, value, f"{prefix}{name}.")
        return table

    def _missing(self, key: str, member: Field, kind: Any) -> None:
        inner = section_type(kind)
        if inner is not None:
            self.section(inner, {}, f"{key}.")
        else:
            self._problems.append(f"{key} is required ({type_text(kind)}): {member.metadata['help']}")

    def _misplaced(self, tree: Tree, key: str, kind: Any) -> None:
        first = next((entry for _, entry in entries(tree)), None)
        place = f"{first.where}: " if first else ""
        self._problems.append(
            f"{place}{key}: expected {type_text(kind)}, found a section of keys ({', '.join(tree)})"
        )

    def _unknown(self, schema: type, value: Tree | Entry, name: str, prefix: str) -> None:
        """Report an unknown key, or each key of an unknown section."""
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            for inner_name, inner in value.items():
                self._unknown(schema, inner, f"{name}.{inner_name}", prefix)
            return
        place = f"{value.where}: " if isinstance(value, Entry) else ""
        near = nearest_keys(key, [known for known, _, _ in walk(self._whole)])
        advice = key_advice(key)
        if advice is not None:
            self._problems.append(f"{place}{key} is no key of megarl: {advice}")
            return
        if near == [key]:  # a dot in the name of a key: `trainer.seed: 1` in a file
            hint = "in a file it is written as a key inside of sections, not with dots"
        elif near:
            hint = f"did you mean {' or '.join(near)}?"
        else:
            hint = f"keys of {prefix.rstrip('.') or 'the configuration'}: {', '.join(field_types(schema))}"
        self._problems.append(f"{place}unknown key {key}; {hint}")


def _convert(kind: Any, entry: Entry) -> Any:
    """The entry's value as the first type of `kind` that it fits. TypeError: none."""
    for member in members(kind):
        try:
            return _convert_to(member, entry)
        except TypeError:
            continue
    raise TypeError


def _convert_to(kind: Any, entry: Entry) -> Any:
    value = entry.value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is types.NoneType and value is None:
        return None
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and number and (isinstance(value, int) or _is_whole(value)):
        return int(value)
    if kind is float and number and math.isfinite(value):
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    if kind is str and number:
        return entry.text  # a name such as 2026 or 1e3: quotes cannot be asked for on a command line
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        if Ellipsis in kinds and not isinstance(value, list):
            return (_convert(kinds[0], entry),)  # trainer.logger=console: a list of one
        if not isinstance(value, list):
            raise TypeError
        kinds = (kinds[0],) * len(value) if Ellipsis in kinds else kinds
        if len(kinds) == len(value):
            return tuple(_convert(item_kind, item) for item_kind, item in zip(kinds, value, strict=True))
    raise TypeError


def _is_whole(value: float) -> bool:
    return value.is_integer() and abs(value) <= _LARGEST_EXACT_FLOAT


def _expand(value: Any) -> Any:
    """Paths with `~` and `recipe:` replaced by what they stand for. ValueError: there is no such recipe."""
    if isinstance(value, tuple):
        return tuple(_expand(item) for item in value)
    if not isinstance(value, str):
        return value
    return str(recipe_path(value)) if value.startswith(PREFIX) else os.path.expanduser(value)


def _show(entry: Entry) -> str:
    return json.dumps(plain(entry), default=str, ensure_ascii=False)


TRAINING = {"train": TrainConfig, "sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig}
"""The commands that train a model, each with the class of its recipes."""
SCHEMAS = {**TRAINING, "eval": EvalConfig}
"""All commands with recipes."""


def recipe_command(recipe: str, overrides: Sequence[str]) -> str:
    """The command (of `TRAINING`) whose recipe this is: the one that knows most of its keys; where several know as many, the one
    that the file's first comment says (`Run: megarl sft ...`).

    Raises:
        ValueError: a missing file or text that is not YAML; nothing says which of several commands it is.
    """
    tree = read_file(Path(recipe))
    for override in overrides:
        tree = merge(tree, parse_override(override))
    unknown = {name: _unknown(tree, schema) for name, schema in TRAINING.items()}
    best = [name for name, number in unknown.items() if number == min(unknown.values())]
    if len(best) == 1:
        return best[0]
    said = run_by(Path(recipe))
    if said in best:
        return said
    raise ValueError(
        f"{recipe} may be a recipe of `megarl {'`, `megarl '.join(best)}`: its keys fit them equally; say which with "
        f"--command, or in the file's first comment (# Run: megarl {best[0]} ...)"
    )


def _unknown(tree: Tree, schema: type, depth: int = 2) -> int:
    """Keys and sections down to `depth` that the schema does not have."""
    kinds, number = field_types(schema), 0
    for name, value in tree.items():
        if name not in kinds:
            number += 1
        elif depth > 1 and isinstance(value, dict) and (inner := section_type(kinds[name])) is not None:
            number += _unknown(value, inner, depth - 1)
    return number
