"""A bucket's packets on a GPU: packed, and taken into parameters, by a number of launches that does not depend on how much is in the bucket.

Bytes and checksums are exactly as packets.py describes them, so that either end may do without these kernels. The tables that a bucket's
launches need stay on the device from version to version, as long as no tensor has moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.models.computed import ComputedWeight
from megarl.weight_sync.links import Token
from megarl.weight_sync.packets import HEADER, PacketSpec, aligned, header_bytes
from megarl.weight_sync.slice_kernels import checksums_of, read_slices, write_slices
from megarl.weight_sync.slice_table import SliceRead, SliceTable


@dataclass(frozen=True)
class Headers:
    """Where the headers of a bucket's packets lie in its slot.

    Attributes:
        versions: int64 [packets], buckets: the same, checksums: int64 [slices]: indices of int64 numbers of the slot.
        flags: int64 [slices]: indices of its bytes.
    """

    versions: torch.Tensor
    buckets: torch.Tensor
    checksums: torch.Tensor
    flags: torch.Tensor

    @staticmethod
    def of(specs: Sequence[PacketSpec], device: torch.device) -> Headers:
        versions: list[int] = []
        checksums: list[int] = []
        flags: list[int] = []
        for spec in specs:
            count, first = len(spec.slices), spec.start + HEADER
            versions.append(spec.start // 8)
            checksums += range(first // 8, first // 8 + count)
            flags += range(first + 8 * count, first + 9 * count)
        numbers = [*versions, *(at + 1 for at in versions), *checksums, *flags]
        found = torch.tensor(numbers, dtype=torch.int64).to(device)
        return Headers(*found.split([len(versions), len(versions), len(checksums), len(flags)]))


def places(specs: Sequence[PacketSpec]) -> list[int]:
    """The offsets of all slices of a bucket in its slot [bytes]."""
    found = []
    for spec in specs:
        at = spec.start + header_bytes(len(spec.slices))
        for item in spec.slices:
            found.append(at)
            at += aligned(item.nbytes)
    return found


class PackedBucket:
    """The packing of one bucket of a trainer rank."""

    def __init__(
        self, specs: Sequence[PacketSpec], fp8_block: tuple[int, int] | None, device: torch.device
    ) -> None:
        self._specs, self._block = specs, fp8_block
        self._items = [item for spec in specs for item in spec.slices]
        self._places, self._headers = places(specs), Headers.of(specs, device)
        self._table: SliceTable | None = None
        self._checksums = torch.empty(len(self._items), dtype=torch.int64, device=device)

    def pack(
        self,
        token: Token,
        parameters: Mapping[str, torch.Tensor],
        slot: torch.Tensor,
        known: Sequence[torch.Tensor | None] | None = None,
        computed: Mapping[str, ComputedWeight] | None = None,
    ) -> torch.Tensor | None:
        """Write the bucket's packets into the slot; the host waits for nothing.

        Args:
            parameters: this rank's local tensors by name, which stay where they are until the packets were sent.
            known: by packet, checksums of its slices in the version that its engine ranks hold [slices of the packet]; None, for all
                packets or for one: not known, so that all slices follow.
            computed: the weights among `parameters` that are computed where they are read.

        Returns: whether each slice follows [slices]; None: all do.
        """
        sources = computed or {}
        reads = [
            SliceRead(
                sources.get(item.local) or parameters[item.local], item.box, item.dtype, item.reading, at
            )
            for item, at in zip(self._items, self._places, strict=True)
        ]
        self._table = SliceTable.of_reads(reads, self._block, self._table)
        read_slices(self._table, slot, self._checksums)
        numbers, headers = slot.view(torch.int64), self._headers
        numbers.index_copy_(0, headers.checksums, self._checksums)
        numbers.index_fill_(0, headers.versions, token[0])
        numbers.index_fill_(0, headers.buckets, token[1])
        if known is None:
            slot.index_fill_(0, headers.flags, 1)
            return None
        follows = torch.cat(
            [
                torch.ones(len(spec.slices), dtype=torch.bool, device=slot.device)
                if before is None
                else found != before
                for spec, before, found in zip(
                    self._specs,
                    known,
                    self._checksums.split([len(spec.slices) for spec in self._specs]),
                    strict=True,
                )
            ]
        )
        slot.index_copy_(0, headers.flags, follows.to(torch.uint8))
        return follows

    @property
    def checksums(self) -> torch.Tensor:
        """Checksums of the slices that were packed last [slices]; the next version overwrites them."""
        return self._checksums


class Taken(NamedTuple):
    """The results of writing a bucket, on its device.

    Attributes:
        different: whether the version in each packet's header, the bucket in it, and each slice's checksum differ from the expected ones
            [2 * packets + slices].
        checksums: of the slices, as they were read back; expected: as they were packed [slices].
        came: whether each slice came.
    """

    different: torch.Tensor
    checksums: torch.Tensor
    expected: torch.Tensor
    came: list[bool]


class TakenBucket:
    """The writing and verifying of one bucket of an engine rank, whose packets are all in one slot."""

    def __init__(self, specs: Sequence[PacketSpec], views: Sequence[torch.Tensor]) -> None:
        """`views`: for each slice of the bucket, its place in a parameter."""
        self._views, self._places = views, places(specs)
        self._headers = Headers.of(specs, views[0].device)
        self._table = SliceTable.of_tensors(views, self._places)

    def take(self, token: Token, slot: torch.Tensor, skip_unchanged: bool) -> Taken:
        """Write the slices that came into their parameters, and read all back.

        The host waits only where unchanged slices may be left out, to learn which.
        """
        numbers, headers = slot.view(torch.int64), self._headers
        came = [True] * len(self._views)
        if skip_unchanged:
            came = [bool(flag) for flag in slot[headers.flags].tolist()]
        if all(came):
            write_slices(self._table, slot)
        elif any(came):
            moved = [index for index, follows in enumerate(came) if follows]
            views, offsets = [self._views[at] for at in moved], [self._places[at] for at in moved]
            write_slices(SliceTable.of_tensors(views, offsets), slot)
        found = checksums_of(self._table)
        expected = numbers[headers.checksums]
        different = [
            numbers[headers.versions] != token[0],
            numbers[headers.buckets] != token[1],
            found != expected,
        ]
        return Taken(torch.cat(different), found, expected, came)
