"""Time and memory by phase: seconds of each step, activity of each rank in a step and its busy share, and memory by owner.

A phase has the same colour in every chart (COLOURS).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.report.data import RunRecord
from megarl.report.html import MIB
from megarl.report.timeline import RecordedTimeline, Track, nested
from megarl.trainer.run.timeline import CONTROLLER, STEP
from megarl.util.spans import Span, busy

# Phases of a step that are in no other phase, and their labels; the rest of a step's seconds is OTHER.
PHASES = {
    "generate": "generation",
    "reward": "rewards",
    "score_model": "reward model",
    "evaluate_models": "log-probs and values",
    "advantages": "advantages",
    "update": "update",
    "sync": "weight sync",
    "validate": "validation",
    "ahead_wait": "wait for rollouts",
    "meanwhile_end": "wait for rollouts in flight",
}
OTHER = "other"
COLOURS = {  # of templates/style.css
    "generate": "c0", "update": "c1", "sync": "c2", "validate": "c3", "reward": "c4", "ahead_wait": "c5", "evaluate_models": "c6",
    "advantages": "c7", "score_model": "c8", "meanwhile_end": "c9", OTHER: "other",
}  # fmt: skip
# The phase of a rank's call, by how the call's name begins. During a validation all of them are validation.
_CALLS = (
    ("land", "generate"), ("score_texts", "score_model"), ("score", "reward"), ("compute_", "evaluate_models"),
    ("token_log_probs", "evaluate_models"), ("judge", "evaluate_models"), ("update_", "update"), ("train_", "update"), ("begin_update", "sync"), ("receive_", "sync"),
    ("finish_update", "sync"), ("send_", "sync"), ("sum_losses", "validate"),
)  # fmt: skip
_COLUMNS = 150  # bars of a chart; of longer runs each bar is a mean of neighbouring steps
_TRACKS = 40  # rows of a chart; of each role the first ones
_BARS = 2000  # of the chart of a step; the longest ones


@dataclass(frozen=True)
class Floors:
    """The least seconds of a step's phases on the hardware of a run.

    Attributes:
        seconds: by phase; empty: not known.
        words: the hardware of these seconds, or why they are not known.
    """

    seconds: Mapping[str, float]
    words: str


def phases_of_steps(run: RunRecord) -> dict[str, Any] | None:
    """Stacked bars: seconds of each step by phase; None: the run has not timed any."""
    timed = [step for step in run.steps if "timing_s/step" in step]
    if not timed:
        return None
    each = -(-len(timed) // _COLUMNS)
    groups = [timed[first : first + each] for first in range(0, len(timed), each)]
    parts = {phase: [_mean(group, f"timing_s/{phase}") for group in groups] for phase in PHASES}
    parts = {phase: values for phase, values in parts.items() if any(values)}
    whole = [_mean(group, "timing_s/step") for group in groups]
    parts[OTHER] = [max(0.0, total - sum(by)) for total, by in zip(whole, zip(*parts.values(), strict=True), strict=True)] if parts else whole  # fmt: skip
    return {
        "kind": "stack",
        "title": "Seconds of each step",
        "about": "by phase" if each == 1 else f"by phase; a bar is the mean of {each} steps",
        "x": [int(group[0]["step"]) for group in groups],
        "parts": [_part(phase, values) for phase, values in parts.items()],
    }


def shares_of_phases(run: RunRecord, floors: Mapping[str, float]) -> list[dict[str, Any]]:
    """The share of each phase in all steps' seconds, largest first; with its seconds, and as multiples of its floor ("over"; None: it has none).

    Args:
        floors: the least seconds of a step by phase.
    """
    timed = {phase: len(run.series(f"timing_s/{phase}")) for phase in floors}
    least = {phase: floors[phase] * count for phase, count in timed.items()}
    whole = sum(value for _, value in run.series("timing_s/step"))
    if not whole:
        return []
    seconds = {phase: sum(value for _, value in run.series(f"timing_s/{phase}")) for phase in PHASES}
    seconds[OTHER] = max(0.0, whole - sum(seconds.values()))
    found = sorted(seconds.items(), key=lambda entry: -entry[1])
    return [
        {"label": PHASES.get(phase, phase), "colour": COLOURS[phase], "seconds": took, "share": took / whole}
        | {"over": took / least[phase] if least.get(phase) else None}
        for phase, took in found
        if took / whole >= 0.0005
    ]


def busy_ranks(found: RecordedTimeline) -> dict[str, Any] | None:
    """Bars by rank: the share of all steps' time that each was in calls of each phase."""
    working = [track for track in found.tracks if track.role != CONTROLLER and track.spans]
    if not working or not found.windows:
        return None
    validations = _validations(found)
    windows = found.windows.values()
    total = sum(end - begin for begin, end in windows) or 1
    tracks, shares = shown(working), []
    for track in tracks:
        by_phase: dict[str, list[Span]] = {}
        for span, depth in nested(track.spans):
            if depth == 0:  # a call within another one counts as the outer one
                by_phase.setdefault(phase_of(span, validations), []).append(span)
        shares.append(
            {
                phase: sum(busy(spans, *window) for window in windows) / total
                for phase, spans in by_phase.items()
            }
        )
    phases = [phase for phase in (*PHASES, OTHER) if any(by.get(phase) for by in shares)]
    return {
        "kind": "rows",
        "title": "How busy each rank was",
        "about": f"share of the time of steps {min(found.windows)} to {max(found.windows)} that it was in a call; one that waits for "
        "others in a collective is in one",
        "unit": "share",
        "rows": [label_of(track) for track in tracks],
        "parts": [_part(phase, [by.get(phase, 0.0) for by in shares]) for phase in phases],
    }


