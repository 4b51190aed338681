"""The exchange of packets between ranks that share no memory: a communicator of all members, used bucket by bucket.

A member has one `Exchange`, which starts and finishes one round after the other: in a round it receives the messages of one bucket and
sends those of the same bucket (a trainer rank) or of the one before (an engine rank, which passes on what it has received). Sizes are
those of the plan; none is sent. Only where unchanged slices are left out a round has two parts: the headers of its packets say which slices
follow, and these come after them.

How bytes move is a `Transport`: torch's process groups (`GroupTransport`: NCCL on GPUs, gloo on CPUs), where all messages of a round
are one grouped operation, which the host waits for once; or NIXL (nixl_transport.py).

If a member dies, gives up or is silent for too long, the others raise a `LinkError` that names it (hub.py).
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from megarl.util import nccl
from megarl.weight_sync.hub import Member, MemberStore
from megarl.weight_sync.links import LinkError
from megarl.weight_sync.packets import HEADER, NIXL, ExchangeShare, Message, aligned, header_bytes


class Part(NamedTuple):
    """Bytes that move in one piece.

    Attributes:
        peer: the member at the other end.
        data: where the bytes are here (uint8).
        slot, start: which slot `data` is of, and its offset there [bytes].
        peer_start: its offset in the peer's slot [bytes].
    """

    peer: int
    data: torch.Tensor
    slot: int
    start: int
    peer_start: int


class Moving(Protocol):
    """Parts on their way."""

    def wait(self) -> None:
        """Return when all have arrived or may be changed again. May be called once."""


class Transport(Protocol):
    """Moves parts between members. Of a pair of members, both list their parts of a call in the same order."""

    def use(self, slots: Sequence[torch.Tensor]) -> None:
        """Say in which memory all parts lie until this is called again."""

    def move(self, sends: Sequence[Part], receives: Sequence[Part]) -> Moving:
        """Begin to move parts."""

    def close(self) -> None:
        """End all that waits, here and at other members; may be called again."""


class Exchange:
    """One member's rounds."""

    def __init__(self, share: ExchangeShare, transport: Transport, skip_unchanged: bool) -> None:
        self._share, self._transport, self._skip = share, transport, skip_unchanged
        self._moving: Moving | None = None

    def start(self, bucket: int, slots: Sequence[torch.Tensor], first: int = 0) -> bool:
        """Begin the round in which `bucket` is received; returns whether there is anything in it.

        Args:
            slots: bucket b is in slots[b % len(slots)].
            first: the first bucket of the version.
        """
        assert self._moving is None, "one round at a time"
        self._transport.use(slots)
        receives = self._parts(self._share.receives, bucket, slots, first)
        sends = self._parts(self._share.sends, bucket - self._share.behind, slots, first)
        if not receives and not sends:
            return False
        if not self._skip:
            self._moving = self._transport.move([part for part, _ in sends], [part for part, _ in receives])
            return True
        headers = [[_header(*pair) for pair in pairs] for pairs in (sends, receives)]
        self._transport.move(*headers).wait()
        bodies = [[run for pair in pairs for run in _runs(*pair)] for pairs in (sends, receives)]
        self._moving = self._transport.move(*bodies)
        return True

    @property
    def moving(self) -> bool:
        """Whether a round was begun and not finished."""
        return self._moving is not None

    def finish(self) -> None:
        """Wait for the round that was begun, if any."""
        if self._moving is not None:
            self._moving.wait()
        self._moving = None

    def close(self) -> None:
        self._transport.close()

    def _parts(
        self, messages: Sequence[Sequence[Message]], bucket: int, slots: Sequence[torch.Tensor], first: int
    ) -> list[tuple[Part, Message]]:
        if not first <= bucket < len(messages):
            return []
        number = bucket % len(slots)
        found = []
        for message in messages[bucket]:
            data = slots[number][message.start : message.start + message.nbytes]
            part = Part(message.peer, data, number, message.start, message.peer_start)
            found.append((part, message))
        return found


def _within(part: Part, start: int, end: int) -> Part:
    return Part(part.peer, part.data[start:end], part.slot, part.start + start, part.peer_start + start)


def _header(part: Part, message: Message) -> Part:
    return _within(part, 0, header_bytes(len(message.sizes)))


def _runs(part: Part, message: Message) -> Iterator[Part]:
    """The slices of a packet that follow, neighbours in one piece."""
    count = len(message.sizes)
    flags = part.data[HEADER + 8 * count : HEADER + 9 * count].tolist()
    start = end = header_bytes(count)
    for size, follows in zip(message.sizes, flags, strict=True):
        if not follows and end > start:
            yield _within(part, start, end)
        end += aligned(size)
        start = start if follows else end
    if end > start:
        yield _within(part, start, end)


