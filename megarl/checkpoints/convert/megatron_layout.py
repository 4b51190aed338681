"""Megatron's distributed checkpoint as a layout: its global tensors, and where each weight lies in them.

Written from what megatron-core 0.19.2's `sharded_state_dict` of a GPTModel gives, which tests compare with it. A
parameter's global tensor is the parameter of the model on one rank (tp = pp = ep = 1), since shards lie in it
end to end; gate and up projection of `linear_fc1` are sharded one by one, so that all of the gate comes first there too. Beyond that:
- layers are stacked (`decoder.layers.mlp.linear_fc2.weight` with a leading axis of layers), unless the layers differ
  or the one who saves asks for names with numbers (`non_homogeneous_layers`);
- experts are stacked in an axis after that of layers, under `mlp.experts.experts.`;
- a layer's position among MTP layers stays in the name, with `transformer_layer` in place of `mtp_model_layer`.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from megarl.layout import Box, Layout, Piece
from megarl.models import (
    MegatronPlace,
    ModelConfig,
    megatron_pieces,
    padded_vocab_size,
)

VOCAB_TENSORS = ("embedding.word_embeddings.weight", "output_layer.weight")
_DECODER_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
# Modules whose parameters are no Transformer Engine module's: they have no extra state in a checkpoint.
_WITHOUT_EXTRA_STATE = re.compile(r"embedding\.word_embeddings|output_layer|value_head|.*\.mlp\.router")


class GlobalTensor(NamedTuple):
    """A tensor of a distributed checkpoint; its first `num_leading` axes number layers and experts."""

    shape: tuple[int, ...]
    num_leading: int


@dataclass(frozen=True)
class MegatronCheckpoint:
    """What a model's distributed checkpoint holds.

    Attributes:
        layout: one holder of all weights; local names are the keys of global tensors.
        tensors: key -> global tensor; the vocabulary is padded as for tp = 1.
        extra_states: keys of the objects that Transformer Engine's modules save beside their parameters.
    """

    layout: Layout
    tensors: dict[str, GlobalTensor]
    extra_states: tuple[str, ...]


def stacks_layers(config: ModelConfig) -> bool:
    """Whether Megatron's own `sharded_state_dict` stacks the model's layers by default: where they are all alike."""
    return config.moe is None


def megatron_checkpoint(
    config: ModelConfig, *, stacked: bool, head: str = "lm", mtp: bool = False
) -> MegatronCheckpoint:
    """The distributed checkpoint of a model.

    Args:
        stacked: whether decoder layers are stacked, or have numbers in their names.
        mtp: whether the model's multi-token prediction layers are in it.
    """
    pieces, ends, places = [], {}, {}
    for piece in _unsharded_pieces(config, head, mtp):
        local = piece.local.removeprefix("0:")
        key, at, extent = _global_place(local, config, stacked)
        box = Box(at + piece.local_box.start, (1,) * len(at) + piece.local_box.size)
        pieces.append(Piece(piece.tensor, piece.box, key, box))
        end = [a + n for a, n in zip(piece.local_box.start, piece.local_box.size, strict=True)]
        ends[key] = [max(pair) for pair in zip(ends.get(key, end), end, strict=True)]
        places.setdefault(key, (extent, set()))[1].add(at)
    tensors = {
        key: GlobalTensor(places[key][0] + tuple(end), len(places[key][0])) for key, end in ends.items()
    }
    for key in VOCAB_TENSORS:
        if key in tensors:
            padded = (padded_vocab_size(config, 1), *tensors[key].shape[1:])
            tensors[key] = tensors[key]._replace(shape=padded)
    layout = Layout.by_rank("Megatron checkpoint", 1, lambda rank: pieces)
    return MegatronCheckpoint(layout, tensors, tuple(_extra_states(places)))


def _unsharded_pieces(config: ModelConfig, head: str, mtp: bool) -> list[Piece]:
    """The whole model on one rank."""
    return megatron_pieces(
        config,
        MegatronPlace(),
        layers=[list(range(config.num_layers))],
        first_stage=True,
        last_stage=True,
        head=head,
        mtp=mtp,
    )


def _global_place(
    local: str, config: ModelConfig, stacked: bool
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """A parameter's key, its index in the key's leading axes, and how long these are."""
    at: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()
    layer = _DECODER_LAYER.fullmatch(local)
    if layer and stacked:
        local = f"decoder.layers.{layer[2]}"
        at, extent = (int(layer[1]),), (config.num_layers,)
    local = local.replace(".mtp_model_layer.", ".transformer_layer.")
    expert = _EXPERT.fullmatch(local)
    if expert:
        assert config.moe is not None, local
        local = f"{expert[1]}.experts.{expert[2]}.{expert[3]}"
        at, extent = (*at, int(expert[4])), (*extent, config.moe.num_experts)
    return local, at, extent


def _extra_states(places: dict[str, tuple[tuple[int, ...], set[tuple[int, ...]]]]) -> list[str]:
    """As `ShardedObject.unique_key` writes them: key, index and extent of the leading axes."""
    names: dict[str, None] = {}
    for key, (extent, indices) in places.items():
        module = key.rpartition(".")[0]
        if not _WITHOUT_EXTRA_STATE.fullmatch(module):
            for at in sorted(indices):
                shard, total = (
                    ".".join(map(str, axes or default)) for axes, default in ((at, (0,)), (extent, (1,)))
                )
                names[f"{module}._extra_state/shard_{shard}_{total}"] = None
    return list(names)
