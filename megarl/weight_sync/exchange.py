"""The exchange of packets between ranks that share no memory: a communicator of all members, used bucket by bucket.

A member has one `Exchange`, which starts and finishes one round after the other: in a round it receives the messages of one bucket and
sends the messages of the same bucket (a trainer rank) or of the bucket before (an engine rank, which passes on the packets that it has
received). Sizes come from the plan; none is sent. Only where unchanged slices are left out does a round have two parts: first the headers
of its packets, which say which slices follow, then these slices.

How bytes move is a `Transport`: torch's process groups (`GroupTransport`: NCCL on GPUs, gloo on CPUs), where all messages of a round
are one grouped operation, which the host waits for once; or NIXL (nixl_transport.py).

If a member dies, gives up or is silent for too long, the others raise a `LinkError` that names it (hub.py).
"""

from collections.abc import Iterator, Sequence

import torch

from megarl.weight_sync.group_transport import GroupTransport
from megarl.weight_sync.hub import Member
from megarl.weight_sync.nixl_transport import NixlTransport
from megarl.weight_sync.packets import HEADER, NIXL, ExchangeShare, Message, aligned, header_bytes
from megarl.weight_sync.transport import Moving, Part, Transport


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
        headers = [
            [_within(part, 0, header_bytes(len(message.sizes))) for part, message in pairs]
            for pairs in (sends, receives)
        ]
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

    def forget_slots(self) -> None:
        """Call this before slots are freed."""
        self._transport.use(())

    def close(self) -> None:
        self._transport.close()

    def _parts(
        self, messages: Sequence[Sequence[Message]], bucket: int, slots: Sequence[torch.Tensor], first: int
    ) -> list[tuple[Part, Message]]:
        if not first <= bucket < len(messages):
            return []
        found = []
        for message in messages[bucket]:
            number = bucket % len(slots)  # a rank without messages may have no slot
            data = slots[number][message.start : message.start + message.nbytes]
            part = Part(message.peer, data, number, message.start, message.peer_start)
            found.append((part, message))
        return found


def _within(part: Part, start: int, end: int) -> Part:
    return Part(part.peer, part.data[start:end], part.slot, part.start + start, part.peer_start + start)


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


def join_exchange(
    share: ExchangeShare, hub: tuple[str, int], device: str, timeout: float, skip_unchanged: bool
) -> Exchange:
    """Join the exchange whose members meet at `hub`; returns when all have come.

    Raises:
        LinkError: a member did not come in time, or is gone.
    """
    member = Member(hub, share.member, share.name, timeout)
    try:
        transport = (
            NixlTransport(member, device)
            if share.transport == NIXL
            else GroupTransport(member, share.size, device)
        )
    except BaseException:
        member.close()  # so that the others do not wait for this member
        raise
    return Exchange(share, transport, skip_unchanged)
