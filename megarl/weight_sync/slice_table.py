"""Lists of slices as tables of numbers on a GPU, for the kernels of `slice_kernels`.

A table comes to the device by one copy from page-locked memory, for which the host does not wait. It is used again for a version whose
slices are at the same addresses (`previous`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.layout.boxes import Box
from megarl.models.computed import ComputedWeight
from megarl.models.float8 import FP8, Block, in_blocks
from megarl.weight_sync.packets import ALIGNMENT, CONVERT, QUANTISE, SCALE

TILE = 2048  # elements that a program copies
# How elements are read and written. The first three are logarithms of sizes [bytes], for elements whose bits do not change.
BYTE, HALF, WORD, FLOAT32, BFLOAT16, FLOAT16 = range(6)
SCALES_OUT, QUANTISED_OUT = -1, -2  # in place of a kind: scales of blocks, float8 values
BLOCK_TILE = (128, 128)  # of a computed weight that a program has at a time, where nothing is quantised
FLOATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class SliceRead(NamedTuple):
    """A slice to read.

    source: the parameter, of 1 to 3 dimensions and any strides; or what a weight is computed from.
    box: of the source; for SCALE the last two dimensions count blocks.
    dtype: name of the torch type in which the slice travels.
    reading: one of READINGS (packets.py).
    offset: of the slice in the slot [bytes], a multiple of 16.
    """

    source: torch.Tensor | ComputedWeight
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
    """A slice of quantised weights, of their scales, or of a computed weight, for the kernel `read_blocks`."""

    address: int
    offset: int  # in the slot
    kind: int  # of the weight's elements; of a computed weight, the type that they are rounded to
    kind_out: int  # of the packed elements, or SCALES_OUT, QUANTISED_OUT
    size_bits: int  # logarithm of a packed element's size
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
    # Of a computed weight; addresses are 0 where it has no such tensor.
    scales: int
    scale_rows: int  # of a block that has a scale
    scale_columns: int
    a: int
    b: int
    b_rows: int
    parts: int
    rank: int
    factor: int  # the bits of a float32
    magnitudes: int
    first_tile: int


class Computing(NamedTuple):
    """Properties of a table's computed weights for which their kernel is compiled.

    rank: the highest of their adapters, 0 without any.
    exact: whether products need float32: some are of float32 numbers.
    """

    rank: int
    exact: bool


@dataclass(frozen=True)
class SliceTable:
    """The numbers of a list of slices that launches need, on the slices' device.

    Attributes:
        place: addresses, strides and all else that a table of reads was made from.
        count: number of slices.
        end: of the last slice in the slot [bytes].
        block: rows and columns of the blocks of quantised slices, in which computed weights are read, too.
        computing: None: no weight is computed.
        copies: int64 [slices that are copied or converted, fields of `CopyRow`]; copy_tiles: int64 [tiles]: the row of each.
        blocks: int64 [slices that are quantised or computed, fields of `BlockRow`]; block_tiles: int64 [blocks]: the row of each.
    """

    place: tuple
    count: int
    end: int
    block: Block
    computing: Computing | None
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
        computed = [read.source for read in reads if isinstance(read.source, ComputedWeight)]
        tile = block or (BLOCK_TILE if computed else (1, 1))
        for index, read in enumerate(reads):
            assert read.offset % ALIGNMENT == 0, read
            dtype = getattr(torch, read.dtype)
            if read.reading != CONVERT or isinstance(read.source, ComputedWeight):
                assert block is not None or read.reading == CONVERT, "slices that are quantised have blocks"
                blocks.append(_block_row(read, tile, index))
            else:
                part = read.source[read.box.slices]
                assert part.shape == read.box.size, (read.box, read.source.shape)
                copies.append(_copy_row(part, dtype, read.offset, index))
            end = max(end, read.offset + read.box.numel * dtype.itemsize)
        device = torch.device("cpu")
        if reads:
            first = reads[0].source
            device = (first.values if isinstance(first, ComputedWeight) else first).device
        return _make(place, device, len(reads), end, tile, copies, blocks, _computing(computed))

    @staticmethod
    def of_tensors(tensors: Sequence[torch.Tensor], offsets: Sequence[int] | None = None) -> SliceTable:
        """For `checksums_of` and, with the offsets of the slices in the slot [bytes], for `write_slices`.

        Args:
            tensors: views of the places in parameters, of 1 to 3 dimensions and any strides.
        """
        at = [0] * len(tensors) if offsets is None else offsets
        assert all(offset % ALIGNMENT == 0 for offset in at), at
        copies = [_copy_row(t, t.dtype, at[index], index) for index, t in enumerate(tensors)]
        end = (
            0 if offsets is None else max((o + t.nbytes for t, o in zip(tensors, at, strict=True)), default=0)
        )
        device = tensors[0].device if tensors else torch.device("cpu")
        return _make((), device, len(tensors), end, (1, 1), copies, [], None)


def _make(
    place: tuple,
    device: torch.device,
    count: int,
    end: int,
    block: Block,
    copies: list[tuple[CopyRow, int]],
    blocks: list[tuple[BlockRow, int]],
    computing: Computing | None,
) -> SliceTable:
    """Bring the rows to the device. Each row comes with its number of tiles, and without its first tile."""
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
    return SliceTable(place, count, end, block, computing, *shaped)


def _place_of(source: torch.Tensor | ComputedWeight) -> tuple:
    if isinstance(source, torch.Tensor):
        return source.data_ptr(), source.dtype, source.shape, source.stride()
    term = source.term
    tensors = [source.values, source.scales]
    tensors += [] if term is None else [term.a, term.b, term.rows, term.magnitudes]
    others = None if term is None else (term.parts, term.factor)
    return source.dtype, source.block, others, *(None if t is None else _place_of(t) for t in tensors)


def _computing(weights: Sequence[ComputedWeight]) -> Computing | None:
    if not weights:
        return None
    terms = [weight.term for weight in weights if weight.term is not None]
    rank = max((term.b.shape[1] for term in terms), default=0)
    return Computing(rank, any(term.a.dtype == torch.float32 for term in terms))


def _copy_row(part: torch.Tensor, dtype: torch.dtype, offset: int, index: int) -> tuple[CopyRow, int]:
    """A slice's row and the number of its tiles."""
    dims = _merged(part)
    address = part.data_ptr()
    if part.dtype == dtype:
        size = part.element_size()
        if size > 4:  # two words or more
            dims = _merged_dims([*((n, stride * size // 4) for n, stride in dims), (size // 4, 1)])
            size = 4
        # Elements as large as all of its addresses allow: then fewer are loaded, stored and hashed.
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
    """(size, stride) of the dimensions after dimensions that follow each other in memory were merged."""
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
    """The logarithm of a tile's width: the widest that leaves fewest elements outside the slice; rows of 32 elements are read at once.

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
    """The row of a quantised slice, of scales or of a part of a computed weight, and the number of its blocks."""
    source, box, computed = read.source, read.box, {**_NOT_COMPUTED}
    values, kind_out, size_bits = source, QUANTISED_OUT, 0
    if isinstance(source, ComputedWeight):
        values, computed = source.values, _computed_columns(source)
    assert isinstance(values, torch.Tensor) and values.dim() in (2, 3), read
    dtype = getattr(torch, read.dtype)
    if read.reading == CONVERT:
        kind_out, size_bits = FLOATS[dtype], dtype.itemsize.bit_length() - 1
    else:
        assert read.reading in (QUANTISE, SCALE), read
        assert dtype == (torch.float32 if read.reading == SCALE else FP8), read
        kind_out = SCALES_OUT if read.reading == SCALE else QUANTISED_OUT
    # A matrix is a stack of one, so that a kernel has one case.
    extra = (0,) * (3 - values.dim())
    start, size = extra + box.start, (1,) * len(extra) + box.size
    strides, extents = extra + values.stride(), values.shape[-2:]
    (row, column), (rows, columns) = start[1:], size[1:]
    # Scales are counted in blocks; a slice of weights has all blocks that it touches, the cut ones at its edges, too.
    if read.reading == SCALE:
        first, number = (row, column), (rows, columns)
        within = zip(first, number, in_blocks(extents, block), strict=True)
    else:
        first = row // block[0], column // block[1]
        number = -(-(row + rows) // block[0]) - first[0], -(-(column + columns) // block[1]) - first[1]
        within = zip((row, column), (rows, columns), extents, strict=True)
    assert all(begin + count <= extent for begin, count, extent in within), (box, values.shape)
    assert _spans([(1, 0), (rows, strides[1]), (columns, strides[2])], *block), (values.shape, strides)
    found = BlockRow(
        address=values.data_ptr() + start[0] * strides[0] * values.element_size(),
        offset=read.offset,
        kind=FLOATS[source.dtype],
        kind_out=kind_out,
        size_bits=size_bits,
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
        **computed,
    )
    return found, size[0] * number[0] * number[1]


_NOT_COMPUTED = dict.fromkeys(
    ("scales", "scale_rows", "scale_columns", "a", "b", "b_rows", "parts", "rank", "factor", "magnitudes"), 0
)


def _computed_columns(weight: ComputedWeight) -> dict[str, int]:
    """The columns of `BlockRow` from `scales` on."""
    found, term = {**_NOT_COMPUTED}, weight.term
    assert weight.values.dim() == 2 and weight.values.is_contiguous()
    if weight.scales is not None:
        assert weight.block is not None and weight.scales.is_contiguous() and weight.values.dtype == FP8
        found |= {
            "scales": weight.scales.data_ptr(),
            "scale_rows": weight.block[0],
            "scale_columns": weight.block[1],
        }
    else:
        assert weight.values.dtype == weight.dtype
    if term is not None:
        assert term.a.dtype == term.b.dtype == weight.dtype and term.rows.dtype == torch.int32
        assert term.a.is_contiguous() and term.b.is_contiguous() and term.rows.is_contiguous()
        assert term.a.shape == (term.parts * term.b.shape[1], weight.values.shape[1]), term.a.shape
        found |= {
            "a": term.a.data_ptr(),
            "b": term.b.data_ptr(),
            "b_rows": term.rows.data_ptr(),
            "parts": term.parts,
            "rank": term.b.shape[1],
            "factor": int(torch.tensor(term.factor, dtype=torch.float32).view(torch.int32)),
        }
        if term.magnitudes is not None:
            assert term.magnitudes.dtype == weight.dtype and term.magnitudes.is_contiguous()
            found["magnitudes"] = term.magnitudes.data_ptr()
    return found


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
