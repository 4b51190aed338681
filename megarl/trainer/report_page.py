"""The report of a run as one HTML page."""

from __future__ import annotations

import time
from collections.abc import Iterator

from megarl.spans import Span
from megarl.trainer.charts import Bar, histogram, legend, lines, rows, stacked
from megarl.trainer.html import bullets, document, folded, table, tag
from megarl.trainer.memory import MIB
from megarl.trainer.report_data import RunRecord
from megarl.trainer.report_timeline import Recorded, Track, nested
from megarl.trainer.timeline import CONTROLLER, STEP

# Charts, each with the metrics that it shows where a run has them, and what they are called there.
CURVES: tuple[tuple[str, dict[str, str]], ...] = (
    ("score", {"critic/score/mean": "training", "val/score/mean": "validation"}),
    ("loss", {"train/loss": "training", "val/loss": "validation"}),
    ("accuracy", {"train/accuracy": "training", "val/accuracy": "validation"}),
    ("margin", {"train/margin": "training", "val/margin": "validation"}),
    ("policy loss", {"actor/pg_loss": "pg_loss"}),
    ("value loss", {"critic/vf_loss": "vf_loss"}),
    ("values: variance that they explain", {"critic/vf_explained_var": "vf_explained_var"}),
    ("KL to the reference", {"actor/ref_kl": "ref_kl"}),
    ("KL of the update", {"actor/ppo_kl": "ppo_kl"}),
    ("entropy", {"actor/entropy": "entropy"}),
    ("clipped part", {"actor/pg_clipfrac": "policy", "critic/vf_clipfrac": "values"}),
    ("gradient norm", {"actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": "model"}),
    ("learning rate", {"actor/lr": "actor", "critic/lr": "critic", "train/lr": "model"}),
    (
        "log-probs: engine - trainer, mean and largest",
        {"training/rollout_log_prob_diff_mean": "mean", "training/rollout_log_prob_diff_max": "max"},
    ),
    ("weight versions behind", {"staleness/mean": "mean", "staleness/max": "max"}),
    (
        "response tokens",
        {"response_length/max": "max", "response_length/mean": "mean", "response_length/min": "min"},
    ),
    ("part of responses that was cut", {"response_length/clip_ratio": "cut"}),
    ("tokens/s of a step", {"perf/tokens_per_s": "tokens/s"}),
    (
        "tokens/s by phase",
        {
            "perf/generate_tokens_per_s": "generate",
            "perf/evaluate_models_tokens_per_s": "evaluate",
            "perf/update_tokens_per_s": "update",
        },
    ),
)
# Phases that are in no other one; what a step's seconds have beside them is moving memory, and the controller.
PHASES = (
    "sync", "generate", "score_model", "reward", "evaluate_models", "advantages", "update", "validate", "ahead_wait",
    "meanwhile_end",
)  # fmt: skip
_LAST_STEPS = 20  # of tables that have a row for each step
_MOST_TRACKS = 48  # that are shown of a timeline; of each role the first ones
_LINKS = ("local", "intra_node", "inter_node")


def page(run: RunRecord) -> str:
    """The whole page."""
    parts = [tag("h1", str(run.folder)), tag("p", _summary(run))]
    for title, found in (
        ("Restarts, failures, findings", _troubles(run)),
        ("Curves", _curves(run)),
        ("Seconds of a step, by phase", _phases(run)),
        ("Who worked when", _timeline(run)),
        ("Lengths", _lengths(run)),
        ("Trajectories", _samples(run)),
        ("Weight sync", _sync(run)),
        ("Memory", _memory(run)),
        ("All metrics", _metrics(run)),
        ("Configuration", _configuration(run)),
    ):
        found = [part for part in found if part]
        parts += [tag("h2", title), *found] if found else []
    return document(f"megarl: {run.folder.name}", parts)


def _summary(run: RunRecord) -> str:
    first, last = run.steps[0], run.steps[-1]
    ended = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last["time"]))
    seconds = [value for _, value in run.series("timing_s/step")]
    tokens = sum(value for _, value in run.series("perf/tokens"))
    found = f"Steps {first['step']} to {last['step']}; the last one ended at {ended}."
    if seconds:
        found += f" A step took {sum(seconds) / len(seconds):,.2f} s in the mean"
        found += f", {tokens:,.0f} tokens in all." if tokens else "."
    exported = run.folder / "hf"
    where = f"The model is in {exported}." if exported.is_dir() else "No model has been exported yet."
    return f"{found} {where}"


