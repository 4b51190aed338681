"""Lists of slices, drawn at random, read, written and hashed by the kernels of a weight sync, and the same by torch on a CPU.

Bit for bit: both ends of a sync compare checksums.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from megarl.layout.boxes import Box
from megarl.models.computed import ComputedWeight, LowRankTerm
from megarl.models.float8 import FP8, dequantise, in_blocks
from megarl.weight_sync.packets import CONVERT, QUANTISE, READINGS, SCALE, aligned, multilinear
from megarl.weight_sync.quantize import read_scales, read_values
from megarl.weight_sync.slice_kernels import checksums_of, read_slices, write_slices
from megarl.weight_sync.slice_table import SliceRead, SliceTable

BLOCK = (8, 36)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (FP8, torch.uint8, torch.int64)
GUARD = 7  # bytes of a slot that no slice fills

Pair = tuple[str, torch.Tensor, torch.Tensor]
"""A name, the result of the kernels, and the right one."""


class Listed(NamedTuple):
    """Slices, and for each the tensor that travels (on a CPU)."""

    reads: list[SliceRead]
    expected: list[torch.Tensor]

    @property
    def end(self) -> int:
        """The end of the last slice in the slot [bytes]."""
        return max((read.offset + part.nbytes for read, part in zip(*self, strict=True)), default=0)


def drawn(seed: int, device: str, times: int = 1) -> Listed:
    """Up to 8 slices, with gaps between some.

    Args:
        times: how often larger than a few hundred elements they are in their last dimension.
    """
    rng, listed, at = random.Random(seed), Listed([], []), 0
    for _ in range(rng.randint(1, 8)):
        one, expected = _slice(rng, device, times)
        listed.reads.append(one._replace(offset=at))
        listed.expected.append(expected)
        at = aligned(at + expected.nbytes) + 16 * rng.randrange(2)
    return listed


def _slice(rng: random.Random, device: str, times: int) -> tuple[SliceRead, torch.Tensor]:
    reading = rng.choice(READINGS)
    dims = rng.randint(1 if reading == CONVERT else 2, 3)
    last = rng.choice([rng.randint(1, 8), rng.randint(20, 70), rng.randint(100, 400) * times])
    shape = [rng.randint(1, 20 if dims == 2 else 5) for _ in range(dims - 1)] + [last]
    dtype = rng.choice(FLOATS + (OTHERS if reading == CONVERT else ()))
    shape = shape[-2:] if dtype.itemsize > 4 else shape  # a number of two words has a dimension more
    on_host, view = _values(rng, shape, dtype)
    source, parameter = view(on_host), view(on_host.to(device))
    if reading == SCALE:
        box = _box(rng, (*source.shape[:-2], *in_blocks(source.shape[-2:], BLOCK)))
    else:
        box = _box(rng, source.shape)
    out = {CONVERT: rng.choice(FLOATS) if dtype in FLOATS else dtype, QUANTISE: FP8, SCALE: torch.float32}[
        reading
    ]
    one = SliceRead(parameter, box, str(out).removeprefix("torch."), reading, 0)
    return one, by_torch(one._replace(source=source), BLOCK)


def drawn_computed(seed: int, device: str) -> Listed:
    """Up to 6 slices, most of them of computed weights: in float8, with adapters, or both."""
    rng, listed, at = random.Random(seed), Listed([], []), 0
    for _ in range(rng.randint(1, 6)):
        dtype, (rows, columns) = (
            rng.choice(FLOATS),
            (rng.randint(1, 40), rng.choice((rng.randint(1, 90), 300))),
        )
        on_host = _weight(rng, rows, columns, dtype)
        reading = rng.choice(READINGS)
        box = _box(rng, in_blocks((rows, columns), BLOCK) if reading == SCALE else (rows, columns))
        out = {CONVERT: rng.choice(FLOATS), QUANTISE: FP8, SCALE: torch.float32}[reading]
        one = SliceRead(on_host, box, str(out).removeprefix("torch."), reading, at)
        listed.expected.append(by_torch(one, BLOCK))
        listed.reads.append(one._replace(source=_to(on_host, device)))
        at = aligned(at + listed.expected[-1].nbytes)
    return listed


def _weight(rng: random.Random, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor | ComputedWeight:
    """One time in four a tensor, else a computed weight.

    Sums of adapters' products are exact, so that their order, which is the hardware's, does not matter.
    """
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    values, scales, block = torch.randn(rows, columns, generator=generator).to(dtype), None, None
    kind = rng.choice(("tensor", "float8", "adapters", "both"))
    if kind == "tensor":
        return values
    if kind in ("float8", "both"):
        block = rng.choice((BLOCK, (4, 4), (128, 128)))
        scales = torch.rand(in_blocks((rows, columns), block), generator=generator) + 0.01
        codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
        values = torch.where(codes & 0x7F == 0x7F, 0, codes).view(FP8)
    if kind == "float8":
        return ComputedWeight(values, scales, block, dtype, None)
    rank, parts = rng.choice((1, 4, 16, 33)), rng.randint(1, 3)
    adapted = torch.rand(rows, generator=generator) < rng.choice((0.5, 1.1))
    part = torch.randint(0, parts, (rows,), generator=generator, dtype=torch.int32)
    order = adapted.cumsum(0, dtype=torch.int32) - 1
    a, b = (
        torch.randint(-4, 5, size, generator=generator).to(dtype) / 8
        for size in ((parts * rank, columns), (max(1, int(adapted.sum())), rank))
    )
    magnitudes = torch.rand(rows, generator=generator).to(dtype) if rng.random() < 0.3 else None
    places = torch.where(adapted, order + (part << 24), -1)
    term = LowRankTerm(a, b, places, parts, rng.choice((0.25, 1.7)), magnitudes)
    return ComputedWeight(values, scales, block, dtype, term)


def _to(source: torch.Tensor | ComputedWeight, device: str) -> torch.Tensor | ComputedWeight:
    """The same on another device, tensors among the fields included."""
    if isinstance(source, torch.Tensor):
        return source.to(device)

    def moved(one: ComputedWeight | LowRankTerm) -> dict[str, torch.Tensor]:
        return {
            name: value.to(device) for name, value in vars(one).items() if isinstance(value, torch.Tensor)
        }

    term = None if source.term is None else replace(source.term, **moved(source.term))
    return replace(source, **moved(source), term=term)


def weight_by_torch(weight: ComputedWeight) -> torch.Tensor:
    """A computed weight, on a CPU, as `exact_weight` and `LayerAdapters.merged` make it."""
    found = weight.values.clone()
    if weight.scales is not None:
        assert weight.block is not None
        found = dequantise(weight.values, weight.scales, weight.block, weight.dtype)
    term = weight.term
    if term is None:
        return found
    rank = term.b.shape[1]
    for part in range(term.parts):
        rows = (term.rows >= 0) & (term.rows >> 24 == part)
        product = term.b[term.rows[rows] & 0xFFFFFF] @ term.a[part * rank : (part + 1) * rank]
        found[rows] += product.mul_(term.factor)
    return found if term.magnitudes is None else found.mul_(term.magnitudes[:, None])


def by_torch(one: SliceRead, block: tuple[int, int]) -> torch.Tensor:
    """The tensor that travels for a slice."""
    if isinstance(one.source, ComputedWeight):
        one = one._replace(source=weight_by_torch(one.source))
    out = torch.empty(one.box.size, dtype=getattr(torch, one.dtype))
    if one.reading == CONVERT:
        return out.copy_(one.source[one.box.slices])
    read = read_values if one.reading == QUANTISE else read_scales
    if one.source.dim() == 2:
        read(one.source, one.box, block, out)
    else:
        for index, part in enumerate(out, one.box.start[0]):
            read(one.source[index], Box(one.box.start[1:], one.box.size[1:]), block, part)
    return out


def _values(
    rng: random.Random, shape: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A contiguous tensor, and the view of it that is a parameter."""
    steps = [1 if rng.random() < 0.8 else 2 for _ in shape]
    before = [rng.randrange(4) if rng.random() < 0.5 else 0 for _ in shape]
    extents = [first + step * size for first, step, size in zip(before, steps, shape, strict=True)]
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    if dtype in FLOATS:
        # float16 has no larger ones; the smallest bring its steps near 0.
        values = torch.randn(extents, generator=generator) * 10 ** rng.uniform(-6, 4)
        values *= torch.rand(extents, generator=generator) > 0.1
        values = values.to(dtype)
    else:
        values = torch.randint(0, 256, [*extents, dtype.itemsize], generator=generator, dtype=torch.uint8)
        values = values.view(dtype).squeeze(-1)
    order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.2 else range(len(shape))
    cuts = tuple(slice(first, None, step) for first, step in zip(before, steps, strict=True))
    return values, lambda tensor: tensor[cuts].permute(*order)


