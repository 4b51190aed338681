"""Checksums of tensors: computed where weights are packed, and again from where they arrived.

On a CPU it is CRC32 (by ISA-L, several times as fast as zlib). On a GPU, where that would mean a copy to the host, it
is the multilinear hash sum(word[i] * key[i]) mod 2**64 over 32-bit words, with odd keys that differ from place to
place: it changes with any single word, and with the order of words. Both depend on a tensor's elements in row-major
order alone, not on how it lies in memory, so a packed slice and the same slice within a parameter have the same.
"""

from collections.abc import Iterator

import torch
from isal import isal_zlib

PART_BYTES = 1 << 20
_KEY = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number


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
    """The bytes in row-major order, uint8; what is not contiguous in blocks of whole rows.

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
