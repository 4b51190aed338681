"""When an engine last computed something: a time that the scheduler of its first rank writes and its owner reads.

Answers alone do not tell an engine that works from one that hangs: long ones that begin together end together, after any
time. SGLang's own snapshots of its load do not either: it writes them also while requests only wait (0.5.21). So the time
is written whenever the tokens of a step have come back from the device. It is that of the machine's monotonic clock, which all
of its processes share.
"""

import mmap
import struct
import time
from pathlib import Path
from typing import Any

_TIME = struct.Struct("d")  # in the machine's own form, which is written and read at once


class Heartbeat:
    """A time in a file that processes map."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _TIME.size)

    @classmethod
    def make(cls, path: Path) -> "Heartbeat":
        path.write_bytes(_TIME.pack(0.0))
        return cls(path)

    def beat(self) -> None:
        _TIME.pack_into(self._memory, 0, time.monotonic())

    def last(self) -> float:
        """By `time.monotonic`; 0: never."""
        return _TIME.unpack_from(self._memory)[0]


def register(path: Path) -> None:
    """Called in the first rank's scheduler process before SGLang runs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    heartbeat = Heartbeat.make(path)

    def beat(result: Any, *args: Any, **kwargs: Any) -> Any:
        heartbeat.beat()
        return result

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result", beat, HookType.AFTER
    )
