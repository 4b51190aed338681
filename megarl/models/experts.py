"""Routed experts: their tensors, and where they lie. A rank's pieces are those of its own experts only.

- Megatron: an expert parallel rank has a contiguous block of experts, each a pair of tensors of its own
  (`linear_fc1.weight0`, ...), [gate shard | up shard] over the expert tensor parallel ranks.
- SGLang 0.5.21: a contiguous block too, stacked along a first dimension: `w13_weight` [experts, gate shard | up shard,
  hidden] and `w2_weight` [experts, hidden, shard].
"""

from collections.abc import Iterator

from megarl.layout.boxes import Box, Piece
from megarl.models.config import ModelConfig
from megarl.models.mlp import gated, gated_shards
from megarl.models.shards import MegatronPlace, SGLangPlace, Shapes


def logical(config: ModelConfig, name: str) -> Shapes:
    """The tensors of the layer `name` ("model.layers.3.")."""
    assert config.moe is not None
    return {
        tensor: shape
        for _, expert in _block(config, name, 1, 0)
        for tensor, shape in gated(expert, config.hidden_size, config.moe.ffn_hidden_size).items()
    }


def _block(config: ModelConfig, name: str, ep: int, rank: int) -> Iterator[tuple[int, str]]:
    """A rank's experts: position among them, prefix of the name."""
    count = config.moe.num_experts // ep
    for index in range(count):
        yield index, f"{name}mlp.experts.{rank * count + index}."


def megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    pieces = []
    for index, expert in _block(config, name, place.ep, place.ep_rank):
        shapes = gated(expert, config.hidden_size, config.moe.ffn_hidden_size)
        fused, down = (f"{local}mlp.experts.linear_{part}.weight{index}" for part in ("fc1", "fc2"))
        pieces += gated_shards(shapes, expert, fused, down, place.etp, place.etp_rank)
    return pieces


def sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    fused, down = name + "mlp.experts.w13_weight", name + "mlp.experts.w2_weight"
    pieces = []
    for index, expert in _block(config, name, place.ep, place.ep_rank):
        shapes = gated(expert, config.hidden_size, config.moe.ffn_hidden_size)
        for piece in gated_shards(shapes, expert, fused, down, place.moe_tp, place.moe_tp_rank):
            start, size = piece.local_box
            pieces.append(piece._replace(local_box=Box((index, *start), (1, *size))))
    return pieces
