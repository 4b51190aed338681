"""Lists of slices as tables of numbers on a GPU, for the kernels of `slice_kernels`.

A table comes to the device by one copy from page-locked memory, for which the host does not wait. It is used again for a version whose
slices lie where they lay (`previous`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.layout.boxes import Box
from megarl.models.float8 import FP8, Block, in_blocks
from megarl.weight_sync.packets import ALIGNMENT, CONVERT, QUANTISE, SCALE

TILE = 2048  # elements that a program copies
# How elements are read and written. The first three are logarithms of sizes [bytes], for elements whose bits do not change.
BYTE, HALF, WORD, FLOAT32, BFLOAT16, FLOAT16 = range(6)
FLOATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class SliceRead(NamedTuple):
    """A slice to read.

    source: the parameter, of 1 to 3 dimensions and any strides.
    box: of the source; for SCALE the last two dimensions count blocks.
    dtype: name of the torch type in which the slice travels.
    reading: one of READINGS (packets.py).
    offset: of the slice in the slot [bytes], a multiple of 16.
    """

    source: torch.Tensor
    box: Box
    dtype: str
    reading: str
    offset: int


class CopyRow(NamedTuple):
    """A slice for the kernel `copy_slices`, of dimensions 0, 1 and 2: a part of a parameter at an address, packed in a slot."""

    address: int
    offset: int  # in the slot
    kind: int  # of the parameter's elements
    kind_out: int  # of the packed ones
    size_bits: int  # logarithm of a packed element's size
    size_1: int
    size_2: int
    stride_0: int
    stride_1: int
    stride_2: int
    width_bits: int  # logarithm of the columns of a tile
    number: int  # of the slice
    first_tile: int


class BlockRow(NamedTuple):
    """A slice of quantised weights, or of their scales, for the kernel `read_blocks`."""

    address: int
    offset: int  # in the slot
    kind: int  # of the parameter's elements
    is_scale: int
    stride_0: int
    stride_1: int
    stride_2: int
    extent_1: int  # of the parameter
    extent_2: int
    start_1: int  # of the box
    start_2: int
    size_1: int
    size_2: int
    block_1: int  # the first block that the box touches
    block_2: int
    down: int  # blocks that it touches
    across: int
    number: int  # of the slice
    first_tile: int


@dataclass(frozen=True)
class SliceTable:
    """What launches have to know of a list of slices, on their device.

    Attributes:
        place: addresses, strides and all else that the table was made from.
        count: number of slices.
        end: of the last slice in the slot [bytes].
        block: rows and columns of the blocks of quantised slices.
        copies: int64 [slices that are copied or converted, fields of `CopyRow`]; copy_tiles: int64 [tiles]: the row of each.
        blocks: int64 [slices that are quantised, fields of `BlockRow`]; block_tiles: int64 [blocks]: the row of each.
    """

    place: tuple
    count: int
    end: int
    block: Block
    copies: torch.Tensor
    copy_tiles: torch.Tensor
    blocks: torch.Tensor
    block_tiles: torch.Tensor

    @staticmethod
    def of_reads(
        reads: Sequence[SliceRead], block: Block | None = None, previous: SliceTable | None = None
    ) -> SliceTable:
        """For `read_slices`.

        Args:
            block: rows and columns of the blocks of quantised weights.
            previous: a table that is returned if it is of the same slices, at the same addresses.
        """
        place = (block, *((*_place_of(read.source), *read[1:]) for read in reads))
        if previous is not None and previous.place == place:
            return previous
        copies, blocks, end = [], [], 0
        for index, read in enumerate(reads):
            assert read.offset % ALIGNMENT == 0, read
            if read.reading == CONVERT:
                part, dtype = read.source[read.box.slices], getattr(torch, read.dtype)
                assert part.shape == read.box.size, (read.box, read.source.shape)
                copies.append(_copy_row(part, dtype, read.offset, index))
                nbytes = read.box.numel * dtype.itemsize
            else:
                assert block is not None, "slices that are quantised have a size of blocks"
                blocks.append(_block_row(read, block, index))
                nbytes = read.box.numel * (4 if read.reading == SCALE else 1)
            end = max(end, read.offset + nbytes)
        device = reads[0].source.device if reads else torch.device("cpu")
        return _make(place, device, len(reads), end, block or (1, 1), copies, blocks)

    @staticmethod
    def of_tensors(
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int] | None = None,
        previous: SliceTable | None = None,
    ) -> SliceTable:
        """For `checksums_of` and, with the offsets of the slices in the slot [bytes], for `write_slices`.

        Args:
            tensors: views of the places in parameters, of 1 to 3 dimensions and any strides.
            previous: a table that is returned if it is of the same slices, at the same addresses.
        """
        at = [0] * len(tensors) if offsets is None else offsets
        place = (offsets is None, *((*_place_of(t), offset) for t, offset in zip(tensors, at, strict=True)))
        if previous is not None and previous.place == place:
            return previous
        assert all(offset % ALIGNMENT == 0 for offset in at), at
        copies = [_copy_row(t, t.dtype, at[index], index) for index, t in enumerate(tensors)]
        end = (
            0 if offsets is None else max((o + t.nbytes for t, o in zip(tensors, at, strict=True)), default=0)
        )
        device = tensors[0].device if tensors else torch.device("cpu")
        return _make(place, device, len(tensors), end, (1, 1), copies, [])


def _make(
    place: tuple,
    device: torch.device,
    count: int,
    end: int,
    block: Block,
    copies: list[tuple[CopyRow, int]],
    blocks: list[tuple[BlockRow, int]],
) -> SliceTable:
    """Bring the rows to the device. Each comes with its number of tiles, and without its first tile."""
    parts: list[torch.Tensor] = []
    for kind, rows in ((CopyRow, copies), (BlockRow, blocks)):
        tiles = torch.tensor([number for _, number in rows], dtype=torch.int64)
        first = tiles.cumsum(0) - tiles
        table = torch.tensor([row[:-1] for row, _ in rows], dtype=torch.int64)
        table = table.view(len(rows), len(kind._fields) - 1)
        parts += [torch.cat([table, first[:, None]], 1), torch.arange(len(rows)).repeat_interleave(tiles)]
    packed = torch.cat([part.view(-1) for part in parts])
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    on_device = packed.split([part.numel() for part in parts])
    shaped = (found.view(part.shape) for found, part in zip(on_device, parts, strict=True))
    return SliceTable(place, count, end, block, *shaped)


def _place_of(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _copy_row(part: torch.Tensor, dtype: torch.dtype, offset: int, index: int) -> tuple[CopyRow, int]:
    """A slice and the number of its tiles."""
    dims = _merged(part)
    address = part.data_ptr()
    if part.dtype == dtype:
        size = part.element_size()
        if size > 4:  # two words or more
            dims = _merged_dims([*((n, stride * size // 4) for n, stride in dims), (size // 4, 1)])
            size = 4
        # As large elements as all of its addresses allow: fewer to load, to store and to hash.
        while size < 4 and _can_widen(dims, address, size):
            dims = [*((n, stride // 2) for n, stride in dims[:-1]), (dims[-1][0] // 2, 1)]
            size *= 2
        kind = kind_out = size_bits = size.bit_length() - 1
    else:
        assert part.dtype in FLOATS and dtype in FLOATS, f"{part.dtype} is not converted to {dtype}"
        kind, kind_out = FLOATS[part.dtype], FLOATS[dtype]
        size_bits = dtype.itemsize.bit_length() - 1
    assert len(dims) <= 3, f"slices have 1 to 3 dimensions: {tuple(part.shape)}"
    dims = [(1, 0)] * (3 - len(dims)) + dims
    (size_0, stride_0), (size_1, stride_1), (size_2, stride_2) = dims
    width_bits = _width_bits(dims)
    width, height = 1 << width_bits, TILE >> width_bits
    row = CopyRow(
        address=address,
        offset=offset,
        kind=kind,
        kind_out=kind_out,
        size_bits=size_bits,
        size_1=size_1,
        size_2=size_2,
        stride_0=stride_0,
        stride_1=stride_1,
        stride_2=stride_2,
        width_bits=width_bits,
        number=index,
        first_tile=0,
    )
    return row, size_0 * -(-size_1 // height) * -(-size_2 // width)


def _merged(part: torch.Tensor) -> list[tuple[int, int]]:
    return _merged_dims(list(zip(part.shape, part.stride(), strict=True)))


def _merged_dims(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions that are left when those that follow each other in memory are one."""
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged or [(1, 1)]


