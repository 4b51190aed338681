"""Multi-token prediction layers of DeepSeek-V3's and GLM-4.5's checkpoints: their tensors, and where they lie.

Layer i of them is number `num_layers` + i of the checkpoint: an ordinary layer behind two norms and a projection, with a
final norm. It repeats the model's embedding and head (`copies`), which Megatron shares with it instead.
"""

from megarl.layout.boxes import Piece
from megarl.models.config import ModelConfig
from megarl.models.shards import MegatronPlace, Shapes, row_shard, whole

# Hugging Face -> Megatron; every rank has them whole
_NORMS = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}
_PROJECTION = "eh_proj.weight"
LAYER = "mtp_model_layer."  # what Megatron calls the ordinary layer in it


def logical(config: ModelConfig, name: str) -> Shapes:
    """What the layer `name` ("model.layers.61.") has beside an ordinary layer and the copies."""
    hidden = config.hidden_size
    shapes: Shapes = {name + norm: (hidden,) for norm in _NORMS}
    shapes[name + _PROJECTION] = (hidden, 2 * hidden)
    return shapes


def copies(config: ModelConfig) -> dict[str, str]:
    """The tensors of all MTP layers that repeat one of the model's -> that one."""
    found = {}
    for index in range(config.num_mtp_layers):
        name = f"model.layers.{config.num_layers + index}."
        found[name + "embed_tokens.weight"] = "model.embed_tokens.weight"
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        found[name + "shared_head.head.weight"] = head
    return found


def megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:mtp.layers.0.")."""
    shapes = logical(config, name)
    pieces = [whole(name + theirs, local + ours, shapes[name + theirs]) for theirs, ours in _NORMS.items()]
    projection = name + _PROJECTION
    return [
        *pieces,
        row_shard(projection, local + _PROJECTION, shapes[projection], place.tp, place.tp_rank),
    ]
