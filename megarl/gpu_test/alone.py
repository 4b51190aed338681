"""One rank of any job on a real device, without the other ranks: the shadow's own run of a rank, with real tensors.

The process groups are torch's fake ones, which carry nothing between processes: a rank receives its own data in place of its peers' (torch
2.13.0, FakeProcessGroup.hpp). Two things are added here: the shapes that a pipeline stage receives, and numbers in memory that would
otherwise stay uninitialised.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.shadow.collectives import Alike, Log
from megarl.shadow.rank import Runner
from megarl.shadow.tracker import Made, Phase

EMPTY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
STD = 0.02


class Meter:
    """Takes the place of a shadow's tracker: bytes as torch's allocator has counted them.

    `allocated` returns the present bytes, `peak` the most since `begin` was called.
    """

    def __init__(
        self, allocated: Callable[[], int], peak: Callable[[], int], begin: Callable[[], None]
    ) -> None:
        self._allocated, self._peak, self._begin = allocated, peak, begin
        self.phases: dict[str, Phase] = {}
        self.name = "start"

    @property
    def current(self) -> int:
        return self._allocated()

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        outer, self.name = self.name, name
        self._begin()
        now = self.current
        found = self.phases[name] = Phase(now, now)
        try:
            yield found
        finally:
            found.peak, found.after, self.name = self._peak(), self.current, outer

    def live(self) -> dict[Made, int]:
        return {}  # the allocator does not know the makers of tensors


def cuda_meter() -> Meter:
    def begin() -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    return Meter(torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, begin)


class RealTensorMode(TorchDispatchMode):
    """Takes the place of `shadow.mode.Shadow`, for real tensors; attributes as there."""

    def __init__(self, meter: Meter, device: str) -> None:
        super().__init__()
        self.tracker, self._device = meter, device
        self.peers = Alike()
        self.log = Log(self.peers)  # of groups and objects alone
        self.flops: dict[str, Counter[str]] = defaultdict(Counter)
        self.assumed: Counter[str] = Counter()
        self.waits: dict[str, Counter[str]] = defaultdict(Counter)
        self.num_operations = 0

    @property
    def phase(self) -> str:
        return self.tracker.name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        out = func(*args, **(kwargs or {}))
        space, _, operation = func._schema.name.partition("::")
        with torch.no_grad():
            if space == "aten" and operation in EMPTY:
                self._fill(out)
            elif space == "c10d" and operation == "recv_":
                self._receive(args[0])
        return out

    def _fill(self, out: Any) -> None:
        for tensor in tree_leaves(out):
            if tensor.device.type == self._device and tensor.is_floating_point() and tensor.itemsize > 1:
                tensor.normal_(std=STD)

    def _receive(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_floating_point() and tensor.numel() == len(self.peers.received):
                tensor.copy_(torch.tensor(self.peers.received, dtype=tensor.dtype).reshape(tensor.shape))


class LoneRunner(Runner):
    """Runs ranks as `Runner` does, on the device that is really there."""

    def __init__(self, meter: Meter, device: str) -> None:
        super().__init__()
        self._meter, self._device = meter, device

    @contextmanager
    def _running(self) -> Iterator[Any]:
        self._meter.phases = {}  # the previous rank's are dropped
        self.shadow = RealTensorMode(self._meter, self._device)
        self.log = self.shadow.log
        try:
            with self.shadow:
                yield self.shadow
        finally:
            self.shadow = None
