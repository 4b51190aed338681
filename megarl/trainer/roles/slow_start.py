"""What processes are busy with that take long to start: the last line of a log, every minute until they are up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 60.0
_LONGEST = 300  # characters of a line
_END = 1 << 14  # bytes of a log that are read


@contextmanager
def telling(say: Callable[[str], None], log: Path, seconds: float = SECONDS) -> Iterator[None]:
    """Say every so many seconds what `log` ends with, where it is on this machine and ends with something."""
    over = threading.Event()

    def tell() -> None:
        waited = 0.0
        while not over.wait(seconds):
            waited += seconds
            line = last_line(log)
            if line:
                say(f"  {waited:.0f} s; {log.name}: {line}")

    thread = threading.Thread(target=tell, name="slow-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def last_line(log: Path) -> str:
    """Of a log in which bars of progress overwrite themselves; empty: there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:_LONGEST]
