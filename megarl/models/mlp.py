"""The dense gated MLP: its tensors, and where they lie.

- Megatron: `linear_fc1` is [gate shard | up shard], with the norm before it.
- SGLang 0.5.21: `gate_up_proj` is [gate shard | up shard].
"""

from megarl.layout.boxes import Piece
from megarl.models.config import ModelConfig
from megarl.models.shards import MegatronPlace, SGLangPlace, Shapes, column_shard, row_shard, whole


def logical(config: ModelConfig, name: str) -> Shapes:
    """The tensors of the layer `name` ("model.layers.3.")."""
    norm = {name + "post_attention_layernorm.weight": (config.hidden_size,)}
    return norm | gated(name + "mlp.", config.hidden_size, config.ffn_hidden_size)


def gated(name: str, hidden: int, ffn: int) -> Shapes:
    """The three projections under `name` ("model.layers.3.mlp.")."""
    return {
        name + "gate_proj.weight": (ffn, hidden),
        name + "up_proj.weight": (ffn, hidden),
        name + "down_proj.weight": (hidden, ffn),
    }


def megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:decoder.layers.1.")."""
    shapes, norm, target = logical(config, name), name + "post_attention_layernorm.weight", local + "mlp."
    return [
        whole(norm, target + "linear_fc1.layer_norm_weight", shapes[norm]),
        *gated_shards(shapes, name + "mlp.", f"{target}linear_fc1.weight", f"{target}linear_fc2.weight",
                      place.tp, place.tp_rank),
    ]  # fmt: skip


def gated_shards(shapes: Shapes, name: str, fused: str, down: str, tp: int, rank: int) -> list[Piece]:
    """Shard `rank` of `tp`: gate above up in the local tensor `fused`, columns of the third in `down`."""
    gate_proj, up_proj, down_proj = (name + f"{kind}_proj.weight" for kind in ("gate", "up", "down"))
    return [
        row_shard(gate_proj, fused, shapes[gate_proj], tp, rank),
        row_shard(up_proj, fused, shapes[up_proj], tp, rank, at=shapes[gate_proj][0] // tp),
        column_shard(down_proj, down, shapes[down_proj], tp, rank),
    ]


def sglang(config: ModelConfig, place: SGLangPlace, name: str) -> list[Piece]:
    """The pieces of the layer `name` on an engine's rank."""
    shapes, norm, mlp = logical(config, name), name + "post_attention_layernorm.weight", name + "mlp."
    fused, down = mlp + "gate_up_proj.weight", mlp + "down_proj.weight"
    return [
        whole(norm, norm, shapes[norm]),
        *gated_shards(shapes, mlp, fused, down, place.tp, place.tp_rank),
    ]
