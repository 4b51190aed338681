"""Where a rank's weights and optimizer states lie in the global tensors of a distributed checkpoint.

A weight lies where Megatron's own `sharded_state_dict` puts it. A state of the optimizer (Adam's moments, the float32 copy of
a bfloat16 or float16 weight) lies in a tensor of its weight's shape, `optimizer.state.<kind>.<weight>`, at the same place. A
distributed optimizer has a range of a weight's elements, which is at most a few boxes: so every rank saves its own elements, and
reads the ones it needs, whatever layout saved them. Nothing is gathered. Megatron-core 0.19.2's own formats, for comparison, gather
the states of all data parallel ranks (`fully_reshardable`), or cannot be loaded with other expert parallel sizes.

Adapters are stored as the logical tensors of `megarl.models.lora`, with `adapters.` before their names, whatever layers Megatron
fuses: a checkpoint of one layout is loaded into any other, and `megarl convert --to peft` reads it. (Megatron's own
`sharded_state_dict`, 0.19.2, takes them for equal on all tensor parallel ranks.)
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory, is_main_replica
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel

from megarl.layout import Box, Piece
from megarl.megatron.build import local_parameters
from megarl.megatron.fsdp import Shard
from megarl.models.lora import IN_CHECKPOINTS
from megarl.models.shards import Shapes
from megarl.models.table import VALUE_HEAD

OPTIMIZER = "optimizer.state."
CONTENT = {"singleton_local_shards": False, "non_homogeneous_layers": True}
"""The metadata by which Megatron knows the names to request: layers have numbers in their names."""

MAX_ELEMENTS = 1 << 26
"""Elements that are written and read at a time."""


@dataclass(frozen=True)
class Places:
    """Where the tensors of one rank lie.

    Attributes:
        pieces: `box` of the global tensor `tensor` is `local_box` of the rank's tensor `local`, in all dimensions but leading
            ones of the global tensor (an expert's index).
        shapes: of the global tensors.
        padded: the number of real rows of global tensors whose rows are the vocabulary's, which each layout pads in its own way.
        copies: the rank's tensors that equal another pipeline stage's (tied embeddings). They are loaded and
            not saved: the stages' optimizers cut them at different elements.
        extra_states: keys of the objects that Transformer Engine's modules save in addition to their parameters, empty but for its own
            float8, and that this rank writes: Megatron refuses a checkpoint without them.
    """

    pieces: tuple[Piece, ...]
    shapes: Shapes
    padded: Mapping[str, int] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()
    extra_states: tuple[str, ...] = ()

    def saved(self) -> "Places":
        """All tensors but copies."""
        return replace(self, pieces=tuple(piece for piece in self.pieces if piece.local not in self.copies))


class Item(NamedTuple):
    """Box `box` of the global tensor `key`, of shape `shape`, is `tensor`, which lacks leading dimensions of size 1."""

    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


def model_places(chunks: list[GPTModel], vocab_size: int) -> Places:
    """The places of all weights of a model, and of buffers that are weights.

    Args:
        chunks: the models themselves (`unwrap`).
        vocab_size: without padding.
    """
    known = local_parameters(chunks)
    pieces: list[Piece] = []
    shapes: dict[str, tuple[int, ...]] = {}
    padded, copies, extra_states = {}, set(), []
    for index, chunk in enumerate(chunks):
        for name, state in _sharded_states(chunk).items():
            if isinstance(state, ShardedObject):
                if is_main_replica(state.replica_id):
                    extra_states.append(state.unique_key)
                continue
            local = f"{index}:{name}"
            assert local in known, f"{local} is neither a parameter nor a buffer that is a weight"
            for shard in _shards(state):
                pieces.append(_piece(shard, local, known[local]))
                shapes[shard.key] = tuple(shard.global_shape)
                if shard.allow_shape_mismatch:
                    padded[shard.key] = vocab_size
                if shard.replica_id[0] > 0:  # the first number is that of the stage
                    copies.add(local)
    missing = known.keys() - {piece.local for piece in pieces}
    assert not missing, f"Megatron would not save {sorted(missing)}"
    return Places(tuple(pieces), shapes, padded, frozenset(copies), tuple(extra_states))


def _sharded_states(chunk: GPTModel) -> dict[str, Any]:
    """Megatron's own description of a chunk, by names in it."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = CONTENT | {"dp_cp_group": group}
    if chunk.post_process and chunk.output_layer is None:
        # LanguageModule's own looks for the output layer, which a model with a value head lacks (0.19.2); beyond that it
        # describes tied embeddings, which such a model does not have.
        return super(LanguageModule, chunk).sharded_state_dict(metadata=metadata)
    return chunk.sharded_state_dict(metadata=metadata)


def _shards(state: ShardedTensor | ShardedTensorFactory) -> Iterator[ShardedTensor]:
    """The shards of a state: one, or the gate's and the up projection's, parts of a fused weight that are sharded one by one."""
    if isinstance(state, ShardedTensor):
        yield state
        return
    assert isinstance(state, ShardedTensorFactory), state
    yield from nested_values(state.build())


def _piece(shard: ShardedTensor, local: str, whole: torch.Tensor) -> Piece:
    """Where a shard lies: rows of the rank's tensor, all of them or some."""
    assert shard.data.untyped_storage()._cdata == whole.untyped_storage()._cdata, (
        f"{local} is given as a copy"
    )
    per_row = math.prod(whole.shape[1:])
    first, rest = divmod(shard.data.storage_offset() - whole.storage_offset(), per_row)
    assert rest == 0 and tuple(shard.local_shape[1:]) == tuple(whole.shape[1:]), (local, shard)
    local_box = Box.rows(first, shard.local_shape[0], tuple(whole.shape))
    box = Box(tuple(shard.global_offset), (1,) * shard.prepend_axis_num + tuple(shard.local_shape))
    return Piece(shard.key, box, local, local_box)


def weight_items(places: Places, parameters: Mapping[str, torch.Tensor]) -> list[Item]:
    """A rank's weights. `parameters`: as `local_parameters` names them."""
    return [
        Item(
            piece.tensor,
            places.shapes[piece.tensor],
            piece.box,
            parameters[piece.local][piece.local_box.slices].view(piece.box.size),
        )
        for piece in places.pieces
    ]


def shard_items(places: Places, shards: Mapping[str, Shard]) -> list[Item]:
    """The elements that this rank holds of weights which data parallel ranks share. `shards`: as `local_parameters` names them."""
    pieces = pieces_by_tensor(places)
    return [
        item
        for name, (_, parameter, start, values) in shards.items()
        for item in range_items("", places, pieces.get(name, ()), tuple(parameter.shape), start, values)
    ]


def pieces_by_tensor(places: Places) -> dict[str, list[Piece]]:
    """The pieces of each of the rank's tensors."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in places.pieces:
        found[piece.local].append(piece)
    return found


def range_items(
    prefix: str,
    places: Places,
    pieces: Sequence[Piece],
    shape: tuple[int, ...],
    start: int,
    values: torch.Tensor,
) -> Iterator[Item]:
    """The items of some elements of a weight, or of a state of these elements.

    Args:
        prefix: of the global tensor's name, before the weight's.
        pieces: of the weight's local tensor, which has shape `shape`.
        start, values: the state of the elements from `start` on, in row-major order, [number of elements].
    """
    for box in boxes_of_range(start, start + values.numel(), shape):
        first = _row_major(box.start, shape) - start
        part = values[first : first + box.numel].view(box.size)
        for piece in pieces:
            common = box.intersect(piece.local_box)
            if common is not None:
                inside = common.inside(box, Box.whole(box.size))
                place = common.inside(piece.local_box, piece.box)
                # In a rank's tensor of adapters an expert's index comes first, which the expert's own global tensor lacks.
                own = part[inside.slices].view(place.size)
                yield Item(f"{prefix}{piece.tensor}", places.shapes[piece.tensor], place, own)


def boxes_of_range(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The elements [start, stop), in row-major order, of a tensor as boxes in order, as few as there can be."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    per_row = math.prod(shape[1:])
    first, last = -(-start // per_row), stop // per_row  # full rows
    if first > last:
        yield from _within_row(last, start, stop, shape)
        return
    yield from _within_row(first - 1, start, first * per_row, shape)
    if first < last:
        yield Box.rows(first, last - first, shape)
    yield from _within_row(last, last * per_row, stop, shape)


def _within_row(row: int, start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for box in boxes_of_range(start - before, stop - before, shape[1:]):
        yield Box((row, *box.start), (1, *box.size))


def _row_major(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    place = 0
    for at, extent in zip(index, shape, strict=True):
        place = place * extent + at
    return place


def in_parts(items: Sequence[Item]) -> Iterator[Item]:
    """The items, none with more than MAX_ELEMENTS elements."""
    for item in items:
        leading = len(item.shape) - item.tensor.dim()
        for box in item.box.split(MAX_ELEMENTS):
            yield item._replace(box=box, tensor=item.tensor[relative(box, item.box, leading)])


def relative(part: Box, whole: Box, leading: int = 0) -> tuple[slice, ...]:
    """The slices that take `part` out of the box `whole`, without its first `leading` dimensions."""
    return part.inside(whole, Box.whole(whole.size)).slices[leading:]


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
