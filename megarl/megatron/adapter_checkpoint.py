"""Adapters in Megatron's distributed checkpoints (`torch_dist`), beside the model's own tensors.

There they are the logical tensors of `megarl.models.lora`, called `adapters.` and their names, whatever layers Megatron
fuses: a checkpoint of one layout is loaded into any other, and `megarl convert --to peft` reads it. What Megatron's own
`sharded_state_dict` says of them must be left out (`without_adapters`): it takes them for equal on all tensor parallel ranks.

Seen with megatron-core 0.19.2.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megarl.layout import Box, Layout, Piece
from megarl.models.lora import ADAPTER, IN_CHECKPOINTS
from megarl.models.shards import Shapes


def without_adapters(states: Mapping[str, Any], adapter: str = ADAPTER) -> dict[str, Any]:
    """A model chunk's `sharded_state_dict` without its adapters."""
    return {name: state for name, state in states.items() if f".{adapter}." not in name}


def sharded_adapters(
    layout: Layout, shapes: Shapes, rank: int, parameters: Mapping[str, torch.Tensor]
) -> dict[str, ShardedTensor]:
    """What a rank has of the adapters, to be saved or loaded with Megatron.

    Args:
        layout: where all ranks have them (`adapter_layout`).
        shapes: `logical_adapters`.
        parameters: the rank's, named as pieces name them.
    """
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for shard in layout.shards:
        for piece in shard.pieces:
            holders[piece.tensor, piece.box] += shard.ranks
    states = {}
    for name, piece in _named(layout.pieces(rank)):
        data = parameters[piece.local].detach()[piece.local_box.slices]
        states[name] = ShardedTensor(
            key=IN_CHECKPOINTS + piece.tensor,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=shapes[piece.tensor],
            global_offset=piece.box.start,
            axis_fragmentations=None,  # ranks may have parts of different sizes
            replica_id=holders[piece.tensor, piece.box].index(rank),
        )
    return states


@torch.no_grad()
def restore_adapters(
    states: Mapping[str, torch.Tensor], layout: Layout, rank: int, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Fill a rank's adapters from what Megatron loaded for its `sharded_adapters`."""
    for name, piece in _named(layout.pieces(rank)):
        parameters[piece.local][piece.local_box.slices].copy_(states[name])


def _named(pieces: list[Piece]) -> Iterator[tuple[str, Piece]]:
    """A rank's pieces under names of their own: it may have several parts of a tensor."""
    for piece in pieces:
        yield f"{IN_CHECKPOINTS}{piece.tensor}@{','.join(map(str, piece.box.start))}", piece
