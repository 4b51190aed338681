"""The timeline as a file: trace events that chrome://tracing and ui.perfetto.dev open.

Guarantees: the file is valid JSON after every write; what a killed run has left is mended when the run goes on; the newest events
take no more than a given space, in one file, or in two once that is half full.

The format is the JSON array of trace events ("Trace Event Format", Chromium project): complete events (`ph` X), instant events (i)
and the names of processes and threads (M), times in microseconds since the epoch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megarl.util.files import naming

TIMELINE = "timeline.json"
EARLIER = "timeline.earlier.json"  # the older half
_BEGIN, _BETWEEN, _END = b"[\n", b",\n", b"\n]\n"

Event = dict[str, Any]


class TraceFile:
    """`timeline.json` in a run folder, and `timeline.earlier.json` once that is over half of the space."""

    def __init__(self, folder: Path, limit: int, *, goes_on: bool) -> None:
        """
        Args:
            limit: bytes of both together.
            goes_on: whether what is there is kept; else it is of another run.

        Raises:
            OSError: it cannot be written; names it.
        """
        self.path, self._earlier, self._limit = folder / TIMELINE, folder / EARLIER, limit
        self._names: dict[tuple[Any, ...], Event] = {}  # of processes and threads
        if not goes_on:
            self._earlier.unlink(missing_ok=True)
        found = mended(self.path.read_bytes()) if goes_on and self.path.is_file() else _BEGIN
        self._start(found)

    def name(self, events: Iterable[Event]) -> None:
        """Tell of processes and threads, before their first events; twice does no harm."""
        new = {(event["name"], event["pid"], event["tid"]): event for event in events}
        new = {key: event for key, event in new.items() if key not in self._names}
        self._names |= new
        self.write(new.values())

    def write(self, events: Iterable[Event]) -> None:
        """Add events; a whole file is there before and after."""
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


def mended(content: bytes) -> bytes:
    """A file without the array's end, and without an event that was cut off."""
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
        ValueError: a file that is no timeline, by its path.
    """
    events: list[Event] = []
    for path in (folder / EARLIER, folder / TIMELINE):
        if not path.is_file():
            continue
        try:
            events += json.loads(mended(path.read_bytes()) + _END)
        except ValueError as error:
            raise ValueError(f"{path} is no timeline of megarl: {error}") from None
    return events
