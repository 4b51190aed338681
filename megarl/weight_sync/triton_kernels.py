"""The Triton kernels of `slice_kernels`, which alone imports this file: without a GPU Triton is not installed.

Each program takes the tile that `tiles` names: a number of a row of the table, of int64, whose columns are the fields of `CopyRow` or
`BlockRow`. Addresses are bytes, int64; strides count elements.

Float8 and bfloat16 are rounded in integer arithmetic, as torch 2.13 does it (torch/headeronly/util/Float8_e4m3fn.h: ties to even, infinity
and all above 448 to 448): Triton's interpreter (3.7.1) cuts bfloat16 off, and its float8 loses what rounding carries into the exponent.
"""

import triton
import triton.language as tl

from megarl.models import float8
from megarl.models.float8_kernels import e4m3_value
from megarl.weight_sync import packets, slice_table

# Constants that kernels read have to be constexpr.
COPY_COLUMNS = tl.constexpr(len(slice_table.CopyRow._fields))
BLOCK_COLUMNS = tl.constexpr(len(slice_table.BlockRow._fields))
BYTE = tl.constexpr(slice_table.BYTE)
HALF = tl.constexpr(slice_table.HALF)
WORD = tl.constexpr(slice_table.WORD)
FLOAT32 = tl.constexpr(slice_table.FLOAT32)
BFLOAT16 = tl.constexpr(slice_table.BFLOAT16)
FLOAT16 = tl.constexpr(slice_table.FLOAT16)
SCALES_OUT = tl.constexpr(slice_table.SCALES_OUT)
QUANTISED_OUT = tl.constexpr(slice_table.QUANTISED_OUT)
KEY = tl.constexpr(packets._KEY)
LARGEST = tl.constexpr(float8.LARGEST)
# Kernels are not compiled again for tables and checksums of another alignment: these are read a number at a time.
POINTERS = ("table", "tiles", "slot", "checksums")


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def copy_slices(
    table: tl.tensor,
    tiles: tl.tensor,
    slot: tl.tensor,
    checksums: tl.tensor,
    TILE: tl.constexpr,
    TO_SLOT: tl.constexpr,
    FROM_SLOT: tl.constexpr,
) -> None:
    """Move a tile of a slice between its parameter and the slot, and hash it on its way out of the parameter.

    Args:
        TO_SLOT: elements are converted and written into the slot. FROM_SLOT: they are written into the parameter, and not hashed.
            Neither: they are hashed where they lie.
    """
    tile = tl.program_id(0)
    row = table + tl.load(tiles + tile) * COPY_COLUMNS
    address, packed = tl.load(row), tl.load(row + 1)
    kind, kind_out, size_bits = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    size_1, size_2 = tl.load(row + 5), tl.load(row + 6)
    stride_0, stride_1, stride_2 = tl.load(row + 7), tl.load(row + 8), tl.load(row + 9)
    width_bits, number, first_tile = tl.load(row + 10), tl.load(row + 11), tl.load(row + 12)
    packed += slot.to(tl.int64)

    # Divisions are by program, shifts by element: dividing would take longer than copying. Within a tile offsets are int32.
    height, width = TILE >> width_bits, 1 << width_bits
    across, down = (size_2 + width - 1) // width, (size_1 + height - 1) // height
    local = tile - first_tile
    index_0 = local // (across * down)
    first_1, first_2 = (local // across % down) * height, (local % across) * width
    origin = index_0 * stride_0 + first_1 * stride_1 + first_2 * stride_2
    first_place = (index_0 * size_1 + first_1) * size_2 + first_2
    lane = tl.arange(0, TILE)
    lane_1, lane_2 = lane >> width_bits.to(tl.int32), lane & (width - 1).to(tl.int32)
    inside = lane_1 < tl.minimum(size_1 - first_1, height).to(tl.int32)
    inside = inside & (lane_2 < tl.minimum(size_2 - first_2, width).to(tl.int32))
    offset = lane_1 * stride_1.to(tl.int32) + lane_2 * stride_2.to(tl.int32)
    place = lane_1 * size_2.to(tl.int32) + lane_2

    if FROM_SLOT:
        bits = load_bits(packed, first_place, place, inside, size_bits)
        store_bits(address, origin, offset, inside, size_bits, bits)
    else:
        if kind <= WORD:
            bits = load_bits(address, origin, offset, inside, size_bits)
        else:
            bits = round_bits(load_float(address, origin, offset, inside, kind), kind_out)
        if TO_SLOT:
            store_bits(packed, first_place, place, inside, size_bits, bits)
        found = tl.sum(hashed(bits, (first_place + place) << size_bits))
        tl.atomic_add(checksums + number, found, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def read_blocks(
    table: tl.tensor,
    tiles: tl.tensor,
    slot: tl.tensor,
    checksums: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIP: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTED: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Quantise the part of a block that a slice has, write the block's scale, or compute and convert the part; a program has one block
    of a slice.

    The block is read in strips of `STRIP` rows, for quantised values twice: the second time it is in the cache.

    Args:
        ROWS, COLUMNS: of a block. WIDTH: the power of two that is no less than COLUMNS.
        COMPUTED: whether some weights are computed. RANK: the power of two that is no less than their adapters' rank, 0 without any.
        PRECISION: of the products of adapters.
    """
    tile = tl.program_id(0)
    row = table + tl.load(tiles + tile) * BLOCK_COLUMNS
    address, packed, kind, kind_out = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    size_bits = tl.load(row + 4)
    stride_0, stride_1, stride_2 = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    extent_1, extent_2 = tl.load(row + 8), tl.load(row + 9)
    start_1, start_2 = tl.load(row + 10), tl.load(row + 11)
    size_1, size_2 = tl.load(row + 12), tl.load(row + 13)
    block_1, block_2 = tl.load(row + 14), tl.load(row + 15)
    down, across = tl.load(row + 16), tl.load(row + 17)
    number, first_tile = tl.load(row + 18), tl.load(row + BLOCK_COLUMNS - 1)
    packed += slot.to(tl.int64)

    local = tile - first_tile
    index_0 = local // (down * across)
    first_1, first_2 = (block_1 + local // across % down) * ROWS, (block_2 + local % across) * COLUMNS
    origin = index_0 * stride_0 + first_1 * stride_1 + first_2 * stride_2
    stride_1, stride_2 = stride_1.to(tl.int32), stride_2.to(tl.int32)
    lane_1, lane_2 = tl.arange(0, STRIP)[:, None], tl.arange(0, WIDTH)[None, :]
    rows = tl.minimum(extent_1 - first_1, ROWS).to(tl.int32)
    columns = tl.minimum(extent_2 - first_2, COLUMNS).to(tl.int32)
    scale = tl.full([], 1.0, tl.float32)
    if kind_out < 0:
        largest = tl.zeros([STRIP, WIDTH], tl.int32)
        for top in range(0, ROWS, STRIP):
            inside = (top + lane_1 < rows) & (lane_2 < columns)
            offset = (top + lane_1) * stride_1 + lane_2 * stride_2
            values = strip_values(
                row,
                address,
                origin,
                offset,
                first_1 + top,
                first_2,
                inside,
                kind,
                STRIP,
                WIDTH,
                COMPUTED,
                RANK,
                PRECISION,
            )
            # Without their signs, floats are ordered as their bits are, NaN last, as torch's amax has it.
            largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        amax = tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True)
        scale = tl.div_rn(amax, tl.full([], LARGEST, tl.float32))
        scale = tl.where(scale > 0, scale, 1.0)
    if kind_out == SCALES_OUT:
        bits = scale.to(tl.int32, bitcast=True)
        tl.store(packed.to(tl.pointer_type(tl.int32)) + local, bits)
        tl.atomic_add(checksums + number, hashed(bits, local * 4), sem="relaxed")
    else:
        # The rows and columns of the block that the slice has.
        low_1, low_2 = (
            tl.maximum(start_1 - first_1, 0).to(tl.int32),
            tl.maximum(start_2 - first_2, 0).to(tl.int32),
        )
        rows = tl.minimum(start_1 + size_1 - first_1, rows).to(tl.int32)
        columns = tl.minimum(start_2 + size_2 - first_2, columns).to(tl.int32)
        first_place = (index_0 * size_1 + first_1 - start_1) * size_2 + first_2 - start_2
        found = tl.zeros([STRIP, WIDTH], tl.int64)
        for top in range(0, ROWS, STRIP):
            line = top + lane_1
            inside = (line >= low_1) & (line < rows) & (lane_2 >= low_2) & (lane_2 < columns)
            offset = line * stride_1 + lane_2 * stride_2
            values = strip_values(
                row,
                address,
                origin,
                offset,
                first_1 + top,
                first_2,
                inside,
                kind,
                STRIP,
                WIDTH,
                COMPUTED,
                RANK,
                PRECISION,
            )
            if kind_out == QUANTISED_OUT:
                bits = e4m3_bits(tl.div_rn(values, tl.zeros([STRIP, WIDTH], tl.float32) + scale))
            else:
                bits = round_bits(values, kind_out)
            place = line * size_2.to(tl.int32) + lane_2
            store_bits(packed, first_place, place, inside, size_bits, bits)
            # Zeros outside, which add nothing; rounded zeros are zeros.
            found += hashed(tl.where(inside, bits, 0), (first_place + place) << size_bits)
        tl.atomic_add(checksums + number, tl.sum(tl.sum(found, 1), 0), sem="relaxed")


@triton.jit
def strip_values(
    row: tl.tensor,
    address: tl.tensor,
    origin: tl.tensor,
    offset: tl.tensor,
    first_1: tl.tensor,
    first_2: tl.tensor,
    inside: tl.tensor,
    kind: tl.tensor,
    STRIP: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTED: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """A strip of a weight as float32 numbers, from row `first_1` and column `first_2` on; zeros outside."""
    if COMPUTED:
        values = computed(
            row, address, origin, offset, first_1, first_2, inside, kind, STRIP, WIDTH, RANK, PRECISION
        )
    else:
        values = load_float(address, origin, offset, inside, kind)
    return values


@triton.jit
def computed(
    row: tl.tensor,
    address: tl.tensor,
    origin: tl.tensor,
    offset: tl.tensor,
    first_1: tl.tensor,
    first_2: tl.tensor,
    inside: tl.tensor,
    kind: tl.tensor,
    STRIP: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """`strip_values` of a table with computed weights.

    Where a weight is computed (`megarl.models.computed`), every product and every sum is rounded to the weight's type, as torch rounds it.
    """
    extent_2 = tl.load(row + 9)
    scales, scale_rows, scale_columns = tl.load(row + 19), tl.load(row + 20), tl.load(row + 21)
    index_1 = first_1 + tl.arange(0, STRIP)
    index_2 = first_2 + tl.arange(0, WIDTH)[None, :]
    if scales != 0:
        bits = tl.load(address.to(tl.pointer_type(tl.uint8)) + origin + offset, mask=inside, other=0)
        across = (extent_2 + scale_columns - 1) // scale_columns
        block = (index_1 // scale_rows)[:, None] * across + index_2 // scale_columns
        scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + block, mask=inside, other=0.0)
        values = rounded(e4m3_value(bits.to(tl.int32)) * scale, kind)
    else:
        values = load_float(address, origin, offset, inside, kind)
    if RANK > 0:
        a, b, b_rows, parts = tl.load(row + 22), tl.load(row + 23), tl.load(row + 24), tl.load(row + 25)
        rank, factor, magnitudes = tl.load(row + 26), tl.load(row + 27), tl.load(row + 28)
        if a != 0:
            in_rows = index_1 < tl.load(row + 8)
            place = tl.load(b_rows.to(tl.pointer_type(tl.int32)) + index_1, mask=in_rows, other=-1)
            own, part = place & 0xFFFFFF, place >> 24
            inner = tl.arange(0, RANK)
            nothing = tl.zeros([STRIP, RANK], tl.int64)
            across_b = own.to(tl.int64)[:, None] * rank + inner[None, :]
            product = tl.zeros([STRIP, WIDTH], tl.float32)
            for number in range(0, parts):
                taken = (part == number)[:, None] & (inner < rank)[None, :]
                left = load_float(b, 0, nothing + across_b, taken, kind)
                down_a = (number * rank + inner).to(tl.int64)[:, None] * extent_2 + index_2
                right = load_float(a, 0, down_a, (inner < rank)[:, None] & (index_2 < extent_2), kind)
                product += tl.dot(left, right, input_precision=PRECISION)
            term = rounded(rounded(product, kind) * factor.to(tl.int32).to(tl.float32, bitcast=True), kind)
            values = tl.where(inside & (place >= 0)[:, None], rounded(values + term, kind), values)
            if magnitudes != 0:
                scaled = load_float(magnitudes, 0, index_1, in_rows, kind)
                values = rounded(values * scaled[:, None], kind)
    return values


@triton.jit
def load_bits(
    address: tl.tensor, origin: tl.tensor, offset: tl.tensor, inside: tl.tensor, size_bits: tl.tensor
) -> tl.tensor:
    """Elements of 1, 2 or 4 bytes as int32, not sign-extended; zeros outside."""
    if size_bits == BYTE:
        bits = tl.load(address.to(tl.pointer_type(tl.uint8)) + origin + offset, mask=inside, other=0).to(
            tl.int32
        )
    elif size_bits == HALF:
        bits = tl.load(address.to(tl.pointer_type(tl.uint16)) + origin + offset, mask=inside, other=0).to(
            tl.int32
        )
    else:
        bits = tl.load(address.to(tl.pointer_type(tl.int32)) + origin + offset, mask=inside, other=0)
    return bits


@triton.jit
def store_bits(
    address: tl.tensor,
    origin: tl.tensor,
    offset: tl.tensor,
    inside: tl.tensor,
    size_bits: tl.tensor,
    bits: tl.tensor,
) -> None:
    """Write int32 as elements of 1, 2 or 4 bytes."""
    if size_bits == BYTE:
        tl.store(address.to(tl.pointer_type(tl.uint8)) + origin + offset, bits.to(tl.uint8), mask=inside)
    elif size_bits == HALF:
        tl.store(address.to(tl.pointer_type(tl.uint16)) + origin + offset, bits.to(tl.uint16), mask=inside)
    else:
        tl.store(address.to(tl.pointer_type(tl.int32)) + origin + offset, bits, mask=inside)


@triton.jit
def load_float(
    address: tl.tensor, origin: tl.tensor, offset: tl.tensor, inside: tl.tensor, kind: tl.tensor
) -> tl.tensor:
    """Elements of a type of floating-point numbers as float32, which has all of them; zeros outside."""
    if kind == FLOAT32:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + origin + offset, mask=inside, other=0.0)
    elif kind == BFLOAT16:
        high = tl.load(address.to(tl.pointer_type(tl.uint16)) + origin + offset, mask=inside, other=0).to(
            tl.int32
        )
        values = (high << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(
            address.to(tl.pointer_type(tl.float16)) + origin + offset, mask=inside, other=0.0
        ).to(tl.float32)
    return values


@triton.jit
def round_bits(values: tl.tensor, kind: tl.tensor) -> tl.tensor:
    """The bits of float32 numbers in another type, rounded to nearest even, as int32 with zeros above; NaN is 0x7FFF in bfloat16."""
    exact = values.to(tl.int32, bitcast=True)
    if kind == FLOAT32:
        bits = exact
    elif kind == BFLOAT16:
        bits = ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16) & 0xFFFF
        bits = tl.where((exact & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, bits)
    else:
        bits = values.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits


@triton.jit
def e4m3_bits(values: tl.tensor) -> tl.tensor:
    """The bits of float32 numbers in float8 e4m3, as torch's `fp8e4m3fn_from_fp32_value`: rounded to nearest even, at most 448."""
    exact = values.to(tl.int32, bitcast=True)
    rest = exact & 0x7FFFFFFF
    # Below 2**-6 steps are 2**-9: adding 2**14, whose last digit that is, rounds to one.
    small = (rest.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    normal = (rest - (120 << 23) + 0x7FFFF + ((rest >> 20) & 1)) >> 20
    bits = tl.where(rest < (121 << 23), small, tl.minimum(normal, 0x7E))
    bits = tl.where(rest > 0x7F800000, 0x7F, bits)
    return bits | ((exact >> 24) & 0x80)


@triton.jit
def rounded(values: tl.tensor, kind: tl.tensor) -> tl.tensor:
    """float32 numbers as they are in another type of floating-point numbers."""
    if kind == BFLOAT16:
        found = (round_bits(values, kind) << 16).to(tl.float32, bitcast=True)
    elif kind == FLOAT16:
        found = values.to(tl.float16).to(tl.float32)
    else:
        found = values
    return found


@triton.jit
def hashed(bits: tl.tensor, byte: tl.tensor) -> tl.tensor:
    """The elements' terms of the multilinear hash of `packets`: for each the part of its 32-bit word that it fills, times the word's key.

    The sum over a word's elements is the product of word and key, since nothing else has bits where one has; so elements may be
    taken in any order, and the rest of a last word, which no element fills, is zero.

    Args:
        bits: int32, zeros above the element. byte: the element's first byte within the slice, int64.
    """
    word = bits << ((byte & 3) * 8).to(tl.int32)
    return word.to(tl.int64) * (((byte >> 2) + 1) * KEY | 1)
