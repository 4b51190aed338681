"""SGLang 0.5.21's parameters on one rank, sharded and fused by hand as in its model files: an oracle for the weight tables."""

from typing import Any

import torch

State = dict[str, torch.Tensor]


def single_experts(state: State) -> State:
    """The tensors of a file, with a tensor for each projection of each expert. transformers 5.12.1 stores gpt-oss's for all experts of a layer,
    with gate's and up's columns in turn and inputs before outputs; Qwen3.5's with a vision tower, which is left out, have gate's rows above
    up's. Other families' files have single experts already."""
    out: State = {}
    for name, tensor in state.items():
        nested, name = (
            name.startswith("model.language_model."),
            name.replace("model.language_model.", "model."),
        )
        layer, dot, kind = name.rpartition(".")
        if name.startswith("model.visual."):
            continue
        if not layer.endswith(".experts") or dot + kind == ".weight":
            out[name] = tensor
            continue
        if nested or name.startswith("mtp."):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for number, expert in enumerate(tensor):
                for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                    out[f"{layer}.{number}.{part}.weight"] = rows.contiguous()
            continue
        end = "bias" if kind.endswith("_bias") else "weight"
        for number, expert in enumerate(tensor):
            by_output = expert if end == "bias" else expert.T
            if kind.startswith("down_proj"):
                out[f"{layer}.{number}.down_proj.{end}"] = by_output.contiguous()
            else:
                for first, projection in enumerate(("gate", "up")):
                    out[f"{layer}.{number}.{projection}_proj.{end}"] = by_output[first::2].contiguous()
    return out