def _can_widen(dims: list[tuple[int, int]], address: int, size: int) -> bool:
    (last, stride), outer = dims[-1], dims[:-1]
    even = last % 2 == 0 and all(step % 2 == 0 for _, step in outer)
    return stride == 1 and even and address % (2 * size) == 0


def _width_bits(dims: list[tuple[int, int]]) -> int:
    """Of the tiles of which fewest elements lie outside a slice, the widest; rows of 32 elements are read at once.

    Args:
        dims: (size, stride) of the slice's three dimensions.
    """
    (rows, _), (columns, _) = dims[1:]
    narrowest = power_of_two(min(columns, 32)).bit_length() - 1

    def lanes(bits: int) -> int:
        width, height = 1 << bits, TILE >> bits
        return -(-rows // height) * height * (-(-columns // width) * width)

    fitting = (bits for bits in range(narrowest, TILE.bit_length()) if _spans(dims, TILE >> bits, 1 << bits))
    return min(sorted(fitting, reverse=True), key=lanes)


def _spans(dims: list[tuple[int, int]], height: int, width: int) -> bool:
    """Whether offsets within tiles of these sizes are int32, in a parameter and packed."""
    (_, stride_1), (columns, stride_2) = dims[1:]
    return (height - 1) * max(abs(stride_1), columns) + (width - 1) * abs(stride_2) < 1 << 31


def _block_row(read: SliceRead, block: Block, index: int) -> tuple[BlockRow, int]:
    """A slice that is quantised, or scales, and the number of its blocks."""
    source, box = read.source, read.box
    assert read.reading in (QUANTISE, SCALE) and source.dim() in (2, 3), read
    is_scale = read.reading == SCALE
    assert read.dtype == str(torch.float32 if is_scale else FP8).removeprefix("torch."), read
    extra = (0,) * (3 - source.dim())
    start, size = extra + box.start, (1,) * len(extra) + box.size
    strides, extents = extra + source.stride(), source.shape[-2:]
    (row, column), (rows, columns) = start[1:], size[1:]
    if is_scale:
        first, number = (row, column), (rows, columns)
        within = zip(first, number, in_blocks(extents, block), strict=True)
    else:
        first = row // block[0], column // block[1]
        number = -(-(row + rows) // block[0]) - first[0], -(-(column + columns) // block[1]) - first[1]
        within = zip((row, column), (rows, columns), extents, strict=True)
    assert all(begin + count <= extent for begin, count, extent in within), (box, source.shape)
    assert _spans([(1, 0), (rows, strides[1]), (columns, strides[2])], *block), (source.shape, strides)
    found = BlockRow(
        address=source.data_ptr() + start[0] * strides[0] * source.element_size(),
        offset=read.offset,
        kind=FLOATS[source.dtype],
        is_scale=int(is_scale),
        stride_0=strides[0],
        stride_1=strides[1],
        stride_2=strides[2],
        extent_1=extents[0],
        extent_2=extents[1],
        start_1=row,
        start_2=column,
        size_1=rows,
        size_2=columns,
        block_1=first[0],
        block_2=first[1],
        down=number[0],
        across=number[1],
        number=index,
        first_tile=0,
    )
    return found, size[0] * number[0] * number[1]


def power_of_two(number: int) -> int:
    """The smallest one that is no less."""
    return 1 << max(0, number - 1).bit_length()
