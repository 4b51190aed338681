"""Packets: the bytes of a list of copies, laid end to end, each with its checksum."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.layout import Copy


@dataclass(frozen=True)
class Packet:
    """`data`: uint8, the copies' elements in order, each box row-major; `crc32`: uint32, one a copy."""

    data: np.ndarray
    crc32: np.ndarray


def copy_bytes(copy: Copy, dtype: torch.dtype) -> int:
    return copy.box.numel * dtype.itemsize


def pack(copies: Sequence[Copy], parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Packet:
    """Read the copies' sources, converted to `dtype`, into one packet in host memory."""
    data = torch.empty(sum(copy_bytes(copy, dtype) for copy in copies), dtype=torch.uint8)
    crc32 = np.empty(len(copies), dtype=np.uint32)
    at = 0
    for index, copy in enumerate(copies):
        part = data[at : at + copy_bytes(copy, dtype)]
        source = parameters[copy.source_local][copy.source_box.slices]
        part.view(dtype).view(source.shape).copy_(source)
        crc32[index] = zlib.crc32(part.numpy())
        at += part.numel()
    return Packet(data.numpy(), crc32)


def unpack(
    packet: Packet, copies: Sequence[Copy], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Write a packet's slices into their targets, each checked against its checksum first.

    Raises:
        ValueError: a slice's bytes are not those that were packed; names the tensor and the source rank.
    """
    at = 0
    for copy, crc32 in zip(copies, packet.crc32, strict=True):
        part = packet.data[at : at + copy_bytes(copy, dtype)]
        if zlib.crc32(part) != int(crc32):
            raise ValueError(f"{copy.tensor} from rank {copy.source_rank} arrived damaged: checksum differs")
        values = torch.from_numpy(np.array(part)).view(dtype).view(copy.target_box.size)
        tensors[copy.target_local][copy.target_box.slices].copy_(values)
        at += part.nbytes
