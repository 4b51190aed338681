"""Weights in float8: blocks of rows and columns that share a scale, and which weights of a frozen model are held in float8.

The format is that of DeepSeek-V3's checkpoints (arXiv:2412.19437, section 3.3.2): e4m3 values, for each block the float32
scale amax / 448, and w = value * scale. A tensor's scales are named as there, with SCALES after its name.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from megarl.layout.boxes import Piece
from megarl.layout.grid import ParallelLayout
from megarl.models.config import ModelConfig
from megarl.models.layers import layer_name
from megarl.models.lora import linear_of
from megarl.models.shards import MegatronPlace, Shapes
from megarl.models.table import kinds_of_layers, layer_tensors, megatron_pieces

SCALES = "_scale_inv"
ROW_SCALES = "_scale"  # after the name of a weight that has one for each row (`ModelConfig.scaled_channels`)
FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
STRIP_ELEMENTS = 1 << 20  # on a CPU, so that a strip stays in its caches
GPU_STRIP_ELEMENTS = 1 << 24  # smaller ones take a GPU less time than their kernels take to start
# Rows and columns that a program of the kernel has, which 4 warps read 16 bytes a thread at a time.
TILE = (16, 256)

Block = tuple[int, int]
"""Rows and columns that share a scale."""


def block_scales(values: torch.Tensor, block: Block) -> torch.Tensor:
    """The scale of each block of `values` [rows, columns]; 1 for blocks of zeros, whose values are 0 with any."""
    rows, columns = in_blocks(values.shape, block)
    padded = torch.nn.functional.pad(
        values.abs(), (0, columns * block[1] - values.shape[1], 0, rows * block[0] - values.shape[0])
    )
    scales = padded.view(rows, block[0], columns, block[1]).amax((1, 3)) / LARGEST
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def in_blocks(shape: Iterable[int], block: Block) -> tuple[int, ...]:
    """How many blocks a tensor of this shape has, incomplete ones counted."""
    return tuple(-(-extent // step) for extent, step in zip(shape, block, strict=True))


def quantise(weight: torch.Tensor, block: Block, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write `weight` [rows, columns] as `values` (float8, of its shape) and `scales` [blocks of rows, of columns]."""

    def strip(rows: slice, of_blocks: slice) -> None:
        exact = weight[rows].float()
        scales[of_blocks].copy_(block_scales(exact, block))
        values[rows].copy_((exact / _spread(scales[of_blocks], block, exact.shape)).to(FP8))

    _over_strips(weight, block, strip)


def dequantise(
    values: torch.Tensor,
    scales: torch.Tensor,
    block: Block,
    dtype: torch.dtype,
    start: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """Each element times the scale of its block, in float32, as a tensor of this type.

    Args:
        values: [rows, columns], float8 or any type.
        scales: [blocks of rows, blocks of columns], the ones of the values' blocks.
        start: where within the first block the values begin.
    """
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    if values.is_cuda and start == (0, 0) and values.dtype == FP8:
        scale_at_once([values], [scales], block, out[None])
        return out

    def strip(rows: slice, of_blocks: slice) -> None:
        exact = values[rows].float()
        first = (start[0] if rows.start == 0 else 0, start[1])
        out[rows].copy_(exact.mul_(_spread(scales[of_blocks], block, exact.shape, first)))

    _over_strips(values, block, strip, start[0])
    return out


def dequantise_all(
    values: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], block: Block, dtype: torch.dtype
) -> torch.Tensor:
    """`dequantise` for weights of one shape: [weights, rows, columns]; on a GPU by one launch."""
    out = torch.empty((len(values), *values[0].shape), dtype=dtype, device=values[0].device)
    if out.is_cuda:
        scale_at_once(values, scales, block, out)
        return out
    for part, own_values, own_scales in zip(out, values, scales, strict=True):
        part.copy_(dequantise(own_values, own_scales, block, dtype))
    return out


