"""Both checksums are of the elements in row-major order, whatever the strides, and differ for any other elements."""

import zlib

import pytest
import torch

from megarl.weight_sync import packets as room
from megarl.weight_sync.packets import checksum, crc32, multilinear

KEY = 0x9E3779B97F4A7C15  # 2**64 / golden ratio


def values(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float8_e4m3fn:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def data(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def plain_multilinear(data):
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little", signed=True) for at in range(0, len(data), 4)]
    total = sum(((at + 1) * KEY % 2**64 | 1) * word for at, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


SLICES = [
    lambda t: t,
    lambda t: t[3:9],
    lambda t: t[:, 5:18],
    lambda t: t[1:2, 1:7],
    lambda t: t[None, :, 2:5],
    lambda t: t[4, 1:],
]


@pytest.mark.parametrize("cut", SLICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_of_the_elements_however_they_lie(dtype, cut, monkeypatch):
    monkeypatch.setattr(room, "PART_BYTES", 64)  # so that there are several parts
    part = cut(values((33, 19), dtype))
    assert int(crc32(part)) == zlib.crc32(data(part))
    assert int(multilinear(part)) == plain_multilinear(data(part))
    assert checksum(part) == crc32(part)


@pytest.mark.parametrize("function", [crc32, multilinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_flipped_bit_and_any_two_swapped_elements_are_seen(function, dtype):
    tensor = values((7, 9), dtype)
    found = {int(function(tensor))}
    changed = tensor.clone()
    raw = changed.view(-1).view(torch.uint8)
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        found.add(int(function(changed)))
        raw[bit // 8] ^= 1 << bit % 8
    assert len(found) == 1 + 8 * len(raw)
    flat = tensor.view(-1)
    for first in range(len(flat) - 1):
        swapped = flat.clone()
        swapped[[first, first + 1]] = flat[[first + 1, first]]
        assert int(function(swapped)) not in found
    assert int(function(-tensor)) not in found  # every sign at once


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none")
@pytest.mark.parametrize("cut", SLICES)
def test_a_gpu_hashes_as_a_cpu_would(cut):
    part = cut(values((33, 19), torch.bfloat16))
    assert int(checksum(cut(values((33, 19), torch.bfloat16).cuda()))) == int(multilinear(part))
