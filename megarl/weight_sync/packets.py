"""What travels in a weight sync: slices, packed end to end into packets.

A packet is what one trainer rank sends to one engine rank in one bucket. Both ends know from their shares of the plan
which slices it has; so its bytes are numbers only:

    int64 version | int64 bucket | int64 checksum of each slice | uint8 each: 1 if the slice follows, 0 if it has not
    changed | the slices that follow, each from a multiple of 16 bytes, row-major

A slice that has not changed since the version that the engine holds does not follow; its checksum is there all the
same, and the engine verifies what it holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

from megarl.layout.boxes import Box

ALIGNMENT = 16
SHARED, IPC, P2P = "shared_memory", "cuda_ipc", "p2p"
TRANSPORTS = (SHARED, IPC, P2P)
# As they are, in another type; quantised to float8; or the scales of these, for which `box` counts blocks of `local`.
READINGS = CONVERT, QUANTISE, SCALE = "convert", "quantise", "scale"


@cache
def itemsize(dtype: str) -> int:
    """Bytes of an element of the torch type of that name."""
    return getattr(torch, dtype).itemsize


class Slice(NamedTuple):
    """Elements of the logical tensor `tensor` on their way: at `box` of the local tensor `local` of this end.

    dtype: of torch, by name ("bfloat16"): what travels and what the engine holds.
    reading: one of READINGS: how the source gets them.
    """

    tensor: str
    local: str
    box: Box
    dtype: str
    reading: str = CONVERT

    @property
    def nbytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)


class Parcel(NamedTuple):
    """The slices of a packet, as one of its ends sees them.

    peer: the rank at the other end. start: where the packet begins in the source's slot, in bytes.
    """

    peer: int
    start: int
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """Of the packet, all its slices sent."""
        return packet_bytes([item.nbytes for item in self.slices])


@dataclass(frozen=True)
class SyncShare:
    """What one rank sends in a version, or what one engine rank takes.

    Attributes:
        transports: the rank at the other end -> one of TRANSPORTS, for each rank that it has parcels with.
        buckets: the parcels of each bucket, by peer.
        padding: of an engine rank: parameter -> its elements that no slice fills.
        fp8_block: of a source: rows and columns of a block of what it quantises (None: it does not).
        frozen: so many of the first buckets have what training leaves alone; a version may begin after them.
        scaling: of an engine rank: of the adapters that its other buckets have (None: they have weights).
    """

    rank: int
    transports: dict[int, str]
    buckets: tuple[tuple[Parcel, ...], ...]
    padding: dict[str, int]
    fp8_block: tuple[int, int] | None = None
    frozen: int = 0
    scaling: float | None = None

    @cached_property
    def slot_bytes(self) -> int:
        """Of a source: what the packets of its fullest bucket take, laid end to end."""
        return max(
            (parcel.start + parcel.nbytes for parcels in self.buckets for parcel in parcels), default=0
        )

    @property
    def num_slots(self) -> int:
        """Buckets that are on their way at a time: one is packed or travels while the one before is written."""
        return min(2, len(self.buckets))


@dataclass(frozen=True)
class Address:
    """Where a trainer rank is reached.

    socket: a Unix socket on its machine; host, port: for those on other machines (None: none are).
    """

    rank: int
    socket: str
    host: str
    port: int | None


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def packet_bytes(slices: Sequence[int]) -> int:
    """Bytes of a packet of slices of so many bytes."""
    return aligned(16 + 9 * len(slices)) + sum(map(aligned, slices))


class Packet:
    """A packet's parts, as views of the bytes where it lies (uint8, at least as many as the parcel has)."""

    def __init__(self, data: torch.Tensor, parcel: Parcel) -> None:
        count = len(parcel.slices)
        self.data, self.parcel = data, parcel
        self.identity = data[:16].view(torch.int64)
        self.checksums = data[16 : 16 + 8 * count].view(torch.int64)
        self.sent = data[16 + 8 * count : 16 + 9 * count]
        self.body = aligned(16 + 9 * count)

    def place(self, item: Slice, at: int) -> torch.Tensor:
        """The slice whose bytes begin at `at`, in its own type and shape."""
        part = self.data[at : at + item.nbytes]
        return part.view(getattr(torch, item.dtype)).view(item.box.size)

    def slices(self) -> Iterator[tuple[Slice, torch.Tensor | None]]:
        """Each slice and its elements (None: it did not follow)."""
        at = self.body
        for item, sent in zip(self.parcel.slices, self.sent.tolist(), strict=True):
            yield item, self.place(item, at) if sent else None
            at += aligned(item.nbytes) if sent else 0
