"""Stand-ins for CUDA streams that record the order of operations, and a check that no two streams use the same memory without an order.

Torch computes at once here. The check follows the order that a program's streams, events and waits promise, with vector
clocks (Fidge 1988, Mattern 1989): an access comes after another one if its stream's clock includes that one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[int, int]


class Streams:
    """Stand-ins for the streams of `torch.cuda`; set `patches` as its attributes."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.all: list[_Stream] = []
        self.current = _Stream(self)

    def patches(self) -> dict[str, Any]:
        return {
            "Stream": lambda: _Stream(self),
            "current_stream": lambda: self.current,
            "stream": self._within,
        }

    @contextmanager
    def _within(self, stream: "_Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class _Stream:
    def __init__(self, owner: Streams) -> None:
        self.owner, self.number, self.clock = owner, len(owner.all), {}
        owner.all.append(self)

    def tick(self) -> Clock:
        """Enqueue an operation. Returns: its vector clock."""
        _join(self.clock, self.owner.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return dict(self.clock)

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        _join(self.clock, event)

    def wait_stream(self, stream: "_Stream") -> None:
        _join(self.clock, stream.clock)

    def synchronize(self) -> None:
        _join(self.owner.host, self.clock)


class Races(TorchDispatchMode):
    """Records every operation's reads and writes. `found`: pairs of operations without an order where at least one writes."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams, self.found, self.seen = streams, [], []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        if any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns):
            return result  # a view
        given = [*args, *((kwargs or {}).get(argument.name) for argument in schema.arguments[len(args) :])]
        stream = self.streams.current
        time = stream.tick()
        for argument, value in zip(schema.arguments, given, strict=True):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    self._access(str(function), stream.number, time, tensor, writes)
        return result

    def _access(self, name: str, stream: int, time: Clock, tensor: torch.Tensor, writes: bool) -> None:
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.itemsize
        assert tensor.is_contiguous()
        for other, number, then, first, last, wrote in self.seen:
            if (writes or wrote) and first < end and begin < last and time.get(number, 0) < then:
                self.found.append((other, name))
        self.seen.append((name, stream, time[stream], begin, end, writes))


def _join(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        clock[number] = max(clock.get(number, 0), time)