class Rank:
    """Rank `rank` of an engine of `tp` ranks, `ep` of them sharing the experts, with `dp` groups for data parallel attention."""

    def __init__(self, rank: int, tp: int, ep: int = 1, dp: int = 1) -> None:
        self.whole = (tp, rank)
        self.attention = (tp // dp, rank % (tp // dp))
        self.expert_share = (ep, rank // (tp // ep))
        self.inside_expert = (tp // ep, rank % (tp // ep))


def expected_sglang(state: State, hf: dict[str, Any], rank: Rank) -> State:
    """Parameters by name. Padding rows of the vocabulary are left out, and so are parameters with no other rows on this rank."""
    out = {"model.norm.weight": state["model.norm.weight"]}
    rows = -(-hf["vocab_size"] // 64) * 64
    for name, (parts, index) in (
        ("model.embed_tokens.weight", rank.attention),
        ("lm_head.weight", rank.whole),
    ):
        share = rows // parts
        if name in state and len(state[name]) > index * share:
            out[name] = state[name][index * share : (index + 1) * share]
    for layer in range(hf["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[p + norm] = state[p + norm]
        latent = p + "self_attn.kv_b_proj.weight" in state
        if p + "linear_attn.A_log" in state:
            out |= _delta_net(state, hf, rank, p + "linear_attn.")
        else:
            attention = (_latent if latent else _grouped)(state, hf, rank, p + "self_attn.")
            if "full_attention_interval" in hf:  # its class removes `self_attn` (load_weights)
                attention = {name.replace(".self_attn", ""): value for name, value in attention.items()}
            out |= attention
        mlp = p + ("block_sparse_moe." if hf["model_type"] == "minimax_m2" else "mlp.")
        if mlp + "router.weight" in state:
            out |= _biased_mixture(state, rank, mlp)
        elif mlp + "gate.weight" in state:
            out |= _mixture(state, hf, rank, mlp)
        else:
            out |= _gated(state, rank.whole, mlp)
    return out


def _rows(tensor: torch.Tensor, cut: tuple[int, int]) -> torch.Tensor:
    return tensor.chunk(cut[0], 0)[cut[1]]


def _columns(tensor: torch.Tensor, cut: tuple[int, int]) -> torch.Tensor:
    return tensor.chunk(cut[0], 1)[cut[1]]


def _grouped(state: State, hf: dict[str, Any], rank: Rank, p: str) -> State:
    tp, index = rank.attention
    replicas = max(1, tp // hf["num_key_value_heads"])
    kv = (tp // replicas, index // replicas)
    out = {p + "o_proj.weight": _columns(state[p + "o_proj.weight"], rank.attention)}
    for kind in ("weight", "bias"):
        if f"{p}q_proj.{kind}" in state:
            q, k, v = (state[f"{p}{x}_proj.{kind}"] for x in "qkv")
            out[f"{p}qkv_proj.{kind}"] = torch.cat([_rows(q, rank.attention), _rows(k, kv), _rows(v, kv)])
    for norm, cut in (("q_norm.weight", rank.attention), ("k_norm.weight", kv)):
        if p + norm in state:  # over all heads together (MiniMax-M2), or one norm that all heads share
            norms_all = hf["model_type"] == "minimax_m2"
            out[p + norm] = _rows(state[p + norm], cut) if norms_all else state[p + norm]
    if p + "o_proj.bias" in state:
        out[p + "o_proj.bias"] = state[p + "o_proj.bias"]
    if p + "sinks" in state:
        out[p + "sinks"] = _rows(state[p + "sinks"], rank.attention)
    return out


def _indexer(state: State, hf: dict[str, Any], p: str) -> State:
    """As in layers/attention/dsa/dsa_indexer.py: complete on each rank; one matrix for keys and heads' weights with interleaved rotation."""
    out = {p + name: state[p + name] for name in ("wq_b.weight", "k_norm.weight", "k_norm.bias")}
    keys, heads = state[p + "wk.weight"], state[p + "weights_proj.weight"]
    if hf.get("indexer_rope_interleave"):
        return out | {p + "wk_weights_proj.weight": torch.cat([keys, heads])}
    return out | {p + "wk.weight": keys, p + "weights_proj.weight": heads}


def _latent(state: State, hf: dict[str, Any], rank: Rank, p: str) -> State:
    out = {
        p + "kv_a_layernorm.weight": state[p + "kv_a_layernorm.weight"],
        p + "kv_b_proj.weight": _rows(state[p + "kv_b_proj.weight"], rank.attention),
        p + "o_proj.weight": _columns(state[p + "o_proj.weight"], rank.attention),
    }
    if p + "indexer.wk.weight" in state:
        out |= _indexer(state, hf, p + "indexer.")
    if hf["q_lora_rank"] is None:
        out[p + "q_proj.weight"] = _rows(state[p + "q_proj.weight"], rank.attention)
        out[p + "kv_a_proj_with_mqa.weight"] = state[p + "kv_a_proj_with_mqa.weight"]
        return out
    fused = torch.cat([state[p + "q_a_proj.weight"], state[p + "kv_a_proj_with_mqa.weight"]])
    out[p + "fused_qkv_a_proj_with_mqa.weight"] = fused
    out[p + "q_a_layernorm.weight"] = state[p + "q_a_layernorm.weight"]
    out[p + "q_b_proj.weight"] = _rows(state[p + "q_b_proj.weight"], rank.attention)
    return out


def _delta_net(state: State, hf: dict[str, Any], rank: Rank, p: str) -> State:
    """models/qwen3_next.py, Qwen3GatedDeltaNet: rows of key heads; mamba_v2_sharded_weight_loader shards queries, keys and values separately."""
    keys = hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
    convolution = state[p + "conv1d.weight"]
    mixed = convolution.split([keys, keys, len(convolution) - 2 * keys])
    out = {p + "conv1d.weight": torch.cat([_rows(part, rank.attention) for part in mixed])}
    if p + "in_proj_qkv.weight" in state:  # models/qwen3_5.py, Qwen3_5GatedDeltaNet
        qkv = state[p + "in_proj_qkv.weight"]
        parts = [*qkv.split([keys, keys, len(qkv) - 2 * keys]), state[p + "in_proj_z.weight"]]
        heads = [state[p + "in_proj_b.weight"], state[p + "in_proj_a.weight"]]
        state = {
            **state,
            p + "in_proj_qkvz.weight": torch.cat(
                [part.unflatten(0, (rank.attention[0], -1)) for part in parts], 1
            ).flatten(0, 1),
            p + "in_proj_ba.weight": torch.cat(
                [part.unflatten(0, (rank.attention[0], -1)) for part in heads], 1
            ).flatten(0, 1),
        }
    for name in ("in_proj_qkvz.weight", "in_proj_ba.weight", "dt_bias", "A_log"):
        out[p + name] = _rows(state[p + name], rank.attention)
    return out | {
        p + "norm.weight": state[p + "norm.weight"],
        p + "out_proj.weight": _columns(state[p + "out_proj.weight"], rank.attention),
    }


def _gated(state: State, cut: tuple[int, int], p: str) -> State:
    names = ("w1", "w3", "w2") if p + "w1.weight" in state else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (state[f"{p}{name}.weight"] for name in names)
    return {
        p + "gate_up_proj.weight": torch.cat([_rows(gate, cut), _rows(up, cut)]),
        p + "down_proj.weight": _columns(down, cut),
    }


def _mixture(state: State, hf: dict[str, Any], rank: Rank, p: str) -> State:
    out = {p + "gate.weight": state[p + "gate.weight"]}
    for bias in (p + "gate.e_score_correction_bias", p + "e_score_correction_bias"):
        if bias in state:
            out[bias] = state[bias]
    if p + "shared_experts.up_proj.weight" in state:
        out |= _gated(state, rank.whole, p + "shared_experts.")
    if p + "shared_expert.up_proj.weight" in state:
        out |= _gated(state, rank.whole, p + "shared_expert.")
        out[p + "shared_expert_gate.weight"] = state[p + "shared_expert_gate.weight"]
    numbers = torch.arange(len(state[p + "gate.weight"])).chunk(rank.expert_share[0])[rank.expert_share[1]]
    experts = [_gated(state, rank.inside_expert, f"{p}experts.{number}.") for number in numbers.tolist()]
    stacked = {"w13_weight": "gate_up_proj.weight", "w2_weight": "down_proj.weight"}
    for ours, theirs in stacked.items():
        parts = [tensor for expert in experts for name, tensor in expert.items() if name.endswith(theirs)]
        out[f"{p}experts.{ours}"] = torch.stack(parts)
    return out


def _biased_mixture(state: State, rank: Rank, p: str) -> State:
    """gpt-oss's experts as in SGLang, except for the order of the first projection's rows: SGLang's alternate between gate and up."""
    out = {f"{p}router.{kind}": state[f"{p}router.{kind}"] for kind in ("weight", "bias")}
    numbers = torch.arange(len(out[p + "router.bias"])).chunk(rank.expert_share[0])[rank.expert_share[1]]
    cut = rank.inside_expert
    for kind, end in (("weight", "weight"), ("bias", "weight_bias")):
        both = [
            torch.stack(
                [_rows(state[f"{p}experts.{number}.{name}_proj.{kind}"], cut) for name in ("gate", "up")]
            )
            for number in numbers.tolist()
        ]
        out[f"{p}experts.w13_{end}"] = torch.stack(both)
    down = [f"{p}experts.{number}.down_proj." for number in numbers.tolist()]
    out[p + "experts.w2_weight"] = torch.stack([_columns(state[name + "weight"], cut) for name in down])
    if cut[1] == 0:
        out[p + "experts.w2_weight_bias"] = torch.stack([state[name + "bias"] for name in down])
    return out