def last_step(found: RecordedTimeline) -> dict[str, Any] | None:
    """The activity of all ranks in the newest step that all have reported, which need not be the last one of a run that is still going."""
    told = [span.end for track in found.tracks if track.role != CONTROLLER for span in track.spans]
    newest = max(told, default=0)
    step = max((step for step, (begin, _) in found.windows.items() if begin < newest), default=None)
    if step is None:
        return None
    begin, end = found.windows[step]
    validations = _validations(found)
    tracks = [
        (track, [span for span in track.spans if span.end > begin and span.begin < end and span.name != STEP])
        for track in shown(found.tracks)
    ]
    tracks = [(track, spans) for track, spans in tracks if spans]
    bars = [
        {
            "row": row,
            "phase": span.name if span.name in PHASES else phase_of(span, validations),
            "begin": round((max(span.begin, begin) - begin) / 1e9, 6),
            "seconds": round((min(span.end, end) - max(span.begin, begin)) / 1e9, 6),
            "depth": depth,
            "text": _text(span),
        }
        for row, (_, spans) in enumerate(tracks)
        for span, depth in nested(spans)
    ]
    longest = sorted(bars, key=lambda bar: -bar["seconds"])[:_BARS]
    by_phase = {phase: [bar for bar in longest if bar["phase"] == phase] for phase in (*PHASES, OTHER)}
    return {
        "kind": "gantt",
        "title": f"Step {step}, rank by rank",
        "about": f"{(end - begin) / 1e9:.2f} s from left to right; a call within another one is drawn thinner",
        "rows": [label_of(track) for track, _ in tracks],
        "parts": [
            {"label": PHASES.get(phase, phase), "colour": COLOURS[phase], "bars": found} for phase, found in by_phase.items() if found
        ],
    }  # fmt: skip


def phase_of(span: Span, validations: Sequence[tuple[int, int]]) -> str:
    """The phase of a rank's call; OTHER: it belongs to no phase."""
    middle = (span.begin + span.end) // 2
    if any(begin <= middle <= end for begin, end in validations):
        return "validate"
    return next((phase for beginning, phase in _CALLS if span.name.startswith(beginning)), OTHER)


def shown(tracks: Sequence[Track]) -> list[Track]:
    """The tracks that a chart has room for, the first ones of each role."""
    roles: dict[str, list[Track]] = {}
    for track in tracks:
        roles.setdefault(track.role, []).append(track)
    each = max(1, _TRACKS // max(len(roles), 1)) if len(tracks) > _TRACKS else len(tracks)
    return [track for role in roles.values() for track in role[:each]]


def label_of(track: Track) -> str:
    return f"{track.role} {track.name.removeprefix('rank ')}"


def _validations(found: RecordedTimeline) -> list[tuple[int, int]]:
    spans = [span for track in found.tracks if track.role == CONTROLLER for span in track.spans]
    return [(span.begin, span.end) for span in spans if span.name == "validate"]


def _part(phase: str, values: Sequence[float]) -> dict[str, Any]:
    return {
        "label": PHASES.get(phase, phase),
        "colour": COLOURS[phase],
        "values": [float(f"{value:.5g}") for value in values],
    }


def _mean(steps: Sequence[dict[str, float]], metric: str) -> float:
    return sum(step.get(metric, 0.0) for step in steps) / len(steps)


def _text(span: Span) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in span.facts.items())
    return f"{span.name}: {(span.end - span.begin) / 1e9:.3f} s" + (f" ({facts})" if facts else "")


PREFIX, TOTAL = "memory/", "total"


def memory_by_phase(run: RunRecord) -> dict[str, Any] | None:
    """Bars by phase, a piece for each owner, in MiB, of the last step with an account; None: the run has none."""
    step = next((step for step in reversed(run.steps) if any(name.startswith(PREFIX) for name in step)), None)
    if step is None:
        return None
    account: dict[str, dict[str, float]] = {}
    for name, value in step.items():
        if name.startswith(PREFIX):
            _, phase, owner = name.split("/", 2)
            account.setdefault(phase, {})[owner] = value / MIB
    owners = sorted({owner for held in account.values() for owner in held if held[owner]} - {TOTAL})
    order = [phase for phase in PHASES if phase in account]
    phases = [*order, *(phase for phase in account if phase not in order)]
    return {
        "kind": "rows",
        "title": f"Device memory in step {int(step['step'])}",
        "about": "each owner on the device where it has most; the number is all of the fullest device, and may be less than their sum",
        "unit": "MiB",
        "rows": [PHASES.get(phase, phase) for phase in phases],
        "parts": [
            {"colour": f"c{number % 10}", "label": owner.replace("_", " "), "values": [account[phase].get(owner, 0.0) for phase in phases]}
            for number, owner in enumerate(owners)
        ],
        "totals": [account[phase].get(TOTAL, 0.0) for phase in phases],
    }  # fmt: skip
