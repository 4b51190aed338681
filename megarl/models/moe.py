"""What a layer with routed experts has beside them: norm, router, shared experts; and where these lie.

- Megatron: unlike that of a dense MLP, the norm is a module of its own. Shared experts are cut over tensor parallel
  ranks as a dense MLP is, [gate shard | up shard].
- SGLang 0.5.21, shared experts not fused with the routed ones: the same cut over all ranks of an engine.
"""

from megarl.layout.boxes import Piece
from megarl.models.config import ModelConfig
from megarl.models.mlp import gated, gated_shards
from megarl.models.shards import MegatronPlace, SGLangPlace, Shapes, whole

# Hugging Face -> Megatron; every rank has them whole
_WHOLE = {
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
}


def logical(config: ModelConfig, name: str) -> Shapes:
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
        shapes |= gated(name + "mlp.shared_experts.", config.hidden_size, moe.shared_ffn_hidden_size)
    return shapes


def megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    shapes, shared = logical(config, name), local + "mlp.shared_experts."
    pieces = [
        whole(name + theirs, local + ours, shapes[name + theirs])
        for theirs, ours in _WHOLE.items()
        if name + theirs in shapes
    ]
    fused, down = shared + "linear_fc1.weight", shared + "linear_fc2.weight"
    return pieces + _shared(config, shapes, name, fused, down, place.tp, place.tp_rank)


def sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    shapes, shared = logical(config, name), name + "mlp.shared_experts."
    pieces = [
        whole(name + tensor, name + tensor, shapes[name + tensor])
        for tensor in _WHOLE
        if name + tensor in shapes
    ]
    fused, down = shared + "gate_up_proj.weight", shared + "down_proj.weight"
    return pieces + _shared(config, shapes, name, fused, down, place.tp, place.tp_rank)


def _shared(
    config: ModelConfig, shapes: Shapes, name: str, fused: str, down: str, tp: int, rank: int
) -> list[Piece]:
    if not config.moe.shared_ffn_hidden_size:
        return []
    return gated_shards(shapes, name + "mlp.shared_experts.", fused, down, tp, rank)
