"""An engine rank's side of the transport: it finds the packets of a weight sync, bucket by bucket.

Packets in memory that this process shares with trainer ranks are read where they lie: in memory that both processes map (CPU) or
on the device that both use (CUDA IPC). Where engines have devices of their own, packets are received into two slots of the engine
rank's own, one bucket ahead of the bucket that is being written and, at the same time, passed on to the next engine.
"""

import mmap
import pickle
import socket
import struct
from collections.abc import Iterator, Mapping

import torch

from megarl.weight_sync.exchange import Exchange, join_exchange
from megarl.weight_sync.links import ControlChannel, LinkError, Token
from megarl.weight_sync.packets import Address, SyncShare

RANK = struct.Struct("<q")
OFFER = struct.Struct("<qqq")  # of slots: their number, bytes of each, whether they last beyond a version


def slots_closed_token(version: int, share: SyncShare) -> Token:
    """The token by which an engine rank reports that it has closed slots that do not last."""
    return version, len(share.buckets)


class Inbox:
    """The connections of one engine rank to all ranks from which it takes packets.

    Raises:
        LinkError: a rank could not be reached, here or in any method.
    """

    def __init__(
        self,
        share: SyncShare,
        addresses: Mapping[int, Address],
        hub: tuple[str, int] | None,
        device: str,
        timeout: float,
    ) -> None:
        """`hub`: where the members of the exchange meet; this rank is a member if its share has an exchange."""
        self._share, self._device, self._closed = share, device, False
        self._slots: list[torch.Tensor] = []
        self._first = 0  # bucket of the version that arrives
        self._sources = {
            rank: MappedSource(call(addresses[rank], share.rank, timeout)) for rank in share.near
        }
        self._exchange: Exchange | None = None
        if share.exchange is not None:
            assert hub is not None, "a member of the exchange is told where the others are"
            self._exchange = join_exchange(share.exchange, hub, device, timeout, share.skip_unchanged)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's own memory for packets; mapped slots belong to the trainer."""
        return sum(slot.nbytes for slot in self._slots)

    def begin(self, first: int = 0) -> None:
        """Begin a version at bucket `first`. The caller then takes and releases all buckets, and calls `end`."""
        if self._closed:
            raise LinkError(
                "the connection was given up after an error: trainer and engine have to be connected anew"
            )
        for source in self._sources.values():
            source.begin()
        if self._exchange is not None:
            share = self._share
            if not self._slots:
                self._slots = [
                    torch.empty(share.slot_bytes, dtype=torch.uint8, device=self._device)
                    for _ in range(share.num_slots)
                ]
            self._first = first
            self._exchange.start(first, self._slots, first)

    def end(self, version: int) -> None:
        """End a version: all buckets were taken, and no view of their packets is left."""
        for source in self._sources.values():
            source.end(slots_closed_token(version, self._share))
        if self._exchange is not None:
            self._exchange.finish()
            if self._device != "cpu":
                self._exchange.forget_slots()
                self._slots = []
                torch.cuda.empty_cache()

    def take(self, version: int, bucket: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The packets of a bucket, each once it is complete: (index within the bucket, bytes as uint8). Valid until `release`."""
        slots = self._open(bucket)
        for index, spec in enumerate(self._share.buckets[bucket]):
            if spec.holder is not None and spec.holder not in slots:
                slots[spec.holder] = self._sources[spec.holder].slot((version, bucket))
            yield index, slots[spec.holder][spec.start : spec.start + spec.nbytes]

    def take_slot(self, version: int, bucket: int) -> torch.Tensor | None:
        """The slot with all packets of a bucket, once they are complete; on a GPU there is one slot. None: the bucket has no packet."""
        slots = self._open(bucket)
        for rank in self._share.mapped[bucket]:
            slots[rank] = self._sources[rank].slot((version, bucket))
        assert len(slots) <= 1, "an engine rank on a GPU maps the slots of the trainer rank there"
        return next(iter(slots.values()), None)

    def _open(self, bucket: int) -> dict[int | None, torch.Tensor]:
        """Wait for a bucket's packets that come over the network; returns this rank's own slot, if it has one, under None."""
        if self._exchange is not None:
            # The next bucket arrives, and this one is passed on, while this one is written.
            self._exchange.finish()
            self._exchange.start(bucket + 1, self._slots, self._first)
        return {None: self._slots[bucket % len(self._slots)]} if self._slots else {}

    def release(self, version: int, bucket: int) -> None:
        """The packets of a bucket are no longer needed."""
        for rank in self._share.mapped[bucket]:
            self._sources[rank].channel.send_token((version, bucket))

    def close(self) -> None:
        self._closed = True
        for source in self._sources.values():
            source.channel.close()
        if self._exchange is not None:
            self._exchange.close()
        self._sources, self._exchange = {}, None


def call(address: Address, target: int, timeout: float) -> ControlChannel:
    """Connect to a trainer rank, and introduce this engine rank by its number."""
    peer = f"trainer rank {address.rank}"
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.socket)
    except OSError as error:
        raise LinkError(f"{peer} could not be reached at {address.socket}: {error}") from None
    channel = ControlChannel(connection, peer, timeout)
    channel.send(RANK.pack(target))
    return channel


class MappedSource:
    """A trainer rank whose slots this process maps."""

    def __init__(self, channel: ControlChannel) -> None:
        self.channel = channel
        self._slots: list[torch.Tensor] = []
        self._lasting = True

    def begin(self) -> None:
        """Map the slots that the trainer rank offers, unless slots that last are mapped already."""
        if self._slots:
            return
        count, size, lasting = OFFER.unpack(self.channel.receive(OFFER.size))
        self._lasting = bool(lasting)
        if size >= 0:
            self._slots = [_map(file, size) for file in self.channel.receive_files(count)]
        else:  # on a device: a pickle of -size bytes says how to open the slots
            handles = pickle.loads(self.channel.receive(-size))
            self._slots = [open_device_buffer(handle) for handle in handles]

    def end(self, token: Token) -> None:
        """Close slots that do not last, and report it."""
        if not self._lasting:
            self._slots = []
            self.channel.send_token(token)

    def slot(self, token: Token) -> torch.Tensor:
        """The slot of a bucket; waits until the bucket is complete."""
        self.channel.expect_token(token)
        return self._slots[token[1] % len(self._slots)]


def _map(file: int, size: int) -> torch.Tensor:
    with open(file, "r+b", buffering=0) as memory:
        return torch.frombuffer(mmap.mmap(memory.fileno(), size), dtype=torch.uint8)


def open_device_buffer(handle: tuple) -> torch.Tensor:
    """Open a tensor of another process on a GPU, from the handle that `share_device_buffer` returned there.

    The two processes may count GPUs differently (CUDA_VISIBLE_DEVICES), so the GPU is found by its UUID.
    """
    uuid, rebuild, arguments, place = handle
    found = [
        index for index in range(torch.cuda.device_count())
        if str(torch.cuda.get_device_properties(index).uuid) == uuid
    ]  # fmt: skip
    if not found:
        raise LinkError(f"the trainer's GPU {uuid} is not visible to the engine's process")
    return rebuild(*arguments[:place], found[0], *arguments[place + 1 :])
