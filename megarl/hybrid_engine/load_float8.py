"""Weights from a checkpoint into parameters in float8 (`lora.base_dtype`): as they are there, or quantised one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from megarl.layout import Box, Copy
from megarl.models.float8 import SCALES, Block, quantise

if TYPE_CHECKING:
    from megarl.hybrid_engine.load import HFReader


def load_blocks(
    reader: HFReader,
    copies: Iterable[Copy],
    parameters: Mapping[str, torch.Tensor],
    names: set[str],
    block: Block,
) -> None:
    """Fill the parameters `names`, each of which has its scales beside it.

    Beside the model one parameter's values are held at a time, in float32.

    Args:
        copies: what of the checkpoint lies where in the parameters; none of `names` cuts a block.
    """
    by_name: dict[str, list[Copy]] = {name: [] for name in names}
    for copy in copies:
        if copy.target_local in by_name:
            by_name[copy.target_local].append(copy)
    for name, parts in by_name.items():
        values, scales = parameters[name], parameters[name + SCALES]
        for copy in parts:
            place = values[copy.target_box.slices]
            place_of_scales = scales[_blocks_of(copy.target_box, block)]
            stored = reader.read_blocks(copy.tensor, copy.box, block)
            if stored is None:
                quantise(reader.read(copy.tensor, copy.box).to(values.device), block, place, place_of_scales)
            else:
                place.copy_(stored[0])
                place_of_scales.copy_(stored[1])


def _blocks_of(box: Box, block: Block) -> tuple[slice, ...]:
    return tuple(
        slice(start // step, -(-(start + extent) // step))
        for start, extent, step in zip(box.start, box.size, block, strict=True)
    )
