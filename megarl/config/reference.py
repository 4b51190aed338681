"""docs/config.md: every key of every command, from what is declared beside it."""

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from megarl.config.aliases import FLAGS
from megarl.config.loading.load import plain_value
from megarl.config.schema.commands import EvalConfig, TrainConfig
from megarl.config.schema.options import field_types, is_required, section_type, table_type, type_text
from megarl.config.schema.supervised import DPOConfig, RMConfig, SFTConfig

_INTRODUCTION = """\
# Configuration

Made by `megarl config --reference > docs/config.md` from the schema itself; not edited by hand.

A run is described by a YAML file (a recipe) and by overrides on the command line, `megarl train RECIPE key=value ...`; later
ones win, and a recipe may name another as its `base`. Values are YAML 1.2: `null`, `1e-6`, `[0.2, 0.3]`; a single value
stands for a list of one. Hydra's `+key=value` and `++key=value` mean `key=value`. `${trainer.seed}` stands for another key's value. A leading `~` in a path is expanded.

Every key is read or refused: unknown keys with the nearest valid one, keys of verl and flags of slime with what to write
instead, values out of range and values that do not fit each other, the files, the devices or the model: all in one message,
before anything is started. `megarl config RECIPE key=value ...` prints the resolved configuration, with the file and line,
the override, the default or the key that each value comes from, and names keys that have no effect; with `--changed` it prints
only what was given and is not the default.

Batch sizes count over all devices; `_per_gpu` is for one device, which is a GPU or, on a machine without any, a process.
`required` keys have no default. Where a model is asked for, a folder in Hugging Face format or an id on the Hugging Face Hub
(`Qwen/Qwen2.5-0.5B-Instruct`) is given; the latter is downloaded into the Hub's cache, which on several hosts must lie on a
file system that they share (`HF_HOME`).
"""


def reference() -> str:
    """The page, as Markdown."""
    parts = [_INTRODUCTION]
    for command, schema in (
        ("train", TrainConfig),
        ("sft", SFTConfig),
        ("rm", RMConfig),
        ("dpo", DPOConfig),
        ("eval", EvalConfig),
    ):
        parts.append(f"## megarl {command}\n\n{schema.__doc__}\n")
        parts += _sections(schema, "", {})
    parts.append(_flags())
    return "\n".join(parts)


def _sections(schema: type, prefix: str, seen: dict[type, str]) -> Iterator[str]:
    """The tables of a section and of those inside of it.

    `seen`: where each section's table stands that several sections share.
    """
    kinds = field_types(schema)
    rows, inner = [], []
    for member in fields(schema):
        kind = kinds[member.name]
        section = section_type(kind) or table_type(kind)
        if section is None or not is_dataclass(section):
            rows.append(_row(f"{prefix}{member.name}", member, kind))
            continue
        if table_type(kind) is not None:
            rows.append(_row(f"{prefix}{member.name}", member, kind))
        inner.append((member, section, "<name>." if table_type(kind) is not None else ""))
    if rows:
        head = "| key | type | default | meaning |\n|---|---|---|---|\n"
        yield head + "\n".join(rows) + "\n"
    for member, section, name in inner:
        key = f"{prefix}{member.name}.{name}"
        optional = " May be null." if member.default is None and not name else ""
        yield f"### `{key.rstrip('.')}`\n\n{_cell(member.metadata['help'])}{optional}\n"
        if section in seen:
            yield f"The keys of `{seen[section]}`.\n"
        else:
            seen[section] = key.rstrip(".")
            yield from _sections(section, key, seen)


def _row(key: str, member: Field, kind: Any) -> str:
    rules = member.metadata
    valid = []
    if rules.get("choices"):
        valid.append(", ".join(f"`{choice}`" for choice in rules["choices"]))
    bounds = [f"{sign} {rules[name]:g}" for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
              if rules.get(name) is not None]  # fmt: skip
    if bounds:
        valid.append(" and ".join(bounds))
    meaning = rules["help"] + "".join(f" Valid: {text}." for text in valid)
    if rules.get("formula"):
        meaning += f" `{rules['formula']}`"
    return f"| `{key}` | {type_text(kind)} | {_default(member)} | {_cell(meaning)} |"


def _default(member: Field) -> str:
    if is_required(member):
        return "required"
    value = plain_value(member.default)
    if isinstance(value, bool) or value is None:
        return f"`{'null' if value is None else str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{', '.join(str(item) for item in value)}]`"
    return f"`{value}`" if value != "" else '`""`'


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _flags() -> str:
    rows = "\n".join(f"| `--{flag}` | {_cell(advice)} |" for flag, advice in FLAGS.items())
    return (
        "## For users of slime\n\nmegarl has keys, not flags. What a flag of slime's is called here:\n\n"
        f"| flag | megarl |\n|---|---|\n{rows}\n"
    )
