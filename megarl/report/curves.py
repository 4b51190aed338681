"""The curves of runs: which metrics share a chart, their names, and how many of their points a page has.

Guarantees: each point of a page is one of `metrics.jsonl` (to six significant digits), the first and the last step's and the
extremes among them; a number that is not finite is a gap in its curve; a metric that never changes is no chart but a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megarl.report.data import RunRecord
from megarl.report.html import figure, percent, size

POINTS = 1000  # of a curve of a chart, for each run
OTHER_POINTS = 200  # of a metric that is in no chart, which can be picked
UNITS = {"number": figure, "share": percent, "bytes": size}  # functions that make text of a value


@dataclass(frozen=True)
class Curves:
    """Metrics that share a chart.

    Attributes:
        title, about: in the field's words; about: the meaning of the numbers, and their unit.
        metrics: name -> label in this chart; a name that ends in "/" stands for all metrics whose names begin with it.
        unit: of UNITS; "share": in percent where all values are from 0 to 1.
    """

    title: str
    about: str
    metrics: Mapping[str, str]
    unit: str = "number"


LEARNING: tuple[Curves, ...] = (
    Curves("Validation score", "mean score of the validation problems", {"val/score/mean": "mean"}, "share"),
    Curves("Training score", "mean score of a step's responses", {"critic/score/mean": "mean"}, "share"),
    Curves("Validation score by source", "mean score by data source", {"val/score/": ""}, "share"),
    Curves("Loss", "nats a token, or of a comparison", {"train/loss": "training", "val/loss": "validation"}),
    Curves(
        "Accuracy",
        "of preferences: how often the chosen answer is ahead",
        {"train/accuracy": "training", "val/accuracy": "validation"},
        "share",
    ),
    Curves(
        "Margin",
        "of the chosen answer over the rejected one",
        {"train/margin": "training", "val/margin": "validation"},
    ),
    Curves("Reward", "mean of a response: its score less the KL penalty", {"critic/rewards/mean": "mean"}),
    Curves("KL to the reference policy", "nats a token", {"actor/ref_kl": "KL"}),
    Curves("KL of the update", "old policy to new one, nats a token", {"actor/ppo_kl": "KL"}),
    Curves("Entropy", "of the policy, nats a token", {"actor/entropy": "entropy"}),
    Curves(
        "Clip fraction",
        "share of tokens whose ratio, or value, was clipped",
        {"actor/pg_clipfrac": "policy", "critic/vf_clipfrac": "value"},
        "share",
    ),
    Curves(
        "Explained variance",
        "of the returns, by the critic's values; 1 is perfect",
        {"critic/vf_explained_var": "explained variance"},
    ),
    Curves("Policy loss", "", {"actor/pg_loss": "policy loss"}),
    Curves("Value loss", "", {"critic/vf_loss": "value loss"}),
    Curves(
        "Gradient norm",
        "before it is clipped",
        {"actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": "model"},
    ),
    Curves("Learning rate", "", {"actor/lr": "actor", "critic/lr": "critic", "train/lr": "model"}),
    Curves("KL coefficient", "", {"actor/kl_coef": "KL coefficient"}),
    Curves(
        "Response length",
        "tokens",
        {"response_length/mean": "mean", "response_length/max": "longest", "response_length/min": "shortest"},
    ),
    Curves(
        "Truncated responses",
        "share of responses that reached data.max_response_length",
        {"response_length/clip_ratio": "truncated"},
        "share",
    ),
    Curves(
        "Training-inference mismatch",
        "difference of the trainer's and the engine's log-probs, nats",
        {"training/rollout_log_prob_diff_mean": "mean", "training/rollout_log_prob_diff_max": "largest"},
    ),
    Curves(
        "Staleness",
        "weight versions between generation and update",
        {"staleness/mean": "mean", "staleness/max": "largest"},
    ),
    Curves("Failed rewards", "", {"reward/failed": "failed"}),
)
THROUGHPUT = Curves("Throughput of a step", "tokens/s", {"perf/tokens_per_s": "tokens/s"})
PHASE_THROUGHPUT = Curves(
    "Throughput by phase",
    "tokens/s",
    {
        "perf/generate_tokens_per_s": "generate",
        "perf/evaluate_models_tokens_per_s": "evaluate_models",
        "perf/update_tokens_per_s": "update",
    },
)
AHEAD = Curves(
    "Collection of the next step's batch",
    "seconds, which are not in the bars of the steps",
    {"timing_s/ahead": "in all", "timing_s/ahead_overlap": "while this step's batch was learnt"},
)
SYNC: tuple[Curves, ...] = (
    Curves("Duration of a weight sync", "seconds", {"timing_s/sync": "in all"}),
    Curves(
        "Parts of a weight sync",
        "seconds",
        {
            "sync/seconds_pack": "pack",
            "sync/seconds_wait_for_engine": "wait for engine",
            "sync/seconds_wait_for_trainer": "wait for trainer",
            "sync/seconds_write": "write",
            "sync/seconds_verify": "verify",
        },
    ),
    Curves(
        "Bytes of a weight sync",
        "by link",
        {
            "sync/bytes_total": "all",
            "sync/bytes_local": "same device",
            "sync/bytes_intra_node": "same node",
            "sync/bytes_inter_node": "between nodes",
        },
        "bytes",
    ),
)


@dataclass(frozen=True)
class Constant:
    """A metric that was the same in each step of each run: its name, its value as text."""

    title: str
    label: str
    text: str


def charts_of(
    catalogue: Sequence[Curves], runs: Sequence[RunRecord]
) -> tuple[list[dict[str, Any]], list[Constant]]:
    """The charts of these metrics that change, as data for report.js, and the metrics that do not."""
    charts, constants = [], []
    for curves in catalogue:
        metrics = dict(_present(curves, runs))
        values = {name: [value for run in runs for _, value in run.series(name)] for name in metrics}
        changing = {name for name, found in values.items() if len(set(map(str, found))) > 1}
        kind = unit_of(curves, (value for found in values.values() for value in found))
        if changing:
            # A metric that is zero throughout is not drawn along the axis.
            kept = [name for name in metrics if name in changing or any(values[name])]
            series = [{"metric": name, "label": metrics[name]} for name in kept]
            chart = {"kind": "lines", "title": curves.title, "about": curves.about, "unit": kind}
            charts.append({**chart, "series": series})
        else:
            constants += [
                Constant(curves.title, label if len(metrics) > 1 else "", UNITS[kind](values[name][0]))
                for name, label in metrics.items()
            ]
    return charts, constants


def unit_of(curves: Curves, values: Iterable[float]) -> str:
    """The unit in which these values of a chart's metrics are written: scores need not be shares."""
    shares = all(0 <= value <= 1 for value in values if math.isfinite(value))
    return "number" if curves.unit == "share" and not shares else curves.unit


