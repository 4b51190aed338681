"""The weight table of a model: Hugging Face <-> Megatron <-> SGLang, composed of its layers' tables (`layers`).

Logical names and shapes are the Hugging Face tensors'. Megatron pads the vocabulary to a multiple of 128 * tp, SGLang 0.5.21 to one
of 64.

Multi-token prediction layers (MTP) of DeepSeek-V3's and GLM-4.5's checkpoints: layer i of them is number `num_layers` + i of the
checkpoint, an ordinary layer behind two norms and a projection, with a final norm. It repeats the model's embedding and head
(`mtp_copies`), which Megatron shares with it instead. Qwen3-Next's and Qwen3.5's layer has names of its own (`mtp.`) and repeats nothing. SGLang
makes a second model of it, which drafts tokens (srt/models/deepseek_nextn.py, glm4_moe_nextn.py, glm4_moe_lite_nextn.py, qwen3_next_mtp.py
and qwen3_5_mtp.py); this has the model's own embedding and head, too.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from megarl.layout.boxes import Box, Piece
from megarl.models.config import ModelConfig
from megarl.models.layers import (
    SHARED,
    attention_weights,
    expert_weights,
    has_indexer,
    is_delta_net,
    is_mixture,
    layer_name,
    mlp_weights,
    prediction_name,
    prediction_weights,
)
from megarl.models.shards import (
    MegatronPlace,
    SGLangPlace,
    Shapes,
    Weight,
    megatron_shards,
    sglang_shards,
    vocab_shard,
)

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"  # the name that Hugging Face's sequence and token classifiers use
VALUE_HEAD_BIAS = "score.bias"  # that a token classifier has beside it
DRAFT = "draft:"  # begins the local names of what is in SGLang's second model
BUFFERS = re.compile(r"\.router\.expert_bias$|\.self_attention\.indexer\.")
"""Finds, by Megatron's local names, weights that are no parameters, indexers as long as they are not trained. Nothing trains them by a gradient."""
_MTP_LAYER = "mtp_model_layer."  # Megatron's name of the ordinary layer in an MTP layer

T = TypeVar("T")


def _mtp_layers(config: ModelConfig) -> range:
    return range(config.num_layers, config.num_layers + config.num_mtp_layers)


def logical_tensors(config: ModelConfig, head: str = "lm", mtp: bool = False) -> Shapes:
    """Hugging Face name -> shape.

    Args:
        head: "lm" for a policy, "value" for a model with a scalar head.
        mtp: with the multi-token prediction layers, and the tensors of the model that they repeat (`mtp_copies`).
    """
    hidden, vocabulary = config.hidden_size, (config.vocab_size, config.hidden_size)
    shapes: Shapes = {EMBEDDING: vocabulary}
    of_layer = once_a_kind(config, lambda layer: layer_tensors(config, layer))
    for layer in range(config.num_layers):
        shapes |= _named(of_layer(layer), layer_name(config, layer))
    for layer in _mtp_layers(config) if mtp else ():
        own = {weight.name: weight.shape for weight in prediction_weights(config)}
        shapes |= _named(own, prediction_name(config, layer))
        shapes |= _named(of_layer(layer), layer_name(config, layer))
    shapes[FINAL_NORM] = (hidden,)
    if head == "value":
        shapes[VALUE_HEAD] = (1, hidden)
    elif not config.tie_word_embeddings:
        shapes[LM_HEAD] = vocabulary
    return shapes | (dict.fromkeys(mtp_copies(config), vocabulary) if mtp else {})


def layer_tensors(config: ModelConfig, layer: int) -> Shapes:
    """The tensors of a layer: Hugging Face name, without the layer's -> shape."""
    weights = attention_weights(config, layer) + mlp_weights(config, layer)
    for expert in expert_weights(config) if is_mixture(config, layer) else ():
        weights += expert
    return {weight.name: weight.shape for weight in weights}


def _named(shapes: Shapes, name: str) -> Shapes:
    return {name + tensor: shape for tensor, shape in shapes.items()}


