"""Shadow ranks that run at the same time: data that one sends another receives, as far as its values are known.

Each rank is a process with a connection to a hub, which keeps posted data until a rank asks for it. A rank asks when it reads a
value, no earlier; when all running ranks ask for data that none has posted, the hub stops them.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from megarl.shadow.collectives import RECEIVE, SEND, Collective, ranks_text
from megarl.shadow.values import Coming, give, value_of

LARGEST = 1 << 20  # elements of posted tensors; larger tensors have no values at their receivers
LARGEST_OF_FLOATS = 1 << 10
_REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda parts: parts.sum(0, dtype=parts.dtype),
    "MAX": lambda parts: parts.amax(0),
    "MIN": lambda parts: parts.amin(0),
}

Key = tuple[object, ...]


class StoppedError(RuntimeError):
    """A rank waits for data that its peers will never send."""


class Together:
    """Peers that run at the same time."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection, self._rank = connection, rank
        self._counts: Counter[Key] = Counter()

    def exchange(self, call: Collective, args: Sequence[Any], wait: Callable[[], None]) -> None:
        # No reference to a tensor may outlive the call: it would keep bytes on the device.
        operation = call.operation
        if operation == SEND:
            self._post(self._next(call, self._rank, call.peer), _packed(args[0][0]))
        elif operation == RECEIVE:
            key, shape = self._next(call, call.peer, self._rank), args[0][0].shape
            give(args[0][0], Coming(lambda: _shaped(_unpacked(self._ask(key, call, wait)), shape)))
        elif operation in ("_allgather_base_", "alltoall_base_") and not args[0].is_floating_point():
            shape, parts = args[0].shape, self._posted(call, args[1], wait)
            if operation == "alltoall_base_":
                parts = self._own_shares(call, parts, wait)
            give(args[0], Coming(lambda: _shaped(_joined(parts()), shape)))
        elif operation == "allgather_" and not args[1][0].is_floating_point():
            parts = self._posted(call, args[1][0], wait)
            for number, output in enumerate(args[0][0]):
                give(output, _part(parts, number, output.shape))
        elif operation in ("allreduce_", "broadcast_") and _small(args[0][0]):
            shape, reduction = args[0][0].shape, call.detail
            parts = self._posted(call, args[0][0], wait)
            if operation == "broadcast_":
                give(args[0][0], _part(parts, args[2], shape))
            else:
                give(args[0][0], Coming(lambda: _shaped(_reduced(parts(), reduction), shape)))

    def gather_objects(self, call: Collective, own: Any, wait: Callable[[], None]) -> list[Any]:
        key = self._next(call)
        self._post((*key, self._rank), pickle.dumps(own))
        return [pickle.loads(self._ask((*key, rank), call, wait)) for rank in call.group]

    def broadcast_objects(
        self, call: Collective, own: list[Any], source: int, wait: Callable[[], None]
    ) -> list[Any]:
        key = (*self._next(call), source)
        if source == self._rank:
            self._post(key, pickle.dumps(own))
            return own
        return pickle.loads(self._ask(key, call, wait))

    def _posted(
        self, call: Collective, own: torch.Tensor, wait: Callable[[], None]
    ) -> Callable[[], list[torch.Tensor] | None]:
        """Post this rank's part of a collective; returns a function that gives all ranks' parts, None where one is unknown."""
        key = self._next(call)
        self._post((*key, self._rank), _packed(own))
        found: list[list[torch.Tensor] | None] = []  # once they were looked at

        def look() -> list[torch.Tensor] | None:
            if not found:
                parts = [_unpacked(self._ask((*key, rank), call, wait)) for rank in call.group]
                found.append(None if any(part is None for part in parts) else parts)
            return found[0]

        return look

    def _own_shares(
        self, call: Collective, parts: Callable[[], list[torch.Tensor] | None], wait: Callable[[], None]
    ) -> Callable[[], list[torch.Tensor] | None]:
        """The parts of an all-to-all that are for this rank."""
        key, me = (*self._next(call), "splits"), call.group.index(self._rank)
        self._post((*key, self._rank), pickle.dumps(call.sends))

        def look() -> list[torch.Tensor] | None:
            found = parts()
            if found is None:
                return None
            splits = [pickle.loads(self._ask((*key, rank), call, wait)) for rank in call.group]
            return [
                part.reshape(-1).split(list(split))[me] for part, split in zip(found, splits, strict=True)
            ]

        return look

    def _next(self, call: Collective, *between: int | None) -> Key:
        """The name of a call: the same on all ranks that take part."""
        key = (call.communicator, call.group, call.operation if not between else "", *between)
        self._counts[key] += 1
        return (*key, self._counts[key])

    def _post(self, key: Key, value: bytes) -> None:
        self._connection.send(("post", key, value))

    def _ask(self, key: Key, call: Collective, wait: Callable[[], None]) -> bytes:
        wait()
        self._connection.send(("ask", key, b""))
        answer = self._connection.recv()
        if answer is None:
            raise StoppedError(
                f"it waits for ever for what a peer sends in {call.name}, group {ranks_text(call.group)}"
            )
        return answer


def serve(connections: Mapping[int, Connection]) -> dict[int, bytes]:
    """Be the hub of ranks until all have ended.

    Returns:
        The result that each rank gave to `end`; a rank whose process died has none.
    """
    running = {connection: rank for rank, connection in connections.items()}
    posted: dict[Key, bytes] = {}
    asking: dict[Connection, Key] = {}
    ends: dict[int, bytes] = {}
    while running:
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            try:
                what, key, value = connection.recv()
            except EOFError:
                del running[connection]
                asking.pop(connection, None)
                continue
            if what == "post":
                posted[key] = value
            elif what == "ask":
                asking[connection] = key
            else:
                ends[running.pop(connection)] = value
        for connection, key in list(asking.items()):
            if key in posted:
                connection.send(posted[key])
                del asking[connection]
        if running and len(asking) == len(running):
            for connection in asking:
                connection.send(None)
            asking.clear()
    return ends


def end(connection: Connection, value: bytes) -> None:
    """Tell the hub that a rank has ended."""
    connection.send(("end", (), value))


def _packed(tensor: torch.Tensor) -> bytes:
    """A tensor's value, as it is now; nothing where it has none."""
    value = value_of(tensor) if tensor.numel() <= LARGEST else None
    return pickle.dumps(None if value is None else value.detach().clone())


def _unpacked(value: bytes) -> torch.Tensor | None:
    return pickle.loads(value)


def _small(tensor: torch.Tensor) -> bool:
    """Whether floats have values, too, such as the flag of an overflow."""
    return not tensor.is_floating_point() or tensor.numel() <= LARGEST_OF_FLOATS


def _shaped(value: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """A value in the shape of its receiver; None if the number of elements differs."""
    return None if value is None or value.numel() != shape.numel() else value.reshape(shape)


def _part(parts: Callable[[], list[torch.Tensor] | None], number: int, shape: torch.Size) -> Coming:
    return Coming(lambda: None if (found := parts()) is None else _shaped(found[number], shape))


def _joined(parts: list[torch.Tensor] | None) -> torch.Tensor | None:
    return None if parts is None else torch.cat([part.reshape(-1) for part in parts])


def _reduced(parts: list[torch.Tensor] | None, reduction: str) -> torch.Tensor | None:
    if parts is None or reduction not in _REDUCTIONS or len({part.shape for part in parts}) > 1:
        return None
    return _REDUCTIONS[reduction](torch.stack(parts))
