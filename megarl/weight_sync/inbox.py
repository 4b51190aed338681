"""An engine rank's side of the transport: it finds the packets of a weight sync, bucket by bucket, over either transport.

Packets of a trainer rank on the same machine are read where they were packed: in memory that both processes map (CPU) or
on the device that both use (CUDA IPC). Packets of other trainer ranks are received into two slots of the engine rank's own, one bucket
ahead of the bucket that is being written.
"""

import mmap
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megarl.weight_sync.links import ControlChannel, LinkError, PacketChannel, Token
from megarl.weight_sync.packets import P2P, Address, PacketSpec, SyncShare

RANK = struct.Struct("<q")
OFFER = struct.Struct("<qqq")  # of slots: their number, bytes of each, whether they last beyond a version


def slots_closed_token(version: int, share: SyncShare) -> Token:
    """The token by which an engine rank reports that it has closed slots that do not last."""
    return version, len(share.buckets)


class Inbox:
    """The channels of one engine rank to all trainer ranks that send to it.

    Raises:
        LinkError: a trainer rank could not be reached, here or in any method.
    """

    def __init__(
        self, share: SyncShare, addresses: Mapping[int, Address], device: str, timeout: float
    ) -> None:
        self._share, self._closed = share, False
        by_way = sorted(share.transports.items(), key=lambda item: (item[1] == P2P, item[0]))
        self._mapped: dict[int, MappedSource] = {}
        packet_channels = {}
        for source, transport in by_way:
            channel = call(addresses[source], share.rank, transport, timeout)
            if transport == P2P:
                packet_channels[source] = PacketChannel(channel, 1, device)
            else:
                self._mapped[source] = MappedSource(channel)
        self._remote = RemoteSources(share, packet_channels, device) if packet_channels else None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's own memory for packets; mapped slots belong to the trainer."""
        return self._remote.buffer_bytes if self._remote is not None else 0

    def begin(self, first: int = 0) -> None:
        """Begin a version at bucket `first`. The caller then takes and releases all buckets, and calls `end`."""
        if self._closed:
            raise LinkError(
                "the connection was given up after an error: trainer and engine have to be connected anew"
            )
        for source in self._mapped.values():
            source.begin()
        if self._remote is not None:
            self._remote.begin(first)

    def end(self, version: int) -> None:
        """End a version: all buckets were taken, and no view of their packets is left."""
        for source in self._mapped.values():
            source.end(slots_closed_token(version, self._share))
        if self._remote is not None:
            self._remote.end()

    def take(self, version: int, bucket: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The packets of a bucket as they arrive: (index within the bucket, bytes as uint8). Valid until `release`."""
        token, waiting = (version, bucket), {}
        for index, spec in enumerate(self._share.buckets[bucket]):
            if spec.peer in self._mapped:
                yield index, self._mapped[spec.peer].take(token, spec)
            else:
                waiting[spec.peer] = index
        if waiting:
            assert self._remote is not None
            packets = self._remote.take(bucket)
            for peer, index in waiting.items():
                yield index, packets[peer]

    def release(self, version: int, bucket: int) -> None:
        """The packets of a bucket are no longer needed."""
        for spec in self._share.buckets[bucket]:
            if spec.peer in self._mapped:
                self._mapped[spec.peer].channel.send_token((version, bucket))
        if self._remote is not None and any(
            spec.peer not in self._mapped for spec in self._share.buckets[bucket]
        ):
            self._remote.release()

    def close(self) -> None:
        self._closed = True
        for source in self._mapped.values():
            source.channel.close()
        if self._remote is not None:
            self._remote.close()
        self._mapped, self._remote = {}, None


def call(address: Address, target: int, transport: str, timeout: float) -> ControlChannel:
    """Connect to a trainer rank, and introduce this engine rank by its number."""
    peer = f"trainer rank {address.rank}"
    place: Any = (address.host, address.port) if transport == P2P else address.socket
    try:
        if transport == P2P:
            connection = socket.create_connection(place, timeout)
        else:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(place)
    except OSError as error:
        raise LinkError(f"{peer} could not be reached at {place}: {error}") from None
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

    def take(self, token: Token, spec: PacketSpec) -> torch.Tensor:
        self.channel.expect_token(token)
        slot = self._slots[token[1] % len(self._slots)]
        return slot[spec.start : spec.start + spec.nbytes]


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


class RemoteSources:
    """Trainer ranks of other machines: a thread receives one bucket while another is written.

    Its slots exist while a version arrives; on a CPU they last.
    """

    def __init__(self, share: SyncShare, packet_channels: dict[int, PacketChannel], device: str) -> None:
        self._packet_channels, self._device = packet_channels, device
        remote = (
            (bucket, [spec for spec in specs if spec.peer in packet_channels])
            for bucket, specs in enumerate(share.buckets)
        )
        self._buckets = [(bucket, specs) for bucket, specs in remote if specs]
        self._size = max(sum(spec.nbytes for spec in specs) for _, specs in self._buckets)
        self._slots: list[torch.Tensor] = []
        self._arrived: queue.Queue = queue.Queue()
        self._free = threading.Semaphore(0)
        self._closed = False

    @property
    def buffer_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    def begin(self, first: int) -> None:
        if not self._slots:
            number = min(2, len(self._buckets))
            self._slots = [
                torch.empty(self._size, dtype=torch.uint8, device=self._device) for _ in range(number)
            ]
        self._arrived, self._free = queue.Queue(), threading.Semaphore(len(self._slots))
        threading.Thread(target=self._receive, args=(first,), name="weights", daemon=True).start()

    def end(self) -> None:
        if self._device != "cpu":
            self._slots = []
            torch.cuda.empty_cache()

    def take(self, bucket: int) -> dict[int, torch.Tensor]:
        """The bytes of each trainer rank's packet, by trainer rank."""
        found, packets = self._arrived.get()
        if isinstance(packets, Exception):
            raise packets
        assert found == bucket, (found, bucket)
        return packets

    def release(self) -> None:
        self._free.release()

    def close(self) -> None:
        self._closed = True
        self._free.release()
        for packet_channel in self._packet_channels.values():
            packet_channel.close()

    def _receive(self, first: int) -> None:
        arrived, free = self._arrived, self._free
        bucket = -1
        try:
            if self._device != "cpu":
                torch.cuda.set_device(self._slots[0].device)  # a thread begins with the first GPU
            due = [(bucket, specs) for bucket, specs in self._buckets if bucket >= first]
            for index, (bucket, specs) in enumerate(due):
                free.acquire()
                if self._closed:
                    return
                slot, at, packets = self._slots[index % len(self._slots)], 0, {}
                for spec in specs:
                    room = slot[at : at + spec.nbytes]
                    packets[spec.peer] = self._packet_channels[spec.peer].receive(room)
                    at += spec.nbytes
                if self._device != "cpu":
                    torch.cuda.current_stream().synchronize()
                arrived.put((bucket, packets))
        except Exception as error:  # raised where it is waited for
            arrived.put((bucket, error))
