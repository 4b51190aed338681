"""The weight table of a model: Hugging Face <-> Megatron <-> SGLang, composed of its blocks' tables.

Logical names and shapes are the Hugging Face tensors'. The blocks are in `attention` and `mlp`; this module has the embedding, the
head, multi-token prediction layers, and the choice of a layer's blocks. Megatron pads the vocabulary to a multiple of 128 * tp,
SGLang 0.5.21 to one of 64.
"""

from megarl.layout.boxes import Piece
from megarl.models.attention import GQA, MLA
from megarl.models.config import ModelConfig
from megarl.models.mlp import DENSE, EXPERTS, ROUTED
from megarl.models.shards import Block, MegatronPlace, SGLangPlace, Shapes, replicated, row_shard, vocab_shard

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"  # the name that Hugging Face's sequence and token classifiers use


def _blocks(config: ModelConfig, layer: int, part: str = "all") -> tuple[Block, ...]:
    """A layer's attention and MLP, as far as they belong to `part` of PARTS; MTP layers have numbers after the others'."""
    attention = GQA if config.mla is None else MLA
    if config.moe is None or layer in config.moe.dense_layers:
        return () if part == "experts" else (attention, DENSE)
    return {"dense": (attention, ROUTED), "experts": (EXPERTS,), "all": (attention, ROUTED, EXPERTS)}[part]


def _mtp_layers(config: ModelConfig) -> range:
    return range(config.num_layers, config.num_layers + config.num_mtp_layers)


def logical_tensors(config: ModelConfig, head: str = "lm", mtp: bool = False) -> Shapes:
    """Hugging Face name -> shape.

    Args:
        head: "lm" for a policy, "value" for a model with a scalar head.
        mtp: with the multi-token prediction layers, and the tensors of the model that they repeat (`mtp_copies`).
    """
    shapes: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for block in _blocks(config, layer):
            shapes |= block.tensors(config, f"model.layers.{layer}.")
    for layer in _mtp_layers(config) if mtp else ():
        name = f"model.layers.{layer}."
        shapes |= _mtp_tensors(config, name)
        for block in _blocks(config, layer):
            shapes |= block.tensors(config, name)
    shapes[FINAL_NORM] = (config.hidden_size,)
    if head == "value":
        shapes[VALUE_HEAD] = (1, config.hidden_size)
    elif not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    if mtp:
        shapes |= dict.fromkeys(mtp_copies(config), (config.vocab_size, config.hidden_size))
    return shapes


# Multi-token prediction layers (MTP) of DeepSeek-V3's and GLM-4.5's checkpoints. Layer i of them is number `num_layers` + i of the
# checkpoint: an ordinary layer behind two norms and a projection, with a final norm. It repeats the model's embedding and head
# (`mtp_copies`), which Megatron shares with it instead.

# Hugging Face -> Megatron; every rank has all of them
_MTP_NORMS = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}
_MTP_PROJECTION = "eh_proj.weight"
_MTP_LAYER = "mtp_model_layer."  # Megatron's name of the ordinary layer in it


def _mtp_tensors(config: ModelConfig, name: str) -> Shapes:
    """Tensors of the layer `name` ("model.layers.61.") other than an ordinary layer's and the copies."""
    hidden = config.hidden_size
    shapes: Shapes = {name + norm: (hidden,) for norm in _MTP_NORMS}
    shapes[name + _MTP_PROJECTION] = (hidden, 2 * hidden)
    return shapes


def mtp_copies(config: ModelConfig) -> dict[str, str]:
    """Tensor of an MTP layer that repeats one of the model's -> the repeated one."""
    found = {}
    for index in range(config.num_mtp_layers):
        name = f"model.layers.{config.num_layers + index}."
        found[name + "embed_tokens.weight"] = "model.embed_tokens.weight"
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        found[name + "shared_head.head.weight"] = head
    return found


def _mtp_megatron(config: ModelConfig, place: MegatronPlace, name: str, local: str) -> list[Piece]:
    """The pieces of the layer `name` on a rank, where it is called `local` ("0:mtp.layers.0.")."""
    shapes = _mtp_tensors(config, name)
    pieces = [
        replicated(name + theirs, local + ours, shapes[name + theirs]) for theirs, ours in _MTP_NORMS.items()
    ]
    projection = name + _MTP_PROJECTION
    return [
        *pieces,
        row_shard(projection, local + _MTP_PROJECTION, shapes[projection], place.tp, place.tp_rank),
    ]


def keeps_float32(tensor: str) -> bool:
    """Whether a tensor is float32 whatever the model's type: in published files, in Megatron and in SGLang."""
    return tensor.endswith("e_score_correction_bias")


def sglang_keeps_float32(config: ModelConfig, tensor: str) -> bool:
    """Whether SGLang 0.5.21 holds a tensor in float32 whatever the engine's type: GLM-4.5's routers, too."""
    return keeps_float32(tensor) or (config.family == "glm4_moe" and tensor.endswith(".mlp.gate.weight"))


