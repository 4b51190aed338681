"""Adapters in Megatron's distributed checkpoints (`torch_dist`).

There they are the logical tensors of `megarl.models.lora`, called `adapters.` and their names, whatever layers Megatron
fuses: a checkpoint of one layout is loaded into any other, and `megarl convert --to peft` reads it. (Megatron's own
`sharded_state_dict`, 0.19.2, takes them for equal on all tensor parallel ranks.)
"""

from collections.abc import Iterable

from megarl.layout import Piece
from megarl.megatron.checkpoint.places import Places
from megarl.models.lora import IN_CHECKPOINTS
from megarl.models.shards import Shapes
from megarl.models.table import VALUE_HEAD

VALUE_HEAD_KEY = "value_head.weight"  # as Megatron names a model's


def adapter_places(pieces: Iterable[Piece], shapes: Shapes) -> Places:
    """Where a rank's adapters lie, and its value head, if there is one.

    Args:
        pieces: the rank's (`adapter_layout`).
        shapes: of the logical tensors.
    """
    keys = {tensor: VALUE_HEAD_KEY if tensor == VALUE_HEAD else IN_CHECKPOINTS + tensor for tensor in shapes}
    return Places(
        tuple(piece._replace(tensor=keys[piece.tensor]) for piece in pieces),
        {keys[tensor]: shape for tensor, shape in shapes.items()},
    )
