"""The unit of a weight sync: slices, packed end to end into packets, each with a checksum.

A packet is the message of one trainer rank to one engine rank in one bucket. Both ends know its slices from their shares of the
plan, so its bytes are numbers only:

    int64 version | int64 bucket | int64 checksum of each slice | uint8 each: 1 if the slice follows, 0 if it has not
    changed | the slices that follow, each from a multiple of 16 bytes, row-major

A slice that has not changed since the version that the engine holds does not follow. Its checksum does, and the engine verifies
the elements that it holds.

Checksums are computed where weights are packed, and again from where they arrived. On a CPU it is CRC32 (by ISA-L, several times as
fast as zlib). On a GPU, where that would mean a copy to the host, it is the multilinear hash sum(word[i] * key[i]) mod 2**64 over
32-bit words, with odd keys that differ from place to place: it changes with any single word, and with the order of words. Both
depend on a tensor's elements in row-major order alone, not on its strides, so a packed slice and the same slice within a parameter
have the same checksum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from isal import isal_zlib

from megarl.layout.boxes import Box

ALIGNMENT = 16
SHARED, IPC, P2P = "shared_memory", "cuda_ipc", "p2p"
TRANSPORTS = (SHARED, IPC, P2P)
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
    """The contents of a packet, as one of its ends sees them: its slices.

    peer: the rank at the other end. start: offset of the packet in the source's slot [bytes].
    """

    peer: int
    start: int
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """Size of the packet if all of its slices follow."""
        return packet_bytes([item.nbytes for item in self.slices])


@dataclass(frozen=True)
class SyncShare:
    """One rank's share of a sync: the packets that a trainer rank sends in a version, or that an engine rank takes.

    Attributes:
        transports: the rank at the other end -> one of TRANSPORTS, for each rank with which it exchanges packets.
        buckets: the packets of each bucket, by peer.
        padding: for an engine rank: parameter -> number of its elements that no slice fills.
        fp8_block: for a source: rows and columns of the blocks that it quantises (None: it quantises nothing).
        frozen: number of first buckets whose weights training does not change; an incomplete version begins after them.
        scaling: for an engine rank: scaling of the adapters in the remaining buckets (None: these hold weights).
    """

    rank: int
    transports: dict[int, str]
    buckets: tuple[tuple[PacketSpec, ...], ...]
    padding: dict[str, int]
    fp8_block: tuple[int, int] | None = None
    frozen: int = 0
    scaling: float | None = None

    @cached_property
    def slot_bytes(self) -> int:
        """For a source: bytes of the packets of its fullest bucket, laid end to end."""
        return max((spec.start + spec.nbytes for specs in self.buckets for spec in specs), default=0)

    @property
    def num_slots(self) -> int:
        """Buckets that are in flight at a time: one is packed or travels while the one before is written."""
        return min(2, len(self.buckets))


@dataclass(frozen=True)
class Address:
    """The addresses at which engine ranks reach a trainer rank.

    socket: path of a Unix socket, for engine ranks on its machine; host, port: for engine ranks on other machines (None: there are
    none).
    """

    rank: int
    socket: str
    host: str
    port: int | None


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def packet_bytes(slices: Sequence[int]) -> int:
    """Bytes of a packet whose slices have the given sizes [bytes]."""
    return aligned(16 + 9 * len(slices)) + sum(map(aligned, slices))


class Packet:
    """The parts of a packet as views of its bytes (uint8, at least `spec.nbytes` of them)."""

    def __init__(self, data: torch.Tensor, spec: PacketSpec) -> None:
        count = len(spec.slices)
        self.data, self.spec = data, spec
        self.identity = data[:16].view(torch.int64)
        self.checksums = data[16 : 16 + 8 * count].view(torch.int64)
        self.sent = data[16 + 8 * count : 16 + 9 * count]
        self.body = aligned(16 + 9 * count)

    def place(self, item: Slice, at: int) -> torch.Tensor:
        """The slice whose bytes begin at offset `at`, in its own type and shape."""
        part = self.data[at : at + item.nbytes]
        return part.view(getattr(torch, item.dtype)).view(item.box.size)

    def slices(self) -> Iterator[tuple[Slice, torch.Tensor | None]]:
        """Each slice and its elements (None: it did not follow)."""
        at = self.body
        for item, sent in zip(self.spec.slices, self.sent.tolist(), strict=True):
            yield item, self.place(item, at) if sent else None
            at += aligned(item.nbytes) if sent else 0


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
    """The bytes in row-major order, uint8; of tensors that are not contiguous in blocks of complete rows.

    A block's bytes are a multiple of 4, the last one's excepted.
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
