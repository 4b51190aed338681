"""The unit of a weight sync: slices, packed end to end into packets, each with a checksum.

A packet holds the slices that one trainer rank reads in one bucket for the same engine ranks. All ranks that handle it know its
slices from their shares of the plan, so its bytes are numbers only:

    int64 version | int64 bucket | int64 checksum of each slice | uint8 each: 1 if the slice follows, 0 if it has not
    changed | the slices, each from a multiple of 16 bytes, row-major

A slice has the same place in its packet whether it follows or not. One that has not changed since the version that the engines hold does
not travel: its checksum does, and the engines verify the elements that they hold.

Checksums are computed where weights are packed, and again where they have arrived. On a CPU a checksum is CRC32 (by ISA-L, several times as
fast as zlib). On a GPU, where that would mean a copy to the host, it is the multilinear hash sum(word[i] * key[i]) mod 2**64 over
32-bit words, with odd keys that differ from place to place: it changes with any single word, and with the order of words. Both
depend on a tensor's elements in row-major order alone, not on its strides, so a packed slice and the same slice within a parameter
have the same checksum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from isal import isal_zlib

from megarl.layout.boxes import Box

ALIGNMENT = 16
HEADER = 16  # bytes of version and bucket
GROUP, NIXL = "group", "nixl"  # what carries messages: a process group of torch's, or NIXL
# How a source reads a slice: converted to another type; quantised to float8; or the scales of the quantised blocks, for which
# `box` counts blocks of `local`.
READINGS = CONVERT, QUANTISE, SCALE = "convert", "quantise", "scale"
PART_BYTES = 1 << 20
_KEY = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number


@cache
def itemsize(dtype: str) -> int:
    """Bytes of an element of the torch type of that name."""
    return getattr(torch, dtype).itemsize


class Slice(NamedTuple):
    """Elements of the logical tensor `tensor` that travel together: `box` of the local tensor `local` of this end.

    dtype: name of the torch type ("bfloat16") in which they travel and in which the engine holds them.
    reading: one of READINGS: how the source reads them.
    """

    tensor: str
    local: str
    box: Box
    dtype: str
    reading: str = CONVERT

    @property
    def nbytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)


class PacketSpec(NamedTuple):
    """A packet of one bucket, as a rank that packs or takes it sees it.

    source: the trainer rank that packs it. targets: the engine ranks that take it.
    holder: the trainer rank in whose slot an engine rank reads it; None: it is in a slot of this rank.
    start: its offset in that slot [bytes].
    copies: how often its source gives it away; target ranks pass it on among themselves where that is less than their number.
    """

    source: int
    targets: tuple[int, ...]
    holder: int | None
    start: int
    slices: tuple[Slice, ...]
    copies: int = 1

    @property
    def nbytes(self) -> int:
        return packet_bytes([item.nbytes for item in self.slices])


class Message(NamedTuple):
    """A packet between two members of the exchange.

    peer: the member at the other end. start, peer_start: the packet's offset in the slot here, and in the slot there [bytes].
    sizes: of its slices [bytes].
    """

    peer: int
    start: int
    peer_start: int
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return packet_bytes(self.sizes)


@dataclass(frozen=True)
class ExchangeShare:
    """One rank's part in the exchange of packets over the network, in which all trainer ranks are members.

    Where engines have devices of their own their ranks are members after these; else each trainer rank receives for the engine
    rank on its device.

    Attributes:
        member: this rank's number. size: the number of members.
        sends, receives: messages by bucket.
        behind: buckets between the one that it receives and the one that it sends at the same time: 0 for a trainer rank; 1 for
            an engine rank, which passes on what it has received.
        transport: GROUP or NIXL.
    """

    member: int
    size: int
    num_trainers: int
    sends: tuple[tuple[Message, ...], ...]
    receives: tuple[tuple[Message, ...], ...]
    behind: int = 0
    transport: str = GROUP

    @property
    def peers(self) -> frozenset[int]:
        """The members with which this one exchanges messages."""
        return frozenset(item.peer for side in (self.sends, self.receives) for of in side for item in of)

    def name(self, member: int) -> str:
        if member < self.num_trainers:
            return f"trainer rank {member}"
        return f"engine rank {member - self.num_trainers}"


@dataclass(frozen=True)
class SyncShare:
    """One rank's share of a sync: the packets that a trainer rank packs in a version, or that an engine rank takes.

    Attributes:
        buckets: the packets of each bucket.
        mapped: by bucket, the ranks at the other end of memory that is shared in it: engine ranks that read this trainer rank's
            slot, or trainer ranks whose slots this engine rank reads.
        slot_bytes: of each of this rank's own slots.
        padding: for an engine rank: parameter -> number of its elements that no slice fills.
        exchange: None: nothing that concerns this rank crosses the network.
        fp8_block: for a source: rows and columns of the blocks that it quantises (None: it quantises nothing).
        frozen: number of first buckets whose weights training does not change; an incomplete version begins after them.
        scaling: for an engine rank: scaling of the adapters in the remaining buckets (None: these hold weights).
        skip_unchanged: whether slices that have not changed are left out.
    """

    rank: int
    buckets: tuple[tuple[PacketSpec, ...], ...]
    mapped: tuple[tuple[int, ...], ...]
    slot_bytes: int
    padding: dict[str, int]
    exchange: ExchangeShare | None = None
    fp8_block: tuple[int, int] | None = None
    frozen: int = 0
    scaling: float | None = None
    skip_unchanged: bool = False

    @property
    def num_slots(self) -> int:
        """Buckets that are in flight at a time: one is packed or travels while the one before is written."""
        return min(2, len(self.buckets))

    @property
    def near(self) -> tuple[int, ...]:
        """The ranks at the other end of memory that is shared in any bucket."""
        return tuple(sorted({rank for ranks in self.mapped for rank in ranks}))


@dataclass(frozen=True)
class Address:
    """The addresses at which a trainer rank is reached.

    socket: path of a Unix socket, for engine ranks that map its slots. hub: host and port of the exchange's hub, which the first
    trainer rank has (None: this rank has none).
    """

    rank: int
    socket: str
    hub: tuple[str, int] | None = None


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def packet_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a packet whose slices have the given sizes [bytes]."""
    return header_bytes(len(sizes)) + sum(map(aligned, sizes))


