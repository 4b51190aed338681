"""The weight table of dense decoders (Llama, Qwen2): Hugging Face <-> Megatron <-> SGLang.

Logical names and shapes are the Hugging Face tensors'. How the two shard and fuse them:
- Megatron (Transformer Engine's parameter names): `linear_qkv` interleaves by query group
  [q heads of the group | k | v]; `linear_fc1` is [gate shard | up shard]; the vocabulary is padded to a
  multiple of 128 * tp.
- SGLang 0.5.21: `qkv_proj` is [q shard | k shard | v shard], key/value heads replicated where tp exceeds
  them; `gate_up_proj` is [gate shard | up shard]; the vocabulary is padded to a multiple of 64.
"""

from megarl.layout.boxes import Box, Piece
from megarl.models.config import ModelConfig

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"  # the name that Hugging Face's sequence and token classifiers use


def logical_tensors(config: ModelConfig, head: str = "lm") -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape. `head`: "lm" for a policy, "value" for a model with a scalar head."""
    hidden, ffn, dim = config.hidden_size, config.ffn_hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_query_groups * dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}."
        shapes[name + "input_layernorm.weight"] = (hidden,)
        for projection, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{name}self_attn.{projection}_proj.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{name}self_attn.{projection}_proj.bias"] = (rows,)
        shapes[name + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes[name + "post_attention_layernorm.weight"] = (hidden,)
        shapes[name + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[name + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[name + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes[FINAL_NORM] = (hidden,)
    if head == "value":
        shapes[VALUE_HEAD] = (1, hidden)
    elif not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def padded_vocab_size(config: ModelConfig, tp: int) -> int:
    """Megatron's rule: the vocabulary rounded up to a multiple of 128 * tp."""
    unit = 128 * tp
    return -(-config.vocab_size // unit) * unit


def _whole(tensor: str, local: str, shape: tuple[int, ...]) -> Piece:
    return Piece(tensor, Box.whole(shape), local, Box.whole(shape))


def _row_shard(tensor: str, local: str, shape: tuple[int, ...], tp: int, rank: int, at: int = 0) -> Piece:
    """Shard `rank` of `tp` equal row shards, lying from row `at` of the local tensor."""
    count = shape[0] // tp
    return Piece(tensor, Box.rows(rank * count, count, shape), local, Box.rows(at, count, shape))


def _column_shard(tensor: str, local: str, shape: tuple[int, ...], tp: int, rank: int) -> Piece:
    count = shape[-1] // tp
    return Piece(tensor, Box.columns(rank * count, count, shape), local, Box.columns(0, count, shape))


def _vocab_shard(
    tensor: str, local: str, shape: tuple[int, ...], padded: int, tp: int, rank: int
) -> list[Piece]:
    """The real rows among this rank's share of the padded vocabulary (none, where all are padding)."""
    share = padded // tp
    count = min(share, shape[0] - rank * share)
    if count <= 0:
        return []
    return [Piece(tensor, Box.rows(rank * share, count, shape), local, Box.rows(0, count, shape))]


def megatron_pieces(
    config: ModelConfig,
    *,
    tp: int,
    tp_rank: int,
    layers: list[list[int]],
    first_stage: bool,
    last_stage: bool,
    head: str = "lm",
) -> list[Piece]:
    """What one Megatron rank holds; local names are "<chunk>:<parameter>".

    Args:
        layers: per model chunk (one, or one per virtual stage) the global numbers of its layers, from 0.
        first_stage, last_stage: whether the rank's first chunk embeds, its last chunk has the head.
    """
    shapes = logical_tensors(config, head)
    padded, last_chunk = padded_vocab_size(config, tp), len(layers) - 1
    tied = config.tie_word_embeddings and head == "lm"
    pieces: list[Piece] = []
    if first_stage:
        local = "0:embedding.word_embeddings.weight"
        pieces += _vocab_shard(EMBEDDING, local, shapes[EMBEDDING], padded, tp, tp_rank)
    for chunk, numbers in enumerate(layers):
        for index, layer in enumerate(numbers):
            pieces += _megatron_layer(config, shapes, tp, tp_rank, f"{chunk}:decoder.layers.{index}.", layer)
    if last_stage:
        pieces.append(_whole(FINAL_NORM, f"{last_chunk}:decoder.final_layernorm.weight", shapes[FINAL_NORM]))
        if head == "value":
            pieces.append(_whole(VALUE_HEAD, f"{last_chunk}:value_head.weight", shapes[VALUE_HEAD]))
        elif not tied or not first_stage:  # tied on one stage: the output layer has no weight of its own
            tensor = EMBEDDING if tied else LM_HEAD
            local = f"{last_chunk}:output_layer.weight"
            pieces += _vocab_shard(tensor, local, shapes[tensor], padded, tp, tp_rank)
    return pieces


def _megatron_layer(
    config: ModelConfig,
    shapes: dict[str, tuple[int, ...]],
    tp: int,
    rank: int,
    local: str,
    layer: int,
) -> list[Piece]:
    name = f"model.layers.{layer}."
    attention, mlp = local + "self_attention.", local + "mlp."
    norm, ffn_norm = name + "input_layernorm.weight", name + "post_attention_layernorm.weight"
    pieces = [_whole(norm, attention + "linear_qkv.layer_norm_weight", shapes[norm])]
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        pieces += _interleaved_qkv(
            config, shapes, name + "self_attn.", attention + "linear_qkv.", kind, tp, rank
        )
    output, down = name + "self_attn.o_proj.weight", name + "mlp.down_proj.weight"
    pieces.append(_column_shard(output, attention + "linear_proj.weight", shapes[output], tp, rank))
    pieces.append(_whole(ffn_norm, mlp + "linear_fc1.layer_norm_weight", shapes[ffn_norm]))
    gate, up, fc1 = name + "mlp.gate_proj.weight", name + "mlp.up_proj.weight", mlp + "linear_fc1.weight"
    pieces.append(_row_shard(gate, fc1, shapes[gate], tp, rank))
    pieces.append(_row_shard(up, fc1, shapes[up], tp, rank, at=shapes[gate][0] // tp))
    pieces.append(_column_shard(down, mlp + "linear_fc2.weight", shapes[down], tp, rank))
    return pieces


def _interleaved_qkv(
    config: ModelConfig,
    shapes: dict[str, tuple[int, ...]],
    name: str,
    local: str,
    kind: str,
    tp: int,
    rank: int,
) -> list[Piece]:
    """Megatron's order: for each query group of the rank its query heads, its key head, its value head."""
    dim, groups = config.head_dim, config.num_query_groups // tp
    heads = config.num_attention_heads // config.num_query_groups
    pieces, at = [], 0
    for group in range(rank * groups, (rank + 1) * groups):
        for projection, rows in (("q", heads * dim), ("k", dim), ("v", dim)):
            tensor = f"{name}{projection}_proj.{kind}"
            shape = shapes[tensor]
            box = Box.rows(group * rows, rows, shape)
            pieces.append(Piece(tensor, box, local + kind, Box.rows(at, rows, shape)))
            at += rows
    return pieces


def sglang_vocab_share(config: ModelConfig, tp: int) -> int:
    """Rows of the vocabulary that each SGLang rank holds, padding included."""
    return -(-config.vocab_size // 64) * 64 // tp


def sglang_pieces(config: ModelConfig, *, tp: int, tp_rank: int) -> list[Piece]:
    """What one SGLang rank holds; local names are SGLang's own parameter names."""
    shapes = logical_tensors(config)
    padded = sglang_vocab_share(config, tp) * tp
    pieces = _vocab_shard(EMBEDDING, EMBEDDING, shapes[EMBEDDING], padded, tp, tp_rank)
    for layer in range(config.num_layers):
        pieces += _sglang_layer(config, shapes, f"model.layers.{layer}.", tp, tp_rank)
    pieces.append(_whole(FINAL_NORM, FINAL_NORM, shapes[FINAL_NORM]))
    if not config.tie_word_embeddings:
        pieces += _vocab_shard(LM_HEAD, LM_HEAD, shapes[LM_HEAD], padded, tp, tp_rank)
    return pieces


def _sglang_layer(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], name: str, tp: int, rank: int
) -> list[Piece]:
    pieces = [
        _whole(name + norm, name + norm, shapes[name + norm])
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight")
    ]
    replicas = max(1, tp // config.num_query_groups)  # ranks that share a key/value head
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        local, at = f"{name}self_attn.qkv_proj.{kind}", 0
        for projection, shards in (("q", tp), ("k", tp // replicas), ("v", tp // replicas)):
            tensor = f"{name}self_attn.{projection}_proj.{kind}"
            shard = rank if projection == "q" else rank // replicas
            pieces.append(_row_shard(tensor, local, shapes[tensor], shards, shard, at))
            at += shapes[tensor][0] // shards
    output, down = name + "self_attn.o_proj.weight", name + "mlp.down_proj.weight"
    gate, up, fused = (
        name + "mlp.gate_proj.weight",
        name + "mlp.up_proj.weight",
        name + "mlp.gate_up_proj.weight",
    )
    pieces.append(_column_shard(output, output, shapes[output], tp, rank))
    pieces.append(_row_shard(gate, fused, shapes[gate], tp, rank))
    pieces.append(_row_shard(up, fused, shapes[up], tp, rank, at=shapes[gate][0] // tp))
    pieces.append(_column_shard(down, down, shapes[down], tp, rank))
    return pieces
