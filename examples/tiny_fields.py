"""The fields of the tiny models' configs (tiny_model.py), family by family."""

from typing import Any

SPARSE = ("deepseek_v32", "glm_moe_dsa")
LATENT = (*SPARSE, "deepseek_v3", "glm4_moe_lite", "kimi_k2")
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def usual_fields(family: str, head_dim: int, ffn: int, positions: int) -> dict[str, Any]:
    """The fields of a family's published models other than sizes, made small; `head_dim`: hidden size by heads."""
    experts = {"moe_intermediate_size": ffn // 4, "num_experts_per_tok": 2}
    grouped = {**experts, "n_routed_experts": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
    wide_heads = {"head_dim": 2 * head_dim}  # all heads together are wider than the hidden state
    if family == "qwen3":
        return wide_heads
    if family == "qwen3_moe":
        return {**wide_heads, **experts, "num_experts": 8, "norm_topk_prob": True}
    if family in HYBRIDS:
        return {**wide_heads, **_hybrid_fields(family, head_dim, ffn)}
    if family == "glm4_moe":
        return {**wide_heads, **grouped, "attention_bias": True, "use_qk_norm": True}
    if family == "minimax_m2":
        return {**wide_heads, **_minimax_fields(head_dim), "intermediate_size": ffn // 4}
    if family == "gpt_oss":
        yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False,
                "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": positions // 4}  # fmt: skip
        gated = {"swiglu_limit": 7.0, "sliding_window": 8}
        return {**wide_heads, **gated, "intermediate_size": ffn // 4, "num_local_experts": 8, "num_experts_per_tok": 2,
                "rope_parameters": yarn}  # fmt: skip
    if family not in LATENT:
        return {}
    latent = {
        "q_lora_rank": 3 * head_dim // 2,
        "kv_lora_rank": head_dim,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": head_dim // 2,
        "v_head_dim": 3 * head_dim // 2,
    }
    # A scaling of 1e-6 is what transformers' norms of latent vectors have.
    if family in ("glm4_moe_lite", "glm_moe_dsa"):
        return {**grouped, **latent, "rms_norm_eps": 1e-6}
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": positions // 4,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    groups = (
        {"n_group": 1, "topk_group": 1}
        if family == "kimi_k2"
        else {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    )
    return {**grouped, **groups, **latent, "rope_parameters": yarn}


def _hybrid_fields(family: str, head_dim: int, ffn: int) -> dict[str, Any]:
    """Qwen3-Next's and Qwen3.5's; the latter's text has the sections of M-RoPE."""
    delta_net = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": head_dim}
    delta_net["linear_value_head_dim"] = 2 * head_dim
    mixture = {"moe_intermediate_size": ffn // 4, "num_experts_per_tok": 2, "num_experts": 8}
    mixture["shared_expert_intermediate_size"] = ffn // 4
    if family == "qwen3_next":
        return {**delta_net, **mixture, "norm_topk_prob": True}
    pairs = 2 * head_dim // 8  # of the quarter of a head that rotates
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}  # fmt: skip
    return {**delta_net, **(mixture if family == "qwen3_5_moe" else {}), "rope_parameters": rope}


def sparse_fields(family: str, head_dim: int, layers: int) -> dict[str, Any]:
    """Of the indexers, which choose among more than 1,024 tokens; of GLM-5's the first and the last layer have one."""
    indexer = {"index_head_dim": head_dim, "index_n_heads": 2, "index_topk": 1024, "num_experts": 8}
    if family == "deepseek_v32":
        return indexer
    kinds = ["shared" if 0 < layer < layers - 1 else "full" for layer in range(layers)]
    return {**indexer, "indexer_rope_interleave": True, "indexer_types": kinds}


def _minimax_fields(rotary_dim: int) -> dict[str, Any]:
    """MiniMax-M2's: SGLang reads `rotary_dim`, transformers the share of the head that it is, here one half."""
    return {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": rotary_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
    }
