"""The Triton kernel of `float8.dequantise`, which alone imports this file: without a GPU Triton is not installed."""

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
) -> None:
    """Write a tile of values times their blocks' scales, computed in float32.

    Args:
        values: float8 [rows, columns]; scales: float32 [blocks of rows, blocks of columns]; both contiguous.
        out: of the values' shape. TO_BFLOAT16: it has the bits of bfloat16 numbers as int16: Triton's interpreter (3.7.1) would cut off
            what a GPU rounds to nearest even, so rounding is done here.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    across = (columns + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    place = row.to(tl.int64) * columns + column
    scale = tl.load(scales + row // BLOCK_ROWS * across + column // BLOCK_COLUMNS, mask=inside, other=0.0)
    exact = tl.load(values + place, mask=inside, other=0.0).to(tl.float32) * scale
    if TO_BFLOAT16:
        bits = exact.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(out + place, tl.where(exact == exact, rounded, BFLOAT16_NAN).to(tl.int16), mask=inside)
    else:
        tl.store(out + place, exact.to(out.dtype.element_ty), mask=inside)