def _troubles(run: RunRecord) -> Iterator[str]:
    if run.failures:
        keys = ("time", "step", "phase", "role", "rank", "error", "file")
        yield tag("p", f"{len(run.failures)} failures; failures/ has the stacks and logs of each.")
        yield table(keys, [[failure.get(key, "-")[:160] for key in keys] for failure in run.failures])
    if run.timeline is not None:
        lost = [
            span
            for track in run.timeline.tracks
            if track.role == CONTROLLER
            for span in track.spans
            if "is lost: starting it anew" in span.name
        ]
        yield bullets([f"{span.name}: {(span.end - span.begin) / 1e9:.1f} s" for span in lost])
        if run.timeline.again:
            yield tag("p", f"Made again after a failure: steps {_numbers(run.timeline.again)}.")
    if run.reward_errors:
        yield tag("p", f"{run.reward_errors} rewards failed: see reward_errors.jsonl.")
    yield bullets(
        [f"step {found['step']}: {found['message']}. {found.get('advice', '')}" for found in run.findings]
    )


def _curves(run: RunRecord) -> Iterator[str]:
    charts = [
        lines(title, {label: run.series(metric) for metric, label in metrics.items()})
        for title, metrics in CURVES
    ]
    yield f'<div class="charts">{"".join(charts)}</div>'


def _phases(run: RunRecord) -> Iterator[str]:
    columns = []
    for step in run.steps:
        if "timing_s/step" not in step:
            continue
        parts = {name: step[f"timing_s/{name}"] for name in PHASES if f"timing_s/{name}" in step}
        parts["other"] = max(0.0, step["timing_s/step"] - sum(parts.values()))
        columns.append((float(step["step"]), parts))
    yield stacked("seconds of each step", columns, "s")
    if any("timing_s/ahead" in step for step in run.steps):
        yield tag("p", "What was collected meanwhile, for the next step, is not in these bars:", "quiet")
        yield lines(
            "seconds ahead", {"all": run.series("timing_s/ahead"), "beside": run.series("timing_s/ahead_overlap")}
        )  # fmt: skip


def _timeline(run: RunRecord) -> Iterator[str]:
    found = run.timeline
    if found is None or not found.windows:
        yield tag("p", "There is no timeline of the steps (trainer.timeline_mb).", "quiet")
        return
    working = [track for track in found.tracks if track.role != CONTROLLER and track.spans]
    first, last = min(found.windows), max(found.windows)
    shares = {track.place: track.shares(found.windows) for track in working}
    by_role: dict[str, list[float]] = {}
    for track in working:
        by_role.setdefault(track.role, []).append(sum(shares[track.place].values()))
    yield tag(
        "p",
        f"Of the time of steps {first} to {last}, each process was in a call for the part that is shown; a rank that "
        "waits for others in a collective is in one. The whole timeline is in timeline.json: open it with ui.perfetto.dev.",
    )
    yield table(
        ["role", "ranks", "mean", "least", "most"],
        [
            [role, str(len(parts)), *(f"{value:.1%}" for value in (sum(parts) / len(parts), min(parts), max(parts)))]
            for role, parts in by_role.items()
        ],
    )  # fmt: skip
    shown, names = _shown(working), list(dict.fromkeys(name for by in shares.values() for name in by))
    yield rows(
        "part of the time by call",
        [(_label(track), _bars_of_shares(shares[track.place])) for track in shown],
        1.0,
        names,
    )
    yield legend(names)
    if len(shown) < len(working):
        yield tag("p", f"{len(shown)} of {len(working)} ranks are shown.", "quiet")
    yield from _last_step(found)


