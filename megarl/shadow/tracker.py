"""Bytes of the tensors on the device: by the phase, the operation and the line that made them, at the peak of each phase."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

BLOCK = 512  # bytes: torch's caching allocator gives multiples of it
LIBRARIES = ("megarl.", "megatron.core.", "transformer_engine.", "sglang.")


class Made(NamedTuple):
    """Where a tensor comes from."""

    phase: str
    operation: str
    line: str  # "<module>:<line> <function>"


@dataclass
class Phase:
    """Bytes of a phase of a shadow run.

    Attributes:
        before: on the device when it began. peak: at most. after: when it ended.
        at_peak: bytes on the device, by their makers, at the peak or below it by up to a fiftieth of the phase's bytes.
    """

    before: int
    peak: int
    after: int = 0
    at_peak: dict[Made, int] = field(default_factory=dict)


class Tracker:
    """Counts storages on the device from their first tensor on until the last reference is gone."""

    def __init__(self) -> None:
        self.current = 0
        self.phases: dict[str, Phase] = {}
        self._name = "start"
        self._live: dict[int, tuple[int, Made]] = {}
        self._noted = 0  # bytes of the last account of a peak
        self._in_fused = False

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Count as phase `name`; a phase of the same name before is forgotten."""
        outer, self._name, self._noted = self._name, name, self.current
        found = self.phases[name] = Phase(self.current, self.current)
        try:
            yield found
        finally:
            found.after = self.current
            self._name = outer

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Count only allocations that still exist at the end of the context: a compiled function makes no others."""
        if self._in_fused:
            yield
            return
        self._in_fused = True
        try:
            yield
        finally:
            self._in_fused = False
            self._grow(0)

    @property
    def name(self) -> str:
        return self._name

    def note(self, storage: torch.UntypedStorage, operation: str) -> None:
        """Count the storage of a tensor on the device, once."""
        key = storage._cdata
        if key in self._live:
            return
        size = _rounded(storage.nbytes())
        self._live[key] = size, Made(self._name, operation, line_of_code())
        weakref.finalize(storage, self._free, key)
        self._grow(size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was given another size in place."""
        if storage._cdata in self._live:
            before, made = self._live[storage._cdata]
            size = _rounded(storage.nbytes())
            self._live[storage._cdata] = size, made
            self._grow(size - before)

    def live(self) -> dict[Made, int]:
        """Bytes on the device now by their makers, largest first."""
        total: Counter[Made] = Counter()
        for size, made in self._live.values():
            total[made] += size
        return dict(total.most_common())

    def _free(self, key: int) -> None:
        size, _ = self._live.pop(key)
        self.current -= size

    def _grow(self, size: int) -> None:
        self.current += size
        phase = self.phases.get(self._name)
        if phase is not None and self.current > phase.peak and not self._in_fused:
            phase.peak = self.current
            # An account of every new peak would take longer than the run, so there is one for each fiftieth of the phase's bytes. Bytes
            # from before the phase do not count: of 100 GiB of weights a hundredth is more than a layer takes.
            if self.current - self._noted > (self.current - phase.before) // 50:
                phase.at_peak, self._noted = self.live(), self.current


def line_of_code() -> str:
    """The innermost line of a rank's code, which is in LIBRARIES: "<module>:<line> <function>"."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(LIBRARIES) and not module.startswith("megarl.shadow."):
            return f"{module}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def _rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
