"""What is set in a run, and what differs between runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Any

from megarl.config import DPOConfig, EvalConfig, RMConfig, SFTConfig, TrainConfig
from megarl.config.loading.load import plain_value
from megarl.config.schema.options import walk
from megarl.config.show import source_of
from megarl.report.data import RunRecord

_SCHEMAS = (TrainConfig, SFTConfig, RMConfig, DPOConfig, EvalConfig)
# Where a run writes, which differs between any two.
_PLACES = ("trainer.default_local_dir", "trainer.rollout_data_dir")
_NOTHING = object()


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each key of a configuration."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def set_keys(run: RunRecord) -> list[tuple[str, str, str]]:
    """(key, value, default) of keys whose values are not their defaults; default "": the key has none. What follows from
    other keys (`resolve`) is left out."""
    keys = dict(flat(run.config))
    defaults = max((_defaults(schema) for schema in _SCHEMAS), key=lambda found: len(found.keys() & keys))
    found = []
    for key, value in keys.items():
        default = defaults.get(key, _NOTHING)
        if value == default or ((default is None or default is _NOTHING) and source_of(key) is not None):
            continue
        found.append((key, _text(value), "" if default is _NOTHING else _text(default)))
    return found


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) of keys whose values differ; "-": the run has no such key."""
    keys = [dict(flat(run.config)) for run in runs]
    names = dict.fromkeys(name for each in keys for name in each)
    found = []
    for name in names:
        texts = [_text(each[name]) if name in each else "-" for each in keys]
        if len(set(texts)) > 1 and name not in _PLACES:
            found.append((name, texts))
    return found


def _defaults(schema: type) -> dict[str, Any]:
    """By dotted key the default of each key that has one; the key of one that has none is there with _NOTHING."""
    found: dict[str, Any] = {}
    for key, member, _ in walk(schema):
        if member.default is not MISSING:
            found[key] = plain_value(member.default)
        elif member.default_factory is MISSING:
            found[key] = _NOTHING
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)