def once_a_kind(config: ModelConfig, make: Callable[[int], T]) -> Callable[[int], T]:
    """`make(layer)`, called once for all layers of a kind, which differ in their names alone: large models have thousands of experts in dozens
    of layers."""
    made: dict[tuple[bool, bool, bool], T] = {}

    def of_layer(layer: int) -> T:
        kind = kind_of_layer(config, layer)
        if kind not in made:
            made[kind] = make(layer)
        return made[kind]

    return of_layer


def kind_of_layer(config: ModelConfig, layer: int) -> tuple[bool, bool, bool]:
    """With a mixture or not, with a delta net or attention, with an indexer or not: tensors of layers of a kind differ in their names alone."""
    return is_mixture(config, layer), is_delta_net(config, layer), has_indexer(config, layer)


def kinds_of_layers(config: ModelConfig, layers: Iterable[int] | None = None) -> list[list[int]]:
    """Layers, grouped by their kind. `layers`: None: all of the model."""
    found: dict[tuple[bool, bool, bool], list[int]] = defaultdict(list)
    for layer in range(config.num_layers) if layers is None else layers:
        found[kind_of_layer(config, layer)].append(layer)
    return list(found.values())


def mtp_copies(config: ModelConfig) -> dict[str, str]:
    """Tensor of an MTP layer that repeats one of the model's -> the repeated one; Qwen3-Next's and Qwen3.5's files have none."""
    found: dict[str, str] = {}
    if config.has_qwen_names:
        return found
    for layer in _mtp_layers(config):
        found[f"model.layers.{layer}.embed_tokens.weight"] = EMBEDDING
        found[f"model.layers.{layer}.shared_head.head.weight"] = (
            EMBEDDING if config.tie_word_embeddings else LM_HEAD
        )
    return found


def keeps_float32(tensor: str) -> bool:
    """Whether a tensor is float32 whatever the model's type: in published files, in Megatron and in SGLang."""
    return tensor.endswith("e_score_correction_bias") or ".indexer.k_norm." in tensor


def sglang_keeps_float32(config: ModelConfig, tensor: str) -> bool:
    """Whether SGLang 0.5.21 holds a tensor in float32 whatever the engine's type: routers of the GLM and MiniMax families, biases of experts
    and decays of gated delta nets, too."""
    if ".mlp.experts." in tensor and tensor.endswith(".bias"):
        return True
    routers = config.family in ("glm4_moe", "glm4_moe_lite", "minimax_m2") and tensor.endswith(".gate.weight")
    return keeps_float32(tensor) or routers or tensor.endswith(".linear_attn.A_log")