def header_bytes(num_slices: int) -> int:
    """Bytes of a packet before its first slice."""
    return aligned(HEADER + 9 * num_slices)


class Packet:
    """The parts of a packet as views of its bytes (uint8)."""

    def __init__(self, data: torch.Tensor, slices: Sequence[Slice]) -> None:
        count = len(slices)
        self.data, self.slices, self.body = data, slices, header_bytes(count)
        self.identity = data[:HEADER].view(torch.int64)
        self.checksums = data[HEADER : HEADER + 8 * count].view(torch.int64)
        self.sent = data[HEADER + 8 * count : HEADER + 9 * count]

    def places(self) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Each slice and the part of the packet that is for it, in the slice's type and shape."""
        at = self.body
        for item in self.slices:
            part = self.data[at : at + item.nbytes]
            yield item, part.view(getattr(torch, item.dtype)).view(item.box.size)
            at += aligned(item.nbytes)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum: int64 [], on the tensor's device. Takes at most a few `PART_BYTES` of memory."""
    return crc32(tensor) if tensor.device.type == "cpu" else multilinear(tensor)


def crc32(tensor: torch.Tensor) -> torch.Tensor:
    found = 0
    for part in _parts(tensor):
        found = isal_zlib.crc32(part.numpy(), found)
    return torch.tensor(found)


def multilinear(tensor: torch.Tensor) -> torch.Tensor:
    """The hash over words 0, 1, ...: key[i] is the odd number ((i + 1) * 2**64 / golden ratio) | 1."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    first = 1
    for part in _parts(tensor):
        for words in _words(part).split(PART_BYTES):
            places = torch.arange(first, first + len(words), dtype=torch.int64, device=tensor.device)
            total += ((places * _KEY | 1) * words).sum()
            first += len(words)
    return total


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes in row-major order, uint8; tensors that are not contiguous give blocks of complete rows.

    The number of bytes of each block but the last is a multiple of 4.
    """
    if tensor.is_contiguous():
        yield tensor.view(-1).view(torch.uint8)
        return
    while tensor.shape[0] == 1:
        tensor = tensor[0]
    row_bytes = tensor[0].numel() * tensor.element_size()
    for block in tensor.split(max(4, PART_BYTES // row_bytes // 4 * 4)):
        yield block.contiguous().view(-1).view(torch.uint8)


def _words(part: torch.Tensor) -> torch.Tensor:
    """Bytes as 32-bit words, zeros after the last."""
    if len(part) % 4 or part.storage_offset() % 4:
        part = torch.nn.functional.pad(part, (0, -len(part) % 4)).clone()
    return part.view(torch.int32)
