"""The weight table of a model: Hugging Face <-> Megatron <-> SGLang, put together from that of its blocks.

Logical names and shapes are the Hugging Face tensors'. Each block (`gqa`, `mla`, `mlp`, `moe`, `experts`) is a module with
`logical`, `megatron` and `sglang`; here are the embedding, the head, and which blocks a layer has. Megatron pads the
vocabulary to a multiple of 128 * tp, SGLang 0.5.21 to one of 64.
"""

from types import ModuleType

from megarl.layout.boxes import Piece
from megarl.models import experts, gqa, mla, mlp, moe
from megarl.models import mtp as mtp_layer
from megarl.models.config import ModelConfig
from megarl.models.shards import MegatronPlace, SGLangPlace, Shapes, vocab_shard, whole

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"  # the name that Hugging Face's sequence and token classifiers use


def _blocks(config: ModelConfig, layer: int, part: str = "all") -> tuple[ModuleType, ...]:
    """The modules of a layer's attention and of its MLP, as far as they belong to `part`; MTP layers come last."""
    attention = gqa if config.mla is None else mla
    if config.moe is None or layer in config.moe.dense_layers:
        return () if part == "experts" else (attention, mlp)
    return {"dense": (attention, moe), "experts": (experts,), "all": (attention, moe, experts)}[part]


def _mtp_layers(config: ModelConfig) -> range:
    return range(config.num_layers, config.num_layers + config.num_mtp_layers)


def logical_tensors(config: ModelConfig, head: str = "lm", mtp: bool = False) -> Shapes:
    """Hugging Face name -> shape.

    Args:
        head: "lm" for a policy, "value" for a model with a scalar head.
        mtp: with the multi-token prediction layers, and what they repeat of the model (`mtp_copies`).
    """
    shapes: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for block in _blocks(config, layer):
            shapes |= block.logical(config, f"model.layers.{layer}.")
    for layer in _mtp_layers(config) if mtp else ():
        for block in (mtp_layer, *_blocks(config, layer)):
            shapes |= block.logical(config, f"model.layers.{layer}.")
    shapes[FINAL_NORM] = (config.hidden_size,)
    if head == "value":
        shapes[VALUE_HEAD] = (1, config.hidden_size)
    elif not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    if mtp:
        shapes |= dict.fromkeys(mtp_layer.copies(config), (config.vocab_size, config.hidden_size))
    return shapes


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
    """What one Megatron rank holds; local names are "<chunk>:<parameter>".

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
    pieces = [whole(FINAL_NORM, f"{chunk}:decoder.final_layernorm.weight", (config.hidden_size,))]
    if head == "value":
        return [*pieces, whole(VALUE_HEAD, f"{chunk}:value_head.weight", (1, config.hidden_size))]
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
            pieces += mtp_layer.megatron(config, place, name, local)
        for block in _blocks(config, layer, part):
            pieces += block.megatron(config, place, name, local + mtp_layer.LAYER)
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
    """What one SGLang rank holds; local names are SGLang's own parameter names. `part`: one of PARTS."""
    ends, pieces = part != "experts", []
    if ends:
        pieces += _sglang_vocab(config, EMBEDDING, place.attention_tp, place.attention_tp_rank)
    for layer in range(config.num_layers):
        for block in _blocks(config, layer, part):
            pieces += block.sglang(config, place, f"model.layers.{layer}.")
    if ends:
        pieces.append(whole(FINAL_NORM, FINAL_NORM, (config.hidden_size,)))
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