class GroupTransport:
    """A process group of torch's: NCCL for tensors on GPUs, gloo for others. `member` is closed with it.

    The constructor returns when all members have come; on GPUs it also makes the communicator.

    Raises:
        LinkError: a member is gone or did not come in time, or has another environment for NCCL.
    """

    def __init__(self, member: Member, size: int, device: str) -> None:
        self._member, self._device = member, device
        store = MemberStore(member)
        timeout = timedelta(seconds=member.timeout)
        if device != "cpu":
            agree(member, nccl.settings(os.environ))
        self._group: Any = member.while_all_live(lambda: _group(store, member.number, size, device, timeout))
        if device != "cpu":
            place = torch.device(device, torch.cuda.current_device())
            member.while_all_live(lambda: self._group.eager_connect_single_device(place))
        member.on_end(self._abort)

    def use(self, slots: Sequence[torch.Tensor]) -> None:
        """A process group takes any memory."""

    def move(self, sends: Sequence[Part], receives: Sequence[Part]) -> Moving:
        group = self._group
        if group is None:
            raise LinkError(self._member.problem or "the exchange of weights was closed")
        with self._errors():
            works: list[tuple[int | None, Any]]
            if self._device == "cpu":
                works = [(part.peer, group.recv([part.data], part.peer, 0)) for part in receives]
                works += [(part.peer, group.send([part.data], part.peer, 0)) for part in sends]
            else:  # one grouped operation of the communicator that all members share
                group._start_coalescing()
                for part in receives:
                    group.recv([part.data], part.peer, 0)
                for part in sends:
                    group.send([part.data], part.peer, 0)
                works = [(None, group._end_coalescing())]
        return _Works(self, works, [*sends, *receives])

    def close(self) -> None:
        self._member.close()
        self._abort()

    def wait(self, peer: int | None, work: Any) -> None:
        """Wait for an operation with `peer` (None: with any)."""
        timeout = self._member.timeout
        with self._errors(peer):
            if not work.wait(timedelta(seconds=timeout)):
                name = self._member.name(peer) if peer is not None else "a member of the weight sync"
                raise LinkError(f"{name} said nothing for {timeout:g} s")

    def _abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    @contextmanager
    def _errors(self, peer: int | None = None) -> Iterator[None]:
        """Turn errors of the process group into a LinkError that names the member whose end caused them."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, LinkError):
                raise
            first = str(error).strip().splitlines()[0]
            word = self._member.wait_for_word()
            if word is None:
                name = self._member.name(peer) if peer is not None else "a member of the weight sync"
                word = f"{name} could not be reached within {self._member.timeout:g} s, or has died: {first}"
            raise LinkError(word) from None


class _Works:
    """Operations of a process group, and the memory that they use."""

    def __init__(
        self, transport: GroupTransport, works: list[tuple[int | None, Any]], parts: Sequence[Part]
    ) -> None:
        self._transport, self._works, self._parts = transport, works, parts

    def wait(self) -> None:
        for peer, work in self._works:
            self._transport.wait(peer, work)
        self._works, self._parts = [], ()


def join_exchange(
    share: ExchangeShare, hub: tuple[str, int], device: str, timeout: float, skip_unchanged: bool
) -> Exchange:
    """Join the exchange whose members meet at `hub`; returns when all have come.

    Raises:
        LinkError: a member did not come in time, or is gone.
    """
    member = Member(hub, share.member, share.name, timeout)
    if share.transport == NIXL:
        from megarl.weight_sync.nixl_transport import NixlTransport

        return Exchange(share, NixlTransport(member, share.size, device), skip_unchanged)
    return Exchange(share, GroupTransport(member, share.size, device), skip_unchanged)


def agree(member: Member, here: Mapping[str, str]) -> None:
    """Compare the NCCL settings of this process with the first member's.

    Raises:
        LinkError: they differ, so that the two would make their buffers in different ways.
    """
    key = "environment"
    if member.number == 0:
        member.set(key, json.dumps(dict(here)).encode())
        return
    there = json.loads(member.get(key))
    if found := nccl.disagreement(here, there):
        raise LinkError(
            f"{member.name(0)} has another environment for NCCL than {member.name(member.number)}: {found}; set them for the job "
            "or on all of its nodes"
        )


def _group(store: MemberStore, number: int, size: int, device: str, timeout: timedelta) -> Any:
    """A backend of torch.distributed; it has the sends and receives of a ProcessGroup."""
    if device == "cpu":
        return torch.distributed.ProcessGroupGloo(store, number, size, timeout)
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # With this variable the thread that waits gets the error, and raises a LinkError. Without it torch gives each group a thread that
    # ends the process when an operation of the group has failed or timed out (ProcessGroupNCCL.cpp). It has no other switch.
    with _variable("TORCH_NCCL_BLOCKING_WAIT", "1"):
        return torch.distributed.ProcessGroupNCCL(store, number, size, options)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