def scale_at_once(
    values: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], block: Block, out: torch.Tensor
) -> None:
    """`dequantise_all` by one kernel, which makes no other tensor; the same bits. It was interpreted on a CPU, and an H100 has run it (docs/gpu.md).

    Args:
        out: [weights, rows, columns].
    """
    from megarl.models import float8_kernels

    assert all(tensor.is_contiguous() for tensor in (*values, *scales, out))
    number, rows, columns = out.shape
    places = values[0].view(torch.uint8), scales[0]
    if number > 1:
        assert {tensor.shape for tensor in values} == {values[0].shape}
        listed = torch.tensor([[one.data_ptr() for one in kind] for kind in (values, scales)])
        if out.is_cuda:
            listed = listed.pin_memory().to(out.device, non_blocking=True)
        places = listed[0], listed[1]
    is_bfloat16 = out.dtype == torch.bfloat16
    float8_kernels.scale_blocks[(-(-rows // TILE[0]), -(-columns // TILE[1]), number)](
        *places,
        out.view(torch.int16) if is_bfloat16 else out,
        rows,
        columns,
        *block,
        *TILE,
        is_bfloat16,
        number > 1,
    )


def _spread(
    scales: torch.Tensor, block: Block, shape: torch.Size, start: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """The scale of each block -> the scale of each element from `start` on."""
    wide = scales.repeat_interleave(block[1], 1)[:, start[1] : start[1] + shape[1]]
    return wide.repeat_interleave(block[0], 0)[start[0] : start[0] + shape[0]]


def _over_strips(
    weight: torch.Tensor, block: Block, use: Callable[[slice, slice], None], start: int = 0
) -> None:
    """Call use(rows, rows of blocks) for strips of complete blocks, which bound the memory taken in addition to the weight.

    Args:
        start: the rows of the first block that come before the weight's.
    """
    elements = STRIP_ELEMENTS if weight.device.type == "cpu" else GPU_STRIP_ELEMENTS
    height = max(1, elements // (weight.shape[1] * block[0]))
    for first in range(0, -(-(start + weight.shape[0]) // block[0]), height):
        rows = slice(max(0, first * block[0] - start), (first + height) * block[0] - start)
        use(rows, slice(first, first + height))


def base_weights(pieces: Iterable[Piece], linear: Shapes) -> dict[str, tuple[int, int]]:
    """Local name -> shape of the weights of a Megatron rank's linear layers.

    Args:
        pieces: all of the rank's pieces (`megatron_pieces`).
        linear: `linear_weights`.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        if piece.tensor in linear:
            start, size = piece.local_box
            rows, _ = shapes.get(piece.local, (0, 0))
            shapes[piece.local] = (max(rows, start[0] + size[0]), size[1])
    return shapes


def check_base_block(config: ModelConfig, layout: ParallelLayout, block: int) -> None:
    """Refuse blocks that a layout's shards cut: each block of a weight is then on one rank, in one place.

    So quantised values are the same in every layout, and a checkpoint's values can be used unchanged.

    Raises:
        ValueError: names a weight, and the largest size that would do; experts with biases, which nobody has tried in float8.
    """
    if config.moe is not None and config.moe.biases:
        raise ValueError(
            f"lora.base_dtype: a base in float8 is not supported for {config.family} models, whose experts have biases; leave it out"
        )
    layers = [alike[0] for alike in kinds_of_layers(config)]
    linear = linear_of(
        {
            layer_name(config, layer) + name: shape
            for layer in layers
            for name, shape in layer_tensors(config, layer).items()
        }
    )
    fitting, example = block, ""
    for piece in _some_pieces(config, layout, layers):
        if piece.tensor not in linear:
            continue
        for start, size, local, extent in zip(
            *piece.box, piece.local_box.start, linear[piece.tensor], strict=True
        ):
            for edge in (start, local, 0 if start + size == extent else start + size):
                if edge % fitting:
                    fitting, example = math.gcd(edge, fitting), piece.tensor
    if fitting != block:
        raise ValueError(
            f"lora.base_block={block}: in this layout ranks hold parts of {example} that cut such a block; "
            f"lora.base_block={fitting} fits all weights"
        )


def _some_pieces(config: ModelConfig, layout: ParallelLayout, layers: list[int]) -> Iterable[Piece]:
    """The pieces of some layers, on all ranks that cut them."""
    for part, count in (("dense", layout.tp), ("experts", layout.etp)):
        for rank in range(count):
            place = MegatronPlace(layout.tp, rank % layout.tp, layout.ep, 0, layout.etp, rank % layout.etp)
            yield from megatron_pieces(
                config, place, layers=[layers], first_stage=False, last_stage=False, part=part
            )
