"""The Triton kernel of `float8.dequantise` and `dequantise_all`, imported by these alone on GPUs: without one Triton is not installed."""

import triton
import triton.language as tl

BFLOAT16_NAN = tl.constexpr(0x7FFF)


@triton.jit
def scale_blocks(
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TO_BFLOAT16: tl.constexpr,
    LISTED: tl.constexpr,
) -> None:
    """Write a tile of values times their blocks' scales, computed in float32; the third axis of programs counts weights.

    Args:
        values: the bytes of float8 [rows, columns]; scales: float32 [blocks of rows, blocks of columns]; both contiguous. LISTED: their
            addresses instead, int64 [weights].
        out: [weights, rows, columns], contiguous. TO_BFLOAT16: it has the bits of bfloat16 numbers as int16: Triton's interpreter (3.7.1)
            would cut off what a GPU rounds to nearest even, so rounding is done here.
    """
    number = tl.program_id(2)
    if LISTED:
        values = tl.load(values + number).to(tl.pointer_type(tl.uint8))
        scales = tl.load(scales + number).to(tl.pointer_type(tl.float32))
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    across = (columns + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    place = row.to(tl.int64) * columns + column
    scale = tl.load(scales + row // BLOCK_ROWS * across + column // BLOCK_COLUMNS, mask=inside, other=0.0)
    exact = e4m3_value(tl.load(values + place, mask=inside, other=0).to(tl.int32)) * scale
    place += number.to(tl.int64) * rows * columns
    if TO_BFLOAT16:
        bits = exact.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(out + place, tl.where(exact == exact, rounded, BFLOAT16_NAN).to(tl.int16), mask=inside)
    else:
        tl.store(out + place, exact.to(out.dtype.element_ty), mask=inside)


@triton.jit
def e4m3_value(bits: tl.tensor) -> tl.tensor:
    """Numbers in float8 e4m3, by their bits (int32), as float32; GPUs before Hopper have no instruction for it."""
    rest = bits & 0x7F
    normal = ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rest < 8, rest.to(tl.float32) * 0.001953125, normal)  # steps of 2**-9 below 2**-6
    value = tl.where(rest == 0x7F, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