def _box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    if rng.random() < 0.3:
        return Box.whole(tuple(shape))
    start = tuple(rng.randrange(extent) for extent in shape)
    return Box(
        start, tuple(rng.randint(1, extent - first) for extent, first in zip(shape, start, strict=True))
    )


def compared(listed: Listed, device: str) -> Iterator[Pair]:
    """Read a list into a slot, write it from there into other parameters, and hash it in these."""
    slot = torch.full((aligned(listed.end) + 16,), GUARD, dtype=torch.uint8, device=device)
    checksums = torch.full((len(listed.reads),), GUARD, dtype=torch.int64, device=device)
    read_slices(SliceTable.of_reads(listed.reads, BLOCK), slot, checksums)
    yield from compared_reads(listed, slot, checksums)

    tensors = [torch.zeros([size + 3 for size in part.shape], dtype=part.dtype) for part in listed.expected]
    found = [tensor.to(device) for tensor in tensors]
    places = [tuple(slice(1, 1 + size) for size in part.shape) for part in listed.expected]
    views = [tensor[place] for tensor, place in zip(found, places, strict=True)]
    for tensor, place, part in zip(tensors, places, listed.expected, strict=True):
        tensor[place] = part
    table = SliceTable.of_tensors(views, [read.offset for read in listed.reads])
    write_slices(table, slot)
    yield "parameters", _all_bytes(found), _all_bytes(tensors)
    yield "checksums of parameters", two_numbers(checksums_of(table)), two_numbers(_sums(listed))


def compared_reads(listed: Listed, slot: torch.Tensor, checksums: torch.Tensor) -> Iterator[Pair]:
    expected = torch.full((len(slot),), GUARD, dtype=torch.uint8)
    for read, part in zip(*listed, strict=True):
        expected[read.offset : read.offset + part.nbytes] = _bytes(part)
    yield "slot", slot, expected
    yield "checksums", two_numbers(checksums), two_numbers(_sums(listed))


def two_numbers(checksums: torch.Tensor) -> torch.Tensor:
    """64 bits as two numbers that float64 has exactly."""
    return torch.stack([checksums >> 32, checksums & 0xFFFFFFFF], -1).double()


def _sums(listed: Listed) -> torch.Tensor:
    sums = [multilinear(part) for part in listed.expected]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


def _all_bytes(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(_bytes(tensor).cpu() for tensor in tensors)])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
