"""Where an engine rank finds the packets of a weight sync, bucket by bucket, however they come.

From a trainer rank on the same machine they are read where they were packed: in memory that both processes map (CPU) or
on the device that both use (CUDA IPC). From others they come into two slots of the engine rank's own, one bucket
ahead of the one that is being written.
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

from megarl.weight_sync.links import Line, LinkError, Pair, Token
from megarl.weight_sync.packets import P2P, Address, Parcel, SyncShare

RANK = struct.Struct("<q")
OFFER = struct.Struct("<qqq")  # of slots: how many, bytes of each, whether they last beyond a version


def after_all(version: int, share: SyncShare) -> Token:
    """What an engine rank says when it has closed slots that do not last."""
    return version, len(share.buckets)


class Inbox:
    """The links of one engine rank to all trainer ranks that send to it.

    Raises:
        LinkError: a trainer rank could not be reached, here or in any method.
    """

    def __init__(
        self, share: SyncShare, addresses: Mapping[int, Address], device: str, timeout: float
    ) -> None:
        self._share, self._closed = share, False
        by_way = sorted(share.transports.items(), key=lambda item: (item[1] == P2P, item[0]))
        self._mapped: dict[int, MappedSource] = {}
        pairs = {}
        for source, transport in by_way:
            if transport == P2P:
                pairs[source] = Pair(call(addresses[source], share.rank, transport, timeout), 1, device)
            else:
                line = call(addresses[source], share.rank, transport, timeout)
                self._mapped[source] = MappedSource(line)
        self._remote = RemoteSources(share, pairs, device) if pairs else None

    @property
    def buffer_bytes(self) -> int:
        """Of memory that this rank has for the packets; what it maps is the trainer's."""
        return self._remote.buffer_bytes if self._remote is not None else 0

    def begin(self, first: int = 0) -> None:
        """A version is about to come, from bucket `first` on; all its buckets are taken and released, and `end` is called."""
        if self._closed:
            raise LinkError(
                "the connection was given up after an error: trainer and engine have to be connected anew"
            )
        for source in self._mapped.values():
            source.begin()
        if self._remote is not None:
            self._remote.begin(first)

    def end(self, version: int) -> None:
        """All buckets were taken; nothing refers to their packets any more."""
        for source in self._mapped.values():
            source.end(after_all(version, self._share))
        if self._remote is not None:
            self._remote.end()

    def take(self, version: int, bucket: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The packets of a bucket as they arrive: which parcel, and its bytes (uint8). Valid until `release`."""
        token, waiting = (version, bucket), {}
        for index, parcel in enumerate(self._share.buckets[bucket]):
            if parcel.peer in self._mapped:
                yield index, self._mapped[parcel.peer].take(token, parcel)
            else:
                waiting[parcel.peer] = index
        if waiting:
            assert self._remote is not None
            packets = self._remote.take(bucket)
            for peer, index in waiting.items():
                yield index, packets[peer]

    def release(self, version: int, bucket: int) -> None:
        """The packets of a bucket are no longer needed."""
        for parcel in self._share.buckets[bucket]:
            if parcel.peer in self._mapped:
                self._mapped[parcel.peer].release((version, bucket))
        if self._remote is not None and any(
            parcel.peer not in self._mapped for parcel in self._share.buckets[bucket]
        ):
            self._remote.release()

    def close(self) -> None:
        self._closed = True
        for source in self._mapped.values():
            source.close()
        if self._remote is not None:
            self._remote.close()
        self._mapped, self._remote = {}, None


def call(address: Address, target: int, transport: str, timeout: float) -> Line:
    """Connect to a trainer rank, and say who is there."""
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
    line = Line(connection, peer, timeout)
    line.send(RANK.pack(target))
    return line


class MappedSource:
    """A trainer rank whose slots this process maps."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._slots: list[torch.Tensor] = []
        self._lasting = True

    def begin(self) -> None:
        """Map what the trainer rank offers, unless it is mapped and lasts."""
        if self._slots:
            return
        count, size, lasting = OFFER.unpack(self._line.receive(OFFER.size))
        self._lasting = bool(lasting)
        if size >= 0:
            self._slots = [_map(file, size) for file in self._line.receive_files(count)]
        else:  # on a device; -size bytes describe how it is opened
            handles = pickle.loads(self._line.receive(-size))
            self._slots = [open_device_buffer(handle) for handle in handles]

    def end(self, token: Token) -> None:
        """Close slots that do not last, and say so."""
        if not self._lasting:
            self._slots = []
            self._line.say(token)

    def take(self, token: Token, parcel: Parcel) -> torch.Tensor:
        self._line.expect(token)
        slot = self._slots[token[1] % len(self._slots)]
        return slot[parcel.start : parcel.start + parcel.nbytes]

    def release(self, token: Token) -> None:
        self._line.say(token)

    def close(self) -> None:
        self._line.close()


def _map(file: int, size: int) -> torch.Tensor:
    with open(file, "r+b", buffering=0) as memory:
        return torch.frombuffer(mmap.mmap(memory.fileno(), size), dtype=torch.uint8)


def open_device_buffer(handle: tuple) -> torch.Tensor:
    """A tensor of another process on a GPU, from what `share_device_buffer` said of it.

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
    """Trainer ranks of other machines; a thread receives one bucket while another is written.

    Its slots are there while a version comes; on a CPU they stay.
    """

    def __init__(self, share: SyncShare, pairs: dict[int, Pair], device: str) -> None:
        self._pairs, self._device = pairs, device
        self._buckets = [
            (bucket, [parcel for parcel in parcels if parcel.peer in pairs])
            for bucket, parcels in enumerate(share.buckets)
        ]
        self._buckets = [(bucket, parcels) for bucket, parcels in self._buckets if parcels]
        self._size = max(sum(parcel.nbytes for parcel in parcels) for _, parcels in self._buckets)
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
        """By trainer rank, the bytes of its packet."""
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
        for pair in self._pairs.values():
            pair.close()

    def _receive(self, first: int) -> None:
        arrived, free = self._arrived, self._free
        bucket = -1
        try:
            if self._device != "cpu":
                torch.cuda.set_device(self._slots[0].device)  # a thread begins with the first GPU
            due = [(bucket, parcels) for bucket, parcels in self._buckets if bucket >= first]
            for index, (bucket, parcels) in enumerate(due):
                free.acquire()
                if self._closed:
                    return
                slot, at, packets = self._slots[index % len(self._slots)], 0, {}
                for parcel in parcels:
                    room = slot[at : at + parcel.nbytes]
                    packets[parcel.peer] = self._pairs[parcel.peer].receive(room)
                    at += parcel.nbytes
                if self._device != "cpu":
                    torch.cuda.current_stream().synchronize()
                arrived.put((bucket, packets))
        except Exception as error:  # raised where it is waited for
            arrived.put((bucket, error))