def padded_vocab_size(config: ModelConfig, tp: int) -> int:
    """Megatron's rule: the vocabulary rounded up to a multiple of 128 * tp."""
    unit = 128 * tp
    return -(-config.vocab_size // unit) * unit


def megatron_pieces(
    config: ModelConfig,
    place: MegatronPlace,
    *,
    layers: list[list[int]],
    first_stage: bool,
    last_stage: bool,
    head: str = "lm",
    part: str = "all",
    mtp: bool = False,
) -> list[Piece]:
    """The pieces of one Megatron rank; local names are "<chunk>:<parameter>".

    Args:
        layers: per model chunk (one, or one per virtual stage) the global numbers of its layers, from 0.
        first_stage, last_stage: whether the rank's first chunk embeds, its last chunk has the head.
        part: one of PARTS.
        mtp: whether the model is built with its multi-token prediction layers, at the end of the last stage.
    """
    pieces, last_chunk = [], len(layers) - 1
    if first_stage and part != "experts":
        pieces += _megatron_vocab(config, place, EMBEDDING, "0:embedding.word_embeddings.weight")
    for chunk, numbers in enumerate(layers):
        for index, layer in enumerate(numbers):
            name, local = f"model.layers.{layer}.", f"{chunk}:decoder.layers.{index}."
            for block in _blocks(config, layer, part):
                pieces += block.megatron(config, place, name, local)
    if last_stage and part != "experts":
        pieces += _megatron_end(config, place, head, last_chunk, first_stage)
    if last_stage and mtp:
        assert head == "lm", "a model with a value head has no MTP layers"
        pieces += _megatron_mtp(config, place, part, last_chunk, first_stage)
    return pieces


def _megatron_vocab(config: ModelConfig, place: MegatronPlace, tensor: str, local: str) -> list[Piece]:
    shape, padded = (config.vocab_size, config.hidden_size), padded_vocab_size(config, place.tp)
    return vocab_shard(tensor, local, shape, padded, place.tp, place.tp_rank)


def _megatron_end(
    config: ModelConfig, place: MegatronPlace, head: str, chunk: int, embeds: bool
) -> list[Piece]:
    """Final norm and head in model chunk `chunk`; `embeds`: the rank has the embedding, too."""
    pieces = [replicated(FINAL_NORM, f"{chunk}:decoder.final_layernorm.weight", (config.hidden_size,))]
    if head == "value":
        return [*pieces, replicated(VALUE_HEAD, f"{chunk}:value_head.weight", (1, config.hidden_size))]
    if config.tie_word_embeddings and embeds:  # the output layer has no weight of its own
        return pieces
    tensor = EMBEDDING if config.tie_word_embeddings else LM_HEAD
    return pieces + _megatron_vocab(config, place, tensor, f"{chunk}:output_layer.weight")


def _megatron_mtp(
    config: ModelConfig, place: MegatronPlace, part: str, chunk: int, embeds: bool
) -> list[Piece]:
    """MTP layers in model chunk `chunk`; where no embedding is on the rank, they bring one."""
    pieces = []
    if part != "experts" and not embeds and config.num_mtp_layers:
        pieces += _megatron_vocab(config, place, EMBEDDING, f"{chunk}:embedding.word_embeddings.weight")
    for index, layer in enumerate(_mtp_layers(config)):
        name, local = f"model.layers.{layer}.", f"{chunk}:mtp.layers.{index}."
        if part != "experts":
            pieces += _mtp_megatron(config, place, name, local)
        for block in _blocks(config, layer, part):
            pieces += block.megatron(config, place, name, local + _MTP_LAYER)
    return pieces


def sglang_vocab_share(config: ModelConfig, tp: int) -> int:
    """Rows of the vocabulary that each of `tp` SGLang ranks holds, padding included."""
    padded = -(-config.vocab_size // 64) * 64
    if padded % tp:  # on a GPU SGLang refuses to start; on a CPU it pads further
        padded = -(-config.vocab_size // (64 * tp)) * 64 * tp
    return padded // tp


def _sglang_vocab(config: ModelConfig, tensor: str, tp: int, rank: int) -> list[Piece]:
    shape, padded = (config.vocab_size, config.hidden_size), sglang_vocab_share(config, tp) * tp
    return vocab_shard(tensor, tensor, shape, padded, tp, rank)


def sglang_pieces(config: ModelConfig, place: SGLangPlace, part: str = "all") -> list[Piece]:
    """The pieces of one SGLang rank; local names are SGLang's own parameter names. `part`: one of PARTS."""
    ends, pieces = part != "experts", []
    if ends:
        pieces += _sglang_vocab(config, EMBEDDING, place.attention_tp, place.attention_tp_rank)
    for layer in range(config.num_layers):
        for block in _blocks(config, layer, part):
            pieces += block.sglang(config, place, f"model.layers.{layer}.")
    if ends:
        pieces.append(replicated(FINAL_NORM, FINAL_NORM, (config.hidden_size,)))
        if not config.tie_word_embeddings:
            pieces += _sglang_vocab(config, LM_HEAD, place.tp, place.tp_rank)
    return pieces


def sglang_padding(config: ModelConfig, place: SGLangPlace) -> dict[str, int]:
    """Local parameter -> its elements that no weight fills on an engine's rank: the vocabulary's padding."""
    cuts = {EMBEDDING: (place.attention_tp, place.attention_tp_rank)}
    if not config.tie_word_embeddings:
        cuts[LM_HEAD] = (place.tp, place.tp_rank)
    padding = {}
    for name, (tp, rank) in cuts.items():
        share = sglang_vocab_share(config, tp)
        real = max(0, min(share, config.vocab_size - rank * share))
        if real < share:
            padding[name] = (share - real) * config.hidden_size
    return padding
