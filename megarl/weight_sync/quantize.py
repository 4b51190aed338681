"""Weights in float8 for the engines: blocks that share a scale, quantised on the trainer ranks that send them.

The format is that of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3.2), which SGLang serves: e4m3 values,
for each block of 128 x 128 (or other sizes) the float32 scale amax / 448, and w = value * scale. The scales of a tensor
are a tensor of their own, named as in these checkpoints (`SCALES` after the weight's name), so they travel as weights do.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from megarl.layout import Box, Layout, Piece, Shard
from megarl.models.float8 import FP8, SCALES, Block, block_scales

STRIP_ELEMENTS = 1 << 20
# The projections whose weights SGLang's Fp8Config quantises (0.5.21): every linear layer and all experts, but for the
# router, the embedding and the head.
_ATTENTION = {f"{name}_proj" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")} | {"kv_a_proj_with_mqa"}
# w1 to w3 are MiniMax-M2's; wq_b and wk belong to DeepSeek-V3.2's indexers.
_PROJECTIONS = _ATTENTION | {"gate_proj", "up_proj", "down_proj"} | {"w1", "w2", "w3"} | {"wq_b", "wk"}


def is_quantised(tensor: str) -> bool:
    """Whether a weight, by its Hugging Face name, is one that a float8 engine holds in float8."""
    module, _, kind = tensor.rpartition(".")
    return kind == "weight" and module.rpartition(".")[2] in _PROJECTIONS


def dtype_in_fp8(tensor: str, otherwise: torch.dtype) -> torch.dtype:
    """The type in which a logical tensor of a layout `with_scales` travels."""
    if is_quantised(tensor):
        return FP8
    return torch.float32 if tensor.endswith(SCALES) else otherwise


def with_scales(layout: Layout, shapes: Mapping[str, tuple[int, ...]], block: Block) -> Layout:
    """The layout of a model in float8: each piece of a quantised weight gets a piece of the weight's scales.

    Args:
        shapes: of all logical tensors of `layout`.

    Raises:
        ValueError (when pieces are listed): a rank's piece begins or ends within a block.
    """

    def quantised(shard: Shard) -> Shard:
        def make_pieces() -> list[Piece]:
            pieces = list(shard.pieces)
            in_blocks: dict[
                tuple[Box, Box, tuple[int, ...]], tuple[Box, Box]
            ] = {}  # layers that are alike share one
            for piece in shard.pieces:
                if is_quantised(piece.tensor):
                    key = piece.box, piece.local_box, shapes[piece.tensor]
                    if key not in in_blocks:
                        _refuse_cut_blocks(piece, key[2], block, f"{layout.name} rank {shard.ranks[0]}")
                        in_blocks[key] = _in_blocks(piece.box, block), _in_blocks(piece.local_box, block)
                    box, place = in_blocks[key]
                    pieces.append(Piece(piece.tensor + SCALES, box, piece.local + SCALES, place))
            return pieces

        return Shard(shard.ranks, make_pieces)

    return replace(layout, shards=tuple(quantised(shard) for shard in layout.shards))


def _refuse_cut_blocks(piece: Piece, shape: tuple[int, ...], block: Block, owner: str) -> None:
    for dim, (start, size, extent, step) in enumerate(
        zip(piece.box.start, piece.box.size, shape, block, strict=True)
    ):
        end, local = start + size, piece.local_box.start[len(piece.local_box.start) - 2 + dim]
        if start % step or (end % step and end != extent) or local % step:
            raise ValueError(
                f"rollout.quantization=fp8: {owner} holds {('rows', 'columns')[dim]} {start} to {end} of "
                f"{piece.tensor} from {local} of {piece.local}, which cuts a block of {step}; blocks must fit all shards"
            )


def _in_blocks(box: Box, block: Block) -> Box:
    """A box of weights, its last two dimensions counted in blocks."""
    extra = len(box.start) - 2
    start, size = list(box.start[:extra]), list(box.size[:extra])
    for first, count, step in zip(box.start[extra:], box.size[extra:], block, strict=True):
        start.append(first // step)
        size.append(-(-(first + count) // step) - first // step)
    return Box(tuple(start), tuple(size))


def read_values(parameter: torch.Tensor, box: Box, block: Block, out: torch.Tensor) -> None:
    """Quantise `box` of a weight [rows, columns] into `out` (float8, of the box's size).

    The box may cut blocks, which are counted from the weight's first row and column: the scale of a cut block is that of the complete block.
    """
    ends = zip(box.start, box.size, parameter.shape, block, strict=True)
    rows, columns = (
        slice(first // step * step, min(-(-(first + count) // step) * step, extent))
        for first, count, extent, step in ends
    )
    row, column = (first - blocks.start for first, blocks in zip(box.start, (rows, columns), strict=True))

    def strip(values: torch.Tensor, scales: torch.Tensor, first: int) -> None:
        spread = scales.repeat_interleave(block[0], 0)[: len(values)].repeat_interleave(block[1], 1)
        quantised = (values / spread[:, : values.shape[1]]).to(FP8)[:, column : column + box.size[1]]
        low, high = max(first, row), min(first + len(values), row + box.size[0])
        out[low - row : high - row].copy_(quantised[low - first : high - first])

    _over_strips(parameter[rows, columns], block, strip)


def read_scales(parameter: torch.Tensor, box: Box, block: Block, out: torch.Tensor) -> None:
    """Write the scales of the blocks `box` (counted in blocks) of a weight [rows, columns] into `out` (float32)."""
    rows, columns = (
        slice(first * step, (first + count) * step)
        for first, count, step in zip(box.start, box.size, block, strict=True)
    )

    def strip(values: torch.Tensor, scales: torch.Tensor, first: int) -> None:
        out[first // block[0] :][: len(scales)].copy_(scales)

    _over_strips(parameter[rows, columns], block, strip)


def _over_strips(
    weight: torch.Tensor, block: Block, use: Callable[[torch.Tensor, torch.Tensor, int], None]
) -> None:
    """Call use(values, scales, first row) for strips of complete blocks: float32 values, one scale a block.

    Strips bound the temporary memory.
    """
    height = max(1, STRIP_ELEMENTS // (weight.shape[1] * block[0])) * block[0]
    for first in range(0, len(weight), height):
        values = weight[first : first + height].float()
        use(values, block_scales(values, block), first)
