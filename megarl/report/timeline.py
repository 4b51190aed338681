"""A run's timeline, read back: the spans of each track, and when each step began and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.trainer.run.timeline import CONTROLLER, STEP, read_events
from megarl.util.spans import Span


@dataclass
class Track:
    """One thread of the timeline: a rank, a reward worker, the controller's loop."""

    role: str
    name: str
    place: tuple[int, int]
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class RecordedTimeline:
    """The contents of a timeline.

    Attributes:
        windows: by step its begin and its end, in ns since the epoch; of a step that was made twice, after a failure, the last time.
        again: steps that were made twice.
        moments: events without a duration, such as a new version of the weights.
    """

    tracks: list[Track]
    windows: dict[int, tuple[int, int]]
    again: list[int]
    moments: list[Span]


def read_timeline(folder: Path) -> RecordedTimeline | None:
    """The timeline of a run folder; None: it has none.

    Raises:
        ValueError: a file that is no timeline.
    """
    events = read_events(folder)
    if not events:
        return None
    names: dict[tuple[str, int, int], str] = {}
    for event in events:
        if event["ph"] == "M" and "name" in event["args"]:
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    roles = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
    tracks = {
        (pid, tid): Track(roles[pid], name, (pid, tid))
        for (kind, pid, tid), name in names.items()
        if kind == "thread_name"
    }
    moments: list[Span] = []
    for event in events:
        if event["ph"] != "M":
            begin = 1000 * event["ts"]
            span = Span(event["name"], begin, begin + 1000 * event.get("dur", 0), event.get("args", {}))
            is_moment = event["ph"] == "i"
            (moments if is_moment else tracks[event["pid"], event["tid"]].spans).append(span)
    found = sorted(tracks.values(), key=lambda track: track.place)
    steps = [span for track in found if track.role == CONTROLLER for span in track.spans if span.name == STEP]
    windows: dict[int, tuple[int, int]] = {}
    again = set()
    collected: int | None = None  # when a step began whose halves are calls of their own (`megarl.Trainer`)
    for span in sorted(steps, key=lambda span: span.begin):
        step = int(span.facts["step"])
        if "half" in span.facts:
            collected = span.begin
            continue
        if step in windows:
            again.add(step)
        windows[step] = collected or span.begin, span.end
        collected = None
    return RecordedTimeline(found, dict(sorted(windows.items())), sorted(again), moments)


def nested(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Each span with the number of spans around it, the outer ones first."""
    found: list[tuple[Span, int]] = []
    open_ends: list[int] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while open_ends and open_ends[-1] <= span.begin:
            open_ends.pop()
        found.append((span, len(open_ends)))
        open_ends.append(span.end)
    return found
