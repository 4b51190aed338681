"""Bundles: the bytes of a list of copies in host memory, laid end to end, each with its checksum."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.layout import Copy
from megarl.weight_sync.packets import crc32


@dataclass(frozen=True)
class Bundle:
    """`data`: uint8, the copies' elements in order, each box row-major; `checksums`: int64, the CRC32 of each copy."""

    data: np.ndarray
    checksums: np.ndarray


def pack(
    copies: Sequence[Copy],
    parameters: Mapping[str, torch.Tensor],
    dtype_of: Callable[[str], torch.dtype],
) -> Bundle:
    """Read the copies' sources, each converted to the type of its logical tensor, into one bundle in host memory."""
    dtypes = [dtype_of(copy.tensor) for copy in copies]
    sizes = [copy.box.numel * dtype.itemsize for copy, dtype in zip(copies, dtypes, strict=True)]
    data = torch.empty(sum(sizes), dtype=torch.uint8)
    checksums = np.empty(len(copies), dtype=np.int64)
    at = 0
    for index, (copy, dtype, size) in enumerate(zip(copies, dtypes, sizes, strict=True)):
        part = data[at : at + size]
        source = parameters[copy.source_local][copy.source_box.slices].to(dtype)
        part.copy_(source.flatten().view(torch.uint8))  # as bytes: four-byte elements may begin anywhere here
        checksums[index] = crc32(part)
        at += part.numel()
    return Bundle(data.numpy(), checksums)


def unpack(bundle: Bundle, copies: Sequence[Copy], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a bundle's slices into their targets, of the types that were packed, each checked first.

    Raises:
        ValueError: a slice's bytes are not those that were packed; names the tensor and the source rank.
    """
    at = 0
    for copy, expected in zip(copies, bundle.checksums, strict=True):
        target = tensors[copy.target_local][copy.target_box.slices]
        part = torch.from_numpy(np.array(bundle.data[at : at + target.nbytes]))
        if crc32(part) != expected:
            raise ValueError(f"{copy.tensor} from rank {copy.source_rank} arrived damaged: checksum differs")
        target.copy_(part.view(target.dtype).view(target.shape))
        at += part.nbytes
