"""Spans: activities of a process, from when to when. A span costs some microseconds, and is kept until it is collected.

Guarantees: the spans of a process are on one clock that never goes back and shows the machine's time of day; spans may be
recorded in any thread; of a process whose spans are never collected only the newest are kept.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

Facts = dict[str, int | float | str]
"""Further facts about a span, besides its name and time."""

MOST = 20_000  # spans that a process keeps: some 10 MB
_READINGS = 16


class Span(NamedTuple):
    """An activity of a process; `begin` and `end` in nanoseconds since the epoch, equal for an event without a duration."""

    name: str
    begin: int
    end: int
    facts: Facts


class Spans:
    """Finished spans of a process that are not collected yet, in the order of their ends."""

    def __init__(self, most: int = MOST) -> None:
        self._kept: deque[Span] = deque(maxlen=most)
        # The time of day is read at the start only: if it is set later, spans keep their lengths and their order.
        self._epoch = _epoch()

    def now(self) -> int:
        """Nanoseconds since the epoch."""
        return self._epoch + time.perf_counter_ns()

    @contextmanager
    def span(self, name: str, facts: Facts | None = None) -> Iterator[Facts]:
        """Record the block as a span, however it ends; the block may add to the facts that it is given."""
        facts = {} if facts is None else facts
        begin = self.now()
        try:
            yield facts
        finally:
            self._kept.append(Span(name, begin, self.now(), facts))

    def add(self, name: str, seconds: float = 0.0, facts: Facts | None = None) -> None:
        """Record a span that ends now and began `seconds` ago."""
        end = self.now()
        self._kept.append(Span(name, end - int(seconds * 1e9), end, {} if facts is None else facts))

    def take(self) -> list[Span]:
        """Collect all spans, which are then no longer kept."""
        return [self._kept.popleft() for _ in range(len(self._kept))]


def _epoch() -> int:
    """The time of day in nanoseconds since the epoch when `time.perf_counter_ns` was 0."""
    # A process that is interrupted between two readings has a clock of its own, some milliseconds off: the closest readings of several count.
    readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(_READINGS)]
    before, day, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return day - (before + after) // 2


def joined(spans: Sequence[Span], gap: int, count: str) -> list[Span]:
    """Join spans that overlap, or follow each other within `gap` nanoseconds, into one that is named after the first.

    Args:
        count: name of the fact with the number of joined spans.
    """
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if found and span.begin <= found[-1].end + gap:
            last = found[-1]
            number = last.facts[count]
            assert isinstance(number, int)
            found[-1] = last._replace(end=max(last.end, span.end), facts=last.facts | {count: number + 1})
        else:
            found.append(span._replace(facts={count: 1}))
    return found


def busy(spans: Sequence[Span], begin: int, end: int) -> int:
    """Nanoseconds between `begin` and `end` that at least one of the spans covers."""
    total, reached = 0, begin
    for span in sorted(spans, key=lambda span: span.begin):
        first, last = max(span.begin, reached), min(span.end, end)
        if last > first:
            total, reached = total + last - first, last
    return total


_LONGEST_TEXT = 80


def facts_of_call(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Facts:
    """Numbers and short texts among the arguments of a call, by parameter; of tables their rows and the bytes of their buffers.

    Raises:
        TypeError: a function of this signature does not take these arguments.
    """
    facts: Facts = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if hasattr(value, "num_rows"):  # a table; this module does not import pyarrow
            facts |= {f"{name}_rows": value.num_rows, f"{name}_bytes": value.get_total_buffer_size()}
        elif isinstance(value, int | float) and math.isfinite(value):  # JSON has no other numbers
            facts[name] = value
        elif isinstance(value, str):
            facts[name] = value[:_LONGEST_TEXT]
        elif isinstance(value, list | tuple) and value and all(isinstance(part, str) for part in value):
            facts[name] = ", ".join(value)[:_LONGEST_TEXT]
    return facts