def padded_vocab_size(config: ModelConfig, tp: int) -> int:
    """Megatron's rule: the vocabulary rounded up to a multiple of 128 * tp."""
    unit = 128 * tp
    return -(-config.vocab_size // unit) * unit


CHUNK_BYTES = 1 << 30


def head_chunk_tokens(rows: int, itemsize: int, configured: int | None) -> int:
    """Tokens whose logits exist at one time on a GPU: `configured`, or as many as have 1 GiB of them.

    Larger chunks keep more logits for the backward pass, and pass over the output weight's gradient less often (eight bytes an
    element each time); at 1 GiB one takes a fifth of its product for that with 152,000 rows of width 3584, while 1,024 tokens took 70 %.
    Passes without gradients have the same chunks, though smaller ones would do: so their products have the shapes of the update's, and
    no choice of a kernel makes log-probs differ.

    Args:
        rows: of the output weight on a rank. itemsize: bytes of a logit, in the model's type.
    """
    return max(1, CHUNK_BYTES // (max(1, rows) * itemsize)) if configured is None else configured


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
    pieces: list[Piece] = []
    if first_stage and part != "experts":
        pieces += _megatron_vocab(config, place, EMBEDDING, "0:embedding.word_embeddings.weight")
    layer_pieces = once_a_kind(config, lambda layer: _megatron_layer(config, place, layer, part))
    for chunk, numbers in enumerate(layers):
        for index, layer in enumerate(numbers):
            pieces += _in_layer(
                layer_pieces(layer), layer_name(config, layer), f"{chunk}:decoder.layers.{index}."
            )
    if last_stage and part != "experts":
        pieces += _megatron_end(config, place, head, len(layers) - 1, first_stage)
    if last_stage and mtp:
        assert head == "lm", "a model with a value head has no MTP layers"
        pieces += _megatron_mtp(config, place, part, len(layers) - 1, first_stage)
    return pieces


def _megatron_layer(config: ModelConfig, place: MegatronPlace, layer: int, part: str) -> list[Piece]:
    """The pieces of a layer on a Megatron rank; logical and local names lack the layer's."""
    pieces: list[Piece] = []
    if part != "experts":
        for table in (attention_weights(config, layer), mlp_weights(config, layer)):
            pieces += megatron_shards(table, "", "", place.tp, place.tp_rank)
    if part != "dense" and is_mixture(config, layer):
        experts = expert_weights(config, place.ep, place.ep_rank)
        for shards in _expert_shards(
            experts, lambda it: megatron_shards(it, "", "", place.etp, place.etp_rank)
        ):
            pieces += [Piece(weight.name, box, weight.megatron, at) for weight, box, at in shards]
    return pieces


def _expert_shards(
    experts: Iterable[list[Weight]], cut: Callable[[list[Weight]], Iterable[Piece]]
) -> Iterator[list[tuple[Weight, Box, Box]]]:
    """The shards of each expert: a weight, the part of it, and where that lies. `cut` gives an expert's pieces, and is called for the first
    one alone: a layer has hundreds, which differ in their names alone."""
    shards: list[tuple[int, Box, Box]] | None = None
    for weights in experts:
        if shards is None:
            numbers = {weight.name: number for number, weight in enumerate(weights)}
            shards = [(numbers[tensor], box, at) for tensor, box, _, at in cut(weights)]
        yield [(weights[number], box, at) for number, box, at in shards]


def _in_layer(pieces: list[Piece], name: str, local: str) -> list[Piece]:
    """The pieces of a layer with their full names: `name` begins the logical ones, `local` the local ones."""
    return [Piece(name + tensor, box, local + within, place) for tensor, box, within, place in pieces]


def _megatron_vocab(config: ModelConfig, place: MegatronPlace, tensor: str, local: str) -> list[Piece]:
    shape, padded = (config.vocab_size, config.hidden_size), padded_vocab_size(config, place.tp)
    return vocab_shard(tensor, local, shape, padded, place.tp, place.tp_rank)


def _replicated(tensor: str, local: str, shape: tuple[int, ...]) -> Piece:
    """The full tensor, on every rank."""
    return Piece(tensor, Box.whole(shape), local, Box.whole(shape))


def _megatron_end(
    config: ModelConfig, place: MegatronPlace, head: str, chunk: int, embeds: bool
) -> list[Piece]:
    """Final norm and head in model chunk `chunk`; `embeds`: the rank has the embedding, too."""
    pieces = [_replicated(FINAL_NORM, f"{chunk}:decoder.final_layernorm.weight", (config.hidden_size,))]
    if head == "value":
        return [*pieces, _replicated(VALUE_HEAD, f"{chunk}:value_head.weight", (1, config.hidden_size))]
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
        own, local = prediction_name(config, layer), f"{chunk}:mtp.layers.{index}."
        if part != "experts":
            pieces += megatron_shards(prediction_weights(config), own, local, place.tp, place.tp_rank)
        within = _megatron_layer(config, place, layer, part)
        pieces += _in_layer(within, layer_name(config, layer), local + _MTP_LAYER)
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


def sglang_pieces(
    config: ModelConfig,
    place: SGLangPlace,
    part: str = "all",
    draft: bool = False,
    layers: Iterable[int] | None = None,
) -> list[Piece]:
    """The pieces of one SGLang rank; local names are SGLang's own parameter names.

    Args:
        part: one of PARTS.
        draft: with the model that drafts tokens, whose local names begin with DRAFT.
        layers: of the model's own only these; None: all.

    Raises:
        ValueError: `draft` for a model that does not have exactly one multi-token prediction layer.
    """
    ends, attention = part != "experts", (place.attention_tp, place.attention_tp_rank)
    pieces: list[Piece] = []
    if ends:
        pieces += _sglang_vocab(config, EMBEDDING, *attention)
    layer_pieces = once_a_kind(config, lambda layer: _sglang_layer(config, place, layer, part))
    for layer in range(config.num_layers) if layers is None else layers:
        pieces += _in_layer(layer_pieces(layer), layer_name(config, layer), f"model.layers.{layer}.")
    if ends:
        pieces.append(_replicated(FINAL_NORM, FINAL_NORM, (config.hidden_size,)))
        if not config.tie_word_embeddings:
            pieces += _sglang_vocab(config, LM_HEAD, *place.head)
    return pieces + _sglang_draft(config, place, part) if draft else pieces


def _sglang_draft(config: ModelConfig, place: SGLangPlace, part: str) -> list[Piece]:
    if config.num_mtp_layers != 1:
        raise ValueError(
            f"{config.num_mtp_layers} multi-token prediction layers (num_nextn_predict_layers): SGLang drafts tokens with one"
        )
    (layer,) = _mtp_layers(config)
    pieces: list[Piece] = []
    own, decoder = ("", "model.layers.0.") if config.has_qwen_names else ("model.", "model.decoder.")
    if part != "experts":  # every rank has the complete projection
        shards = [*sglang_shards(prediction_weights(config), "", 1, 0)]
        pieces += _in_layer(shards, prediction_name(config, layer), DRAFT + own)
    within = _sglang_layer(config, place, layer, part)
    return pieces + _in_layer(within, layer_name(config, layer), DRAFT + decoder)


def _sglang_layer(config: ModelConfig, place: SGLangPlace, layer: int, part: str) -> list[Piece]:
    """The pieces of a layer on a rank of an engine; logical and local names lack the layer's."""
    pieces: list[Piece] = []
    if part != "experts":
        attention = (place.attention_tp, place.attention_tp_rank)
        pieces += sglang_shards(attention_weights(config, layer), "", *attention)
        shared: list[Weight] = []
        cut: list[Weight] = []
        for weight in mlp_weights(config, layer):
            (shared if place.whole_shared and weight.name.startswith(SHARED) else cut).append(weight)
        pieces += [*sglang_shards(cut, "", place.tp, place.tp_rank), *sglang_shards(shared, "", 1, 0)]
    if part != "dense" and is_mixture(config, layer):
        pieces += _sglang_experts(config, place)
    return pieces


def _sglang_experts(config: ModelConfig, place: SGLangPlace) -> list[Piece]:
    """The routed experts of a layer, stacked along a first dimension."""
    pieces = []
    experts = expert_weights(config, place.ep, place.ep_rank)
    shards = _expert_shards(experts, lambda it: sglang_shards(it, "", place.moe_tp, place.moe_tp_rank))
    for index, expert in enumerate(shards):
        for weight, box, (start, size) in expert:
            first: tuple[int, ...] = (index,)
            if config.family == "gpt_oss":
                if weight.sglang.endswith("w2_weight_bias") and place.moe_tp_rank:
                    continue
                if ".w13_" in weight.sglang:
                    first, start = (index, start[0] // size[0]), (0, *start[1:])
            at = Box((*first, *start), (*(1 for _ in first), *size))
            pieces.append(Piece(weight.name, box, weight.sglang, at))
    return pieces


def sglang_padding(config: ModelConfig, place: SGLangPlace) -> dict[str, int]:
    """Local parameter -> its elements that no weight fills on an engine's rank: the vocabulary's padding, and biases that another rank adds."""
    cuts = {EMBEDDING: (place.attention_tp, place.attention_tp_rank)}
    if not config.tie_word_embeddings:
        cuts[LM_HEAD] = place.head
    padding = {}
    for name, (tp, rank) in cuts.items():
        share = sglang_vocab_share(config, tp)
        real = max(0, min(share, config.vocab_size - rank * share))
        if real < share:
            padding[name] = (share - real) * config.hidden_size
    if config.moe is not None and config.moe.biases and place.moe_tp_rank:
        unfilled = config.moe.num_experts // place.ep * config.hidden_size
        for layer in range(config.num_layers):
            padding[f"model.layers.{layer}.mlp.experts.w2_weight_bias"] = unfilled
    return padding
