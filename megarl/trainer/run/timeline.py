"""The timeline of a run: the controller's phases, the calls of all ranks and the rewards, as trace events in one file.

chrome://tracing and ui.perfetto.dev open the file. Each process records its own spans (`megarl.util.spans`); at the end of a step the
controller asks all of them, and writes the answers to the last request. So no step waits for the timeline, and a run that is killed
lacks the spans of its ranks' last step at most.

A process of the file is a role, a thread a rank; the controller's threads are its own: the loop, and collecting ahead of it.

Guarantees:
- The file is valid JSON after every write.
- A file that a killed run left incomplete is mended when the run goes on.
- The newest events take no more than a given space, in one file, or in two once that is half full.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from megarl.cluster import SpanCollector, WorkerGroup
from megarl.util.files import naming
from megarl.util.spans import Facts, Span, Spans, joined

LOOP = "loop"  # name of the main thread; others have their own names
CONTROLLER, REWARDS = "controller", "rewards"
STEP = "step"
# In the order in which they are shown; a role that is not here comes after these.
_ROLES = (CONTROLLER, "rollout", "eval", REWARDS, "reward_model", "actor", "ref", "critic")
_LAST_SECONDS = 1.0  # at the end of a run, which may have ended because a process does not answer
_PARTS_APART = 1_000_000  # the numbers of threads of two parts of a rank
# A call that engines get again and again while they generate: shown as one span until a pause.
_POLLED, _POLLS_APART = "land", 100_000_000
_REWARDS_APART = 1_000_000  # nanoseconds between two samples from which on they are shown as two


class _Thread(NamedTuple):
    """A thread of a role. `place`: its rank, or another number that it is sorted by, and its part."""

    number: int
    name: str
    place: tuple[int, int]


class Timeline:
    """The timeline of a run; its methods are for the main thread, except `span` and `mark`."""

    def __init__(self, folder: Path, megabytes: int, *, goes_on: bool) -> None:
        """
        Args:
            megabytes: size limit; the oldest events are dropped.
            goes_on: whether the run continues from a checkpoint: earlier events stay.
        """
        self._file = TraceFile(folder, megabytes << 20, goes_on=goes_on)
        self._own = {LOOP: Spans()}  # by thread
        self._collector = SpanCollector()
        self._roles = list(_ROLES)
        self._steps: list[tuple[int, int]] = []  # (when it began, its number)
        self.rewards: Spans | None = None  # of reward workers, whose number is the fact `worker`

    @contextmanager
    def span(self, name: str, facts: Facts) -> Iterator[None]:
        """Record the block as a span of the controller's thread, with the facts as they are at its end.

        A span named STEP has its number as the fact `step`, and later spans belong to that step.
        """
        spans = self._of_this_thread()
        if name == STEP:
            self._steps.append((spans.now(), int(facts["step"])))
        with spans.span(name, facts):
            yield

    def mark(self, name: str) -> None:
        """Record a moment that concerns all processes."""
        self._of_this_thread().add(name)

    def collect(self, groups: Collection[WorkerGroup]) -> None:
        """Write the spans of the controller, the rewards and the processes that have answered; ask all processes for new ones."""
        self._write_own()
        self._write_rewards()
        self._write_answers(0.0)
        self._collector.ask(groups)

    def finish(self, groups: Collection[WorkerGroup]) -> None:
        """`collect` for the last time: processes have a second to answer."""
        self.collect(groups)
        self._write_answers(_LAST_SECONDS)

    def _of_this_thread(self) -> Spans:
        thread = threading.current_thread()
        return self._own.setdefault(LOOP if thread is threading.main_thread() else thread.name, Spans())

    def _write_own(self) -> None:
        for number, (thread, spans) in enumerate(list(self._own.items())):
            self._write(CONTROLLER, _Thread(number, thread, (number, 0)), spans.take())

    def _write_rewards(self) -> None:
        by_worker: dict[int, list[Span]] = {}
        for span in self.rewards.take() if self.rewards is not None else ():
            by_worker.setdefault(int(span.facts["worker"]), []).append(span)
        for worker, theirs in by_worker.items():
            thread = _Thread(worker, f"worker {worker}", (worker, 0))
            self._write(REWARDS, thread, joined(theirs, _REWARDS_APART, "samples"))

    def _write_answers(self, seconds: float) -> None:
        for process, spans in self._collector.answers(seconds):
            name = f"rank {process.rank}" + (f" part {process.part}" if process.part else "")
            thread = _Thread(process.rank + _PARTS_APART * process.part, name, (process.rank, process.part))
            polls = joined([span for span in spans if span.name == _POLLED], _POLLS_APART, "calls")
            others = [span for span in spans if span.name != _POLLED]
            self._write(process.role, thread, sorted([*others, *polls], key=lambda span: span.end))

    def _write(self, role: str, thread: _Thread, spans: Sequence[Span]) -> None:
        if not spans:
            return
        if role not in self._roles:
            self._roles.append(role)
        pid = self._roles.index(role) + 1
        self._file.name(_names(pid, role, thread))
        self._file.write(_event(span, pid, thread.number, self._step_of(span)) for span in spans)

    def _step_of(self, span: Span) -> int | None:
        """The last step that had begun before the span."""
        place = bisect_right(self._steps, span.begin, key=lambda begun: begun[0])
        return self._steps[place - 1][1] if place else None


def _names(pid: int, role: str, thread: _Thread) -> list[Event]:
    def named(what: str, value: str | int, key: str) -> Event:
        return {"name": what, "ph": "M", "pid": pid, "tid": thread.number, "args": {key: value}}

    rank, part = thread.place
    return [
        named("process_name", role, "name"),
        named("process_sort_index", pid, "sort_index"),
        named("thread_name", thread.name, "name"),
        named("thread_sort_index", 1000 * rank + part, "sort_index"),
    ]


def _event(span: Span, pid: int, thread: int, step: int | None) -> Event:
    begin, end = span.begin // 1000, span.end // 1000  # both rounded down, so that nested spans stay nested
    event: Event = {"name": span.name, "pid": pid, "tid": thread, "ts": begin}
    event |= {"ph": "X", "dur": end - begin} if span.end > span.begin else {"ph": "i", "s": "g"}
    facts = span.facts if step is None else {"step": step, **span.facts}
    return event | ({"args": facts} if facts else {})


TIMELINE = "timeline.json"
EARLIER = "timeline.earlier.json"  # older events
_BEGIN, _BETWEEN, _END = b"[\n", b",\n", b"\n]\n"

Event = dict[str, Any]


class TraceFile:
    """`timeline.json` in a run folder, and `timeline.earlier.json` once `timeline.json` is over half of the limit."""

    def __init__(self, folder: Path, limit: int, *, goes_on: bool) -> None:
        """
        Args:
            limit: bytes of both together.
            goes_on: whether existing events are kept; else they are of another run.

        Raises:
            OSError: it cannot be written; names it.
        """
        self.path, self._earlier, self._limit = folder / TIMELINE, folder / EARLIER, limit
        self._names: dict[tuple[Any, ...], Event] = {}  # of processes and threads
        if not goes_on:
            self._earlier.unlink(missing_ok=True)
        found = without_end(self.path.read_bytes()) if goes_on and self.path.is_file() else _BEGIN
        self._start(found)

    def name(self, events: Iterable[Event]) -> None:
        """Name processes and threads, before their first events; repeated names are ignored."""
        new = {(event["name"], event["pid"], event["tid"]): event for event in events}
        new = {key: event for key, event in new.items() if key not in self._names}
        self._names |= new
        self.write(new.values())

    def write(self, events: Iterable[Event]) -> None:
        """Add events; the file is valid JSON before and after."""
        lines = _BETWEEN.join(json.dumps(event, separators=(",", ":")).encode() for event in events)
        if not lines:
            return
        if self._size + len(lines) > self._limit // 2 and not self._empty:
            os.replace(self.path, self._earlier)
            self._start(_BEGIN)
            self.write(self._names.values())
        between = b"" if self._empty else _BETWEEN
        with naming(self.path), self.path.open("r+b") as file:
            file.seek(self._size)  # over the end of the array
            file.write(between + lines + _END)
        self._size += len(between + lines)
        self._empty = False

    def _start(self, content: bytes) -> None:
        """`content`: the array without its end."""
        self._size, self._empty = len(content), content == _BEGIN
        with naming(self.path):
            self.path.write_bytes(content + _END)


def without_end(content: bytes) -> bytes:
    """The content of a file without the end of its array, and without an event that was cut off."""
    if content.endswith(_END):
        return content[: -len(_END)] or _BEGIN
    lines = [line.rstrip(b",") for line in content.split(b"\n")]
    lines = [line for line in lines if line not in (b"", b"[", b"]")]
    if lines and not _is_json(lines[-1]):
        lines.pop()
    return _BEGIN + _BETWEEN.join(lines)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:  # JSON's, or half a character
        return False
    return True


def read_events(folder: Path) -> list[Event]:
    """All events of a run folder, older ones first; none where there is no timeline.

    Raises:
        ValueError: a file is no timeline; names its path.
    """
    events: list[Event] = []
    for path in (folder / EARLIER, folder / TIMELINE):
        if not path.is_file():
            continue
        try:
            events += json.loads(without_end(path.read_bytes()) + _END)
        except ValueError as error:
            raise ValueError(f"{path} is no timeline of megarl: {error}") from None
    return events
