"""The slices that each rank of an engine takes from unsharded Hugging Face tensors.

SGLang's layout is written down here a second time, by hand, so that the tests of this room do not
depend on the weight tables of `megarl.models`.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class Slices:
    """The slices of one TP rank, each as (HF name, local name, local start, values), and its padding by parameter."""

    entries: list[tuple[str, str, list[int], torch.Tensor]] = field(default_factory=list)
    padding: dict[str, int] = field(default_factory=dict)


def rank_slices(
    state: dict[str, torch.Tensor],
    config,
    tp: int,
    rank: int,
    ep: int = 1,
    dp: int = 1,
    dp_head: bool = False,
) -> Slices:
    """The slices of a model for one TP rank of SGLang.

    Args:
        state: the tensors of a Hugging Face checkpoint (its file, where each expert has tensors of its own).
        ep: expert parallel size; each TP / EP consecutive TP ranks have the same experts, sharded among them.
        dp: number of groups of consecutive TP ranks; attention and the embedding are sharded within a group. dp_head: the output layer, too.
    """
    slices = Slices()
    attention = tp // dp, rank % (tp // dp)
    for name, value in state.items():
        parts = name.split(".")
        kind, tail = parts[-2], parts[-1]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        start = [0] * value.dim()
        if kind in ("embed_tokens", "lm_head"):
            ranks, number = attention if kind == "embed_tokens" or dp_head else (tp, rank)
            vocab_rows = -(-config.vocab_size // 64) * 64 // ranks
            piece = value[number * vocab_rows : (number + 1) * vocab_rows]
            slices.padding[name] = (vocab_rows - len(piece)) * value.shape[1]
            if len(piece):
                slices.entries.append((name, name, start, piece))
        elif kind in ("q_proj", "k_proj", "v_proj"):
            slices.entries.append(_attention_slice(name, value, config, *attention))
        elif "linear_attn" in parts and kind != "norm":
            slices.entries += _delta_net_slices(name, value, config, *attention)
        elif kind in ("q_norm", "k_norm") and config.model_type == "minimax_m2":
            number, ranks = attention[1], attention[0]
            if kind == "k_norm":  # heads are replicated where there are more ranks than heads
                ranks = min(attention[0], config.num_key_value_heads)
                number = attention[1] * ranks // attention[0]
            slices.entries.append((name, name, start, value.chunk(ranks)[number]))
        elif kind in ("q_a_proj", "kv_a_proj_with_mqa"):
            start[0] = 0 if kind == "q_a_proj" else config.q_lora_rank
            slices.entries.append((name, name.replace(kind, "fused_qkv_a_proj_with_mqa"), start, value))
        elif kind in ("wk", "weights_proj"):
            together = getattr(config, "indexer_rope_interleave", False)
            start[0] = config.index_head_dim if together and kind == "weights_proj" else 0
            local = name.replace(kind, "wk_weights_proj") if together else name
            slices.entries.append((name, local, start, value))
        elif kind in ("q_b_proj", "kv_b_proj") or tail == "sinks":
            slices.entries.append((name, name, start, value.chunk(attention[0])[attention[1]]))
        elif "experts" in parts and config.model_type == "gpt_oss":
            entry = _alternating_slice(name, value, config, tp, rank, ep)
            if entry and name.endswith("down_proj.bias") and rank % (tp // ep):
                slices.padding[entry[1]] = slices.padding.get(entry[1], 0) + value.numel()
            elif entry:
                slices.entries.append(entry)
        elif "experts" in parts:
            expert = _expert_slice(name, value, config, tp, rank, ep)
            slices.entries += [expert] if expert else []
        elif kind in ("gate_proj", "up_proj"):
            piece = value.chunk(tp)[rank]
            start[0] = 0 if kind == "gate_proj" else len(piece)
            slices.entries.append((name, name.replace(kind, "gate_up_proj"), start, piece))
        elif kind in ("o_proj", "down_proj") and tail == "weight":
            ranks, number = attention if kind == "o_proj" else (tp, rank)
            local = name.replace("self_attn.", "") if is_hybrid(config) else name
            slices.entries.append((name, local, start, value.chunk(ranks, dim=1)[number]))
        else:
            local = name.replace("self_attn.", "") if is_hybrid(config) else name
            slices.entries.append((name, local, start, value))
    return slices


def _attention_slice(name: str, value: torch.Tensor, config, tp: int, rank: int):
    """Query heads, then key heads, then value heads; key and value heads are replicated where there are more ranks than heads."""
    kind = name.split(".")[-2]
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, state_head_dim(config)
    gated = is_hybrid(config)  # each head's gate is below its query
    q_rows = heads // tp * dim * (1 + gated)
    kv_rows = max(1, groups // tp) * dim
    kv_rank = rank if groups >= tp else rank // (tp // groups)
    begin = {"q_proj": 0, "k_proj": q_rows, "v_proj": q_rows + kv_rows}[kind]
    first, count = (rank * q_rows, q_rows) if kind == "q_proj" else (kv_rank * kv_rows, kv_rows)
    start = [begin] + [0] * (value.dim() - 1)
    local = name.replace("self_attn.", "") if gated else name
    return name, local.replace(kind, "qkv_proj"), start, value[first : first + count]


def _delta_net_slices(name: str, value: torch.Tensor, config, tp: int, rank: int) -> list:
    """In the projections' rows a key head and its values are adjacent; a rank's convolution has its queries, then its keys, then its values."""
    kind = name.split(".")[-2]
    if kind in ("in_proj_b", "in_proj_a", "in_proj_z"):
        piece, first = value.chunk(tp)[rank], 0
        if kind == "in_proj_a":
            first = len(piece)
        if kind == "in_proj_z":
            first = (2 * config.linear_num_key_heads * config.linear_key_head_dim + len(value)) // tp
        local = name.replace(kind, "in_proj_qkvz" if kind == "in_proj_z" else "in_proj_ba")
        return [(name, local, [first, 0], piece)]
    if kind not in ("conv1d", "in_proj_qkv"):
        return [(name, name, [0] * value.dim(), value.chunk(tp, dim=int("out_proj" in name))[rank])]
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    parts = [part.chunk(tp)[rank] for part in value.split([keys, keys, len(value) - 2 * keys])]
    starts = (0, len(parts[0]), 2 * len(parts[0]))
    rest, local = [0] * (value.dim() - 1), name.replace("in_proj_qkv.", "in_proj_qkvz.")
    return [(name, local, [start, *rest], part) for start, part in zip(starts, parts, strict=True)]


def is_hybrid(config) -> bool:
    """Whether attention has gates, and SGLang leaves `self_attn` out of its names."""
    return config.model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def _alternating_slice(name: str, value: torch.Tensor, config, tp: int, rank: int, ep: int):
    """As `_expert_slice`, for gpt-oss, whose experts have biases: in w13 the rows of gate and up alternate, and starts are [expert, gate or up, row].
    Of the ranks that share an expert, only the first has the bias of its output."""
    path, _, rest = name.partition(".experts.")
    expert, kind, end = rest.split(".")
    here = config.num_local_experts // ep
    expert_tp, index = tp // ep, int(expert) - rank // (tp // ep) * here
    if not 0 <= index < here:
        return None
    whole = kind == "down_proj" and end == "bias"
    piece = value if whole else value.chunk(expert_tp, 1 if kind == "down_proj" else 0)[rank % expert_tp]
    first = [index] if kind == "down_proj" else [index, int(kind == "up_proj")]
    local = (
        f"{path}.experts.{'w2' if kind == 'down_proj' else 'w13'}_weight{'_bias' if end == 'bias' else ''}"
    )
    return name, local, [*first, *[0] * piece.dim()], piece[(None,) * len(first)]


def _expert_slice(name: str, value: torch.Tensor, config, tp: int, rank: int, ep: int):
    """One expert's matrix, if the rank has that expert: gate (w1) above up (w3) in w13_weight, down (w2) in w2_weight."""
    path, _, rest = name.partition(".experts.")
    expert, kind, _ = rest.split(".")
    here = getattr(config, "num_local_experts", None) or config.num_experts
    here //= ep
    expert_tp, index = tp // ep, int(expert) - rank // (tp // ep) * here
    if not 0 <= index < here:
        return None
    is_down, is_up = kind in ("down_proj", "w2"), kind in ("up_proj", "w3")
    piece = value.chunk(expert_tp, dim=1 if is_down else 0)[rank % expert_tp]
    begin = len(piece) if is_up else 0
    local = f"{path}.experts.{'w2' if is_down else 'w13'}_weight"
    return name, local, [index, begin, 0], piece[None]


def state_head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
