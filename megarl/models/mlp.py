"""The tensors of MLPs, dense or with routed experts, and their places in Megatron and SGLang.

The dense gated MLP:

- Megatron: `linear_fc1` is [gate shard | up shard], with the norm before it.
- SGLang 0.5.21: `gate_up_proj` is [gate shard | up shard].

Norm, router and shared experts of a layer with routed experts:

- Megatron: unlike that of a dense MLP, the norm is a module of its own. Shared experts are cut over tensor parallel
  ranks as a dense MLP is, [gate shard | up shard].
- SGLang 0.5.21, shared experts not fused with the routed ones: the same cut over all ranks of an engine.

Routed experts, a part of which a rank holds:

- Megatron: an expert parallel rank has a contiguous block of experts, each a pair of tensors of its own
  (`linear_fc1.weight0`, ...), [gate shard | up shard] over the expert tensor parallel ranks.
- SGLang 0.5.21: a contiguous block too, stacked along a first dimension: `w13_weight` [experts, gate shard | up shard,
  hidden] and `w2_weight` [experts, hidden, shard].
"""

from collections.abc import Iterator

from megarl.layout.boxes import Box, Piece
from megarl.models.config import ModelConfig
from megarl.models.shards import (
    Block,
    MegatronPlace,
    SGLangPlace,
    Shapes,
    column_shard,
    replicated,
    row_shard,
)


def dense_tensors(config: ModelConfig, name: str) -> Shapes:
    """The tensors of the layer `name` ("model.layers.3.")."""
    norm = {name + "post_attention_layernorm.weight": (config.hidden_size,)}
    return norm | _gated(name + "mlp.", config.hidden_size, config.ffn_hidden_size)


def _gated(name: str, hidden: int, ffn: int) -> Shapes:
    """The three projections under `name` ("model.layers.3.mlp.")."""
    return {
        name + "gate_proj.weight": (ffn, hidden),
        name + "up_proj.weight": (ffn, hidden),
        name + "down_proj.weight": (hidden, ffn),
    }


def dense_megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    shapes, norm, target = (
        dense_tensors(config, name),
        name + "post_attention_layernorm.weight",
        local + "mlp.",
    )
    return [
        replicated(norm, target + "linear_fc1.layer_norm_weight", shapes[norm]),
        *_gated_shards(shapes, name + "mlp.", f"{target}linear_fc1.weight", f"{target}linear_fc2.weight",
                      place.tp, place.tp_rank),
    ]  # fmt: skip


def _gated_shards(shapes: Shapes, name: str, fused: str, down: str, tp: int, rank: int) -> list[Piece]:
    """Shard `rank` of `tp`: gate above up in the local tensor `fused`, columns of the third in `down`."""
    gate_proj, up_proj, down_proj = (name + f"{kind}_proj.weight" for kind in ("gate", "up", "down"))
    return [
        row_shard(gate_proj, fused, shapes[gate_proj], tp, rank),
        row_shard(up_proj, fused, shapes[up_proj], tp, rank, at=shapes[gate_proj][0] // tp),
        column_shard(down_proj, down, shapes[down_proj], tp, rank),
    ]


def dense_sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    shapes, norm, mlp = dense_tensors(config, name), name + "post_attention_layernorm.weight", name + "mlp."
    fused, down = mlp + "gate_up_proj.weight", mlp + "down_proj.weight"
    return [
        replicated(norm, norm, shapes[norm]),
        *_gated_shards(shapes, mlp, fused, down, place.tp, place.tp_rank),
    ]


DENSE = Block(dense_tensors, dense_megatron, dense_sglang)


# Hugging Face -> Megatron; every rank has all of them
_ROUTED_REPLICATED = {
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
}


def routed_tensors(config: ModelConfig, name: str) -> Shapes:
    """The tensors of the layer `name` ("model.layers.3.")."""
    moe = config.moe
    assert moe is not None
    shapes: Shapes = {
        name + "post_attention_layernorm.weight": (config.hidden_size,),
        name + "mlp.gate.weight": (moe.num_experts, config.hidden_size),
    }
    if moe.expert_bias:
        shapes[name + "mlp.gate.e_score_correction_bias"] = (moe.num_experts,)
    if moe.shared_ffn_hidden_size:
        shapes |= _gated(name + "mlp.shared_experts.", config.hidden_size, moe.shared_ffn_hidden_size)
    return shapes


def routed_megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    shapes, shared = routed_tensors(config, name), local + "mlp.shared_experts."
    pieces = [
        replicated(name + theirs, local + ours, shapes[name + theirs])
        for theirs, ours in _ROUTED_REPLICATED.items()
        if name + theirs in shapes
    ]
    fused, down = shared + "linear_fc1.weight", shared + "linear_fc2.weight"
    return pieces + _shared_experts(config, shapes, name, fused, down, place.tp, place.tp_rank)


def routed_sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    shapes, shared = routed_tensors(config, name), name + "mlp.shared_experts."
    pieces = [
        replicated(name + tensor, name + tensor, shapes[name + tensor])
        for tensor in _ROUTED_REPLICATED
        if name + tensor in shapes
    ]
    fused, down = shared + "gate_up_proj.weight", shared + "down_proj.weight"
    return pieces + _shared_experts(config, shapes, name, fused, down, place.tp, place.tp_rank)


def _shared_experts(
    config: ModelConfig, shapes: Shapes, name: str, fused: str, down: str, tp: int, rank: int
) -> list[Piece]:
    if not config.moe.shared_ffn_hidden_size:
        return []
    return _gated_shards(shapes, name + "mlp.shared_experts.", fused, down, tp, rank)


ROUTED = Block(routed_tensors, routed_megatron, routed_sglang)
"""A layer with routed experts, except for these."""


def expert_tensors(config: ModelConfig, name: str) -> Shapes:
    """The tensors of the layer `name` ("model.layers.3.")."""
    assert config.moe is not None
    return {
        tensor: shape
        for _, expert in _local_experts(config, name, 1, 0)
        for tensor, shape in _gated(expert, config.hidden_size, config.moe.ffn_hidden_size).items()
    }


def _local_experts(config: ModelConfig, name: str, ep: int, rank: int) -> Iterator[tuple[int, str]]:
    """A rank's experts: position among them, prefix of the name."""
    count = config.moe.num_experts // ep
    for index in range(count):
        yield index, f"{name}mlp.experts.{rank * count + index}."


def expert_megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    pieces = []
    for index, expert in _local_experts(config, name, place.ep, place.ep_rank):
        shapes = _gated(expert, config.hidden_size, config.moe.ffn_hidden_size)
        fused, down = (f"{local}mlp.experts.linear_{part}.weight{index}" for part in ("fc1", "fc2"))
        pieces += _gated_shards(shapes, expert, fused, down, place.etp, place.etp_rank)
    return pieces


def expert_sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    fused, down = name + "mlp.experts.w13_weight", name + "mlp.experts.w2_weight"
    pieces = []
    for index, expert in _local_experts(config, name, place.ep, place.ep_rank):
        shapes = _gated(expert, config.hidden_size, config.moe.ffn_hidden_size)
        for piece in _gated_shards(shapes, expert, fused, down, place.moe_tp, place.moe_tp_rank):
            start, size = piece.local_box
            pieces.append(piece._replace(local_box=Box((index, *start), (1, *size))))
    return pieces


EXPERTS = Block(expert_tensors, expert_megatron, expert_sglang)