def _present(curves: Curves, runs: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
    """(metric, its label) of the metrics of a chart that the runs have; for a prefix the metrics below it, if there are several."""
    there = {metric for run in runs for metric in run.columns}
    for name, label in curves.metrics.items():
        if name in there:
            yield name, label
        below = {metric for metric in there if name.endswith("/") and metric.startswith(name)} - {
            f"{name}mean"
        }
        if len(below) > 1:
            yield from ((metric, metric.removeprefix(name)) for metric in sorted(below))


def series_of(runs: Sequence[RunRecord], charts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """By metric, for each run its points as [steps, values], or, where points are left out, as [steps, values, means] with the
    mean value of the neighbouring steps that each point stands for; None for a value that is not finite, and for a run without the metric."""
    drawn = {entry["metric"] for chart in charts for entry in chart.get("series", ()) if "metric" in entry}
    names = sorted({name for run in runs for name in run.columns} - {"step", "time"})
    return {name: [_columns(run.series(name), POINTS if name in drawn else OTHER_POINTS) for run in runs] for name in names}  # fmt: skip


def _columns(points: Sequence[tuple[int, float]], most: int) -> list[list[Any]] | None:
    if not points:
        return None
    kept = thinned(points, most)
    steps, values, means = ([point[place] for point in kept] for place in range(3))
    columns = [values] if len(points) <= most else [values, means]
    return [steps, *([_number(value) for value in column] for column in columns)]


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float, float]]:
    """At most `most` of the points, each as (step, value, mean of the points that it stands for): the first, the last, and of
    each even part between them the least and the greatest; a value that is not finite counts as greater than all."""
    if len(points) <= most:
        return [(step, value, value) for step, value in points]
    values = np.array([value for _, value in points])
    finite = np.isfinite(values)
    ordered = np.where(finite, values, np.inf)
    edges = np.linspace(1, len(points) - 1, (most - 2) // 2 + 1).astype(int)
    kept = [(*points[0], points[0][1])]
    for begin, end in pairwise(edges.tolist()):
        part = values[begin:end][finite[begin:end]]
        mean = float(part.mean()) if len(part) else math.nan
        ends = {begin + int(ordered[begin:end].argmin()), begin + int(ordered[begin:end].argmax())}
        kept += [(*points[place], mean) for place in sorted(ends)]
    return [*kept, (*points[-1], points[-1][1])]


def not_finite(run: RunRecord) -> dict[str, list[int]]:
    """By metric the steps in which it was NaN or infinite."""
    found = {
        name: [step for step, value in points if not math.isfinite(value)]
        for name, points in run.columns.items()
    }
    return {name: steps for name, steps in found.items() if steps}
