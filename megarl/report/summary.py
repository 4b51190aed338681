"""A run in a few lines: its status, the tiles with its final numbers, the keys that were set, and differences between runs."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megarl.config.checks.run import flat
from megarl.config.loading import SCHEMAS, plain_value
from megarl.config.loading.recipes import PREFIX
from megarl.config.schema import walk
from megarl.config.show import source_of
from megarl.report.curves import UNITS
from megarl.report.data import RunRecord
from megarl.report.html import duration, figure
from megarl.trainer.run.facts import FINISHED

# The headline of a run is the first of these that it has.
_HEADLINES = {
    "val/score/mean": ("Validation score", "share"),
    "val/accuracy": ("Validation accuracy", "share"),
    "val/loss": ("Validation loss", "number"),
}
_TRAINING = {
    "critic/score/mean": ("Training score", "share"),
    "train/accuracy": ("Training accuracy", "share"),
    "train/loss": ("Training loss", "number"),
}
_FALLING = ("val/loss", "train/loss")  # the lower the better


@dataclass(frozen=True)
class Status:
    """How a run stands. `kind`: "good", "bad", "going" or "unknown", for its colour; `text`: a sentence."""

    word: str
    kind: str
    text: str


@dataclass(frozen=True)
class Tile:
    """A number or a fact of the summary.

    Attributes:
        value: its text; exact: all digits of a number, "" for a fact.
        note: further text. metric: the one in its sparkline; None: it has none.
    """

    label: str
    value: str
    note: str = ""
    exact: str = ""
    metric: str | None = None

    @property
    def is_number(self) -> bool:
        return self.exact != ""


def status_of(run: RunRecord) -> Status:
    """Finished, failed, running, or as much as the folder shows."""
    facts, last = run.facts, run.steps[-1] if run.steps else None
    at = "before the first step ended" if last is None else f"after step {int(last['step'])}"
    if run.is_evaluation:
        return Status("finished", "good", "An evaluation.")
    if facts is not None and facts.outcome == FINISHED:
        return Status("finished", "good", f"Finished {_moment(facts.ended)}.")
    if facts is not None and facts.outcome is not None:
        word = "stopped" if facts.outcome == "told to end" else "failed"
        return Status(
            word,
            "bad" if word == "failed" else "unknown",
            f"Ended {at}, {_moment(facts.ended)}: {facts.outcome}",
        )
    if facts is not None and facts.is_running:
        return Status("running", "going", f"Running: {at}. This page does not change; write it again.")
    if facts is None and (run.folder / "hf").is_dir():
        return Status("finished", "good", "The model has been exported.")
    if run.failures and (last is None or run.failures[-1].get("time", "") >= _moment(last["time"])):
        return Status("failed", "bad", f"Failed {at}: {run.failures[-1]['error']}")
    if facts is not None:
        text = f"Ended {at} without telling why, or still running on {facts.host}."
        return Status("no end known", "unknown", text)
    return Status("unfinished", "unknown", f"The folder ends {at}; the run may be going on.")


def tiles_of(run: RunRecord) -> list[Tile]:
    """The summary of a run, the headline first; of a run without steps its known facts."""
    return [*_numbers(run), *_facts(run)]


def _numbers(run: RunRecord) -> Iterator[Tile]:
    if run.is_evaluation:
        yield from _evaluated(run)
        return
    for metrics in (_HEADLINES, _TRAINING):
        metric = next((name for name in metrics if run.series(name)), None)
        if metric is not None:
            yield _metric_tile(run, metric, *metrics[metric])
    if not run.steps:
        return
    last = int(run.steps[-1]["step"])
    yield Tile("Steps", f"{last:,}", f"of {run.total_steps:,}" if run.total_steps else "", str(last))
    seconds = [value for _, value in run.series("timing_s/step")]
    if seconds:
        note = f"{figure(median(seconds))} s a step (median)"
        yield Tile("Training time", duration(sum(seconds)), note, repr(sum(seconds)), "timing_s/step")
    rates = [value for _, value in run.series("perf/tokens_per_s")]
    if rates:
        tokens = sum(value for _, value in run.series("perf/tokens"))
        note = f"median of a step; {tokens:,.0f} tokens in all"
        yield Tile("Tokens/s", f"{median(rates):,.0f}", note, repr(median(rates)), "perf/tokens_per_s")


def _evaluated(run: RunRecord) -> Iterator[Tile]:
    """The scores of an evaluation: their mean, and by source and set where there are several."""
    mean, numbers = "val/score/mean", run.steps[0]
    others = [name for name in numbers if name.startswith("val/score/") or name.endswith("/score/mean")]
    names = [name for name in dict.fromkeys((mean, *others)) if name in numbers]
    share = all(0 <= numbers[name] <= 1 for name in names)
    for name in names if len(names) > 2 else names[:1]:
        part = name.removeprefix("val/").removeprefix("score/").removesuffix("/score/mean")
        text = UNITS["share" if share else "number"](numbers[name])
        yield Tile("Score" if name == mean else f"Score: {part}", text, "", repr(numbers[name]))
    for name, label in (("val/num_problems", "Problems"), ("val/tokens_per_s", "Tokens/s")):
        if name in run.steps[0]:
            value = run.steps[0][name]
            yield Tile(label, f"{value:,.0f}", "", repr(value))


def _metric_tile(run: RunRecord, metric: str, label: str, unit: str) -> Tile:
    points = [(step, value) for step, value in run.series(metric) if math.isfinite(value)]
    if not points:
        return Tile(label, "not finite", f"in all {len(run.series(metric))} values", "nan")
    values = [value for _, value in points]
    text = UNITS[unit if unit == "number" or all(0 <= value <= 1 for value in values) else "number"]
    best_step, best = (min if metric in _FALLING else max)(points, key=lambda point: point[1])
    last_step, last = run.series(metric)[-1]
    if len(points) > 1:
        note = f"{text(values[0])} → {text(last)}"
        if best != last:
            note += f"; best {text(best)} at step {best_step}"
    else:
        note = f"at step {last_step}"
    return Tile(label, text(last), note, repr(last), metric)


def _facts(run: RunRecord) -> Iterator[Tile]:
    model = run.config.get("actor_rollout_ref", run.config).get("model") or {}
    if model.get("path"):
        path = Path(model["path"])
        name = "/".join(path.parts[-2:]) if path.name == "hf" else path.name
        rank = (model.get("lora") or {}).get("rank")
        yield Tile("Model", name, f"LoRA of rank {rank}" if rank else str(path))
    estimator = (run.config.get("algorithm") or {}).get("adv_estimator")
    recipe = _recipe(run)
    if recipe or estimator:
        yield Tile(
            "Recipe", recipe or str(estimator), f"{estimator} advantages" if recipe and estimator else ""
        )
    trainer = run.config.get("trainer") or {}
    if trainer.get("n_gpus_per_node"):
        nodes, each = trainer.get("nnodes", 1), trainer["n_gpus_per_node"]
        yield Tile("Devices", f"{nodes * each:,}", f"{nodes} x {each}")
    if run.facts is not None:
        versions = dict(run.facts.versions)
        own = versions.pop("megarl", "?")
        yield Tile(
            "Versions", f"megarl {own}", ", ".join(f"{name} {version}" for name, version in versions.items())
        )


def _recipe(run: RunRecord) -> str | None:
    """The recipe that the command names: the name of its file, or `recipe:NAME`."""
    words = shlex.split(run.facts.command) if run.facts is not None else []
    for word in words:
        if word.startswith(PREFIX):
            return word
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            return Path(word).name
    return None


def _moment(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds is not None else ""


# Where a run writes, which differs between any two.
_PLACES = ("trainer.default_local_dir", "trainer.rollout_data_dir")
_NOTHING = object()


def set_keys(run: RunRecord) -> list[tuple[str, str, str]]:
    """(key, value, default) of keys whose values are not their defaults; default "": the key has none. Values that follow from
    other keys (`resolve`) are left out."""
    keys = flat(run.config)
    defaults = max(
        (_defaults(schema) for schema in SCHEMAS.values()), key=lambda found: len(found.keys() & keys)
    )
    found = []
    for key, value in keys.items():
        default = defaults.get(key, _NOTHING)
        if value == default or ((default is None or default is _NOTHING) and source_of(key) is not None):
            continue
        found.append((key, _text(value), "" if default is _NOTHING else _text(default)))
    return found


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) of keys whose values differ; "-": the run has no such key."""
    keys = [flat(run.config) for run in runs]
    names = dict.fromkeys(name for each in keys for name in each)
    found = []
    for name in names:
        texts = [_text(each[name]) if name in each else "-" for each in keys]
        if len(set(texts)) > 1 and name not in _PLACES:
            found.append((name, texts))
    return found


def _defaults(schema: type) -> dict[str, Any]:
    """By dotted key the default of each key; _NOTHING for a key that has no default."""
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