def _shown(tracks: list[Track]) -> list[Track]:
    """As many as fit, evenly from each role."""
    roles: dict[str, list[Track]] = {}
    for track in tracks:
        roles.setdefault(track.role, []).append(track)
    each = max(1, _MOST_TRACKS // max(len(roles), 1))
    return [
        track for role in roles.values() for track in role[: each if len(tracks) > _MOST_TRACKS else None]
    ]


def _label(track: Track) -> str:
    return f"{track.role} {track.name.removeprefix('rank ')}"


def _bars_of_shares(shares: dict[str, float]) -> list[Bar]:
    bars, reached = [], 0.0
    for name, share in shares.items():
        bars.append(Bar(name, reached, reached + share, f"{name}: {share:.1%}"))
        reached += share
    return bars


def _last_step(found: Recorded) -> Iterator[str]:
    """The newest step whose ranks have told of it: a run that is still going has not those of its last one."""
    told = [span.end for track in found.tracks if track.role != CONTROLLER for span in track.spans]
    newest = max(told, default=0)
    step = max((step for step, (begin, _) in found.windows.items() if begin < newest), default=None)
    if step is None:
        return
    begin, end = found.windows[step]
    tracks = [(track, _within(track.spans, begin, end)) for track in _shown(found.tracks)]
    tracks = [(track, spans) for track, spans in tracks if spans]
    names = list(dict.fromkeys(span.name for _, spans in tracks for span in spans))
    drawn = [
        (_label(track), [_bar(span, depth, begin) for span, depth in nested(spans)])
        for track, spans in tracks
    ]
    yield tag("h3", f"Step {step}: {(end - begin) / 1e9:.2f} s from left to right")
    yield rows(f"step {step}", drawn, (end - begin) / 1e9, names)
    yield legend(names)


def _within(spans: list[Span], begin: int, end: int) -> list[Span]:
    return [span for span in spans if span.end > begin and span.begin < end and span.name != STEP]


def _bar(span: Span, depth: int, begin: int) -> Bar:
    facts = ", ".join(f"{name} {value}" for name, value in span.facts.items())
    words = f"{span.name}: {(span.end - span.begin) / 1e9:.3f} s ({facts})"
    return Bar(span.name, (span.begin - begin) / 1e9, (span.end - begin) / 1e9, words, depth)


def _lengths(run: RunRecord) -> Iterator[str]:
    charts = [
        histogram(f"step {step}: tokens of each {name}", values)
        for step, columns in run.lengths.items()
        for name, values in columns.items()
    ]
    if charts:
        yield f'<div class="charts">{"".join(charts)}</div>'


def _samples(run: RunRecord) -> Iterator[str]:
    for sample in run.samples:
        parts = [
            tag("p", f"step {sample.step}, score {sample.score:g}, ground truth: {sample.ground_truth}"),
            tag("pre", sample.prompt, "quiet"),
            tag("pre", sample.response),
        ]
        yield "\n".join(parts)


def _sync(run: RunRecord) -> Iterator[str]:
    header = ["step", *(f"{link} MiB" for link in _LINKS), "MiB", "largest rank", "unchanged", "seconds"]
    waits = ("pack", "wait_for_engine", "wait_for_trainer", "write", "verify")
    synced = [step for step in run.steps if "sync/bytes_total" in step]
    found = []
    for step in synced[-_LAST_STEPS:]:
        sizes = [f"bytes_{link}" for link in (*_LINKS, "total", "max_per_rank", "unchanged")]
        cells = [f"{step.get(f'sync/{name}', 0.0) / MIB:,.2f}" for name in sizes]
        seconds = [step.get("timing_s/sync"), *(step.get(f"sync/seconds_{name}") for name in waits)]
        cells += ["-" if value is None else f"{value:.3f}" for value in seconds]
        found.append([str(step["step"]), *cells])
    if found:
        yield table([*header, *(name.replace("_", " ") for name in waits)], found)
        if len(found) < len(synced):
            yield tag("p", f"The last {len(found)} of {len(synced)} steps.", "quiet")


def _memory(run: RunRecord) -> Iterator[str]:
    step = next(
        (step for step in reversed(run.steps) if any(name.startswith("memory/") for name in step)), None
    )
    if step is None:
        return
    account: dict[str, dict[str, float]] = {}
    for name, value in step.items():
        if name.startswith("memory/"):
            _, phase, owner = name.split("/", 2)
            account.setdefault(phase, {})[owner] = value
    owners = sorted({owner for held in account.values() for owner in held} - {"total"})
    yield tag("p", f"MiB on the fullest device in step {step['step']}, by owner and phase.")
    yield table(
        ["MiB", *account],
        [
            [owner, *(f"{held[owner] / MIB:,.1f}" if owner in held else "-" for held in account.values())]
            for owner in [*owners, "total"]
        ],
    )


def _metrics(run: RunRecord) -> Iterator[str]:
    names = sorted({name for step in run.steps for name in step} - {"step", "time"})
    found = []
    for name in names:
        values = [value for _, value in run.series(name)]
        found.append([name, *(f"{value:.6g}" for value in (values[0], min(values), max(values), values[-1]))])
    yield folded(f"{len(names)} metrics", table(["metric", "first", "least", "most", "last"], found))


def _configuration(run: RunRecord) -> Iterator[str]:
    if run.config_text:
        yield folded("config.yaml", tag("pre", run.config_text))


def _numbers(steps: list[int]) -> str:
    """Such as "3, 7, 9", of many the first ones."""
    return ", ".join(map(str, steps[:20])) + (", ..." if len(steps) > 20 else "")
