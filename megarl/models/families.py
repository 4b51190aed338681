"""The supported model families: how each reads its facts from a Hugging Face config.

A field that changes the computation and is not supported is refused by name.
"""

from collections.abc import Callable
from typing import Any

from megarl.models.config import (
    DECODER,
    FULL_ATTENTION,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    decoder_facts,
    num_experts,
    refuse_unsupported,
)
from megarl.models.fields import Fields, short
from megarl.models.hybrids import qwen3_5, qwen3_next


def _refuse_layer_types(hf: Fields) -> None:
    """Refuse attention other than to all positions before; transformers 5 always writes `layer_types`."""
    other = sorted(set(hf.texts("layer_types")) - {"full_attention"})
    if other:
        raise ValueError(f"{hf.file}: layer_types {other} are not supported; supported: full_attention")


def _llama(hf: Fields) -> ModelConfig:
    """Llama (2, 3 and models of the same architecture): no biases, RMSNorm, SwiGLU, grouped-query attention."""
    refuse_unsupported(hf, DECODER | {"attention_bias": (False,), "mlp_bias": (False,)})
    return ModelConfig(family="llama", qkv_bias=False, qk_norm=False, **decoder_facts(hf))


def _qwen2(hf: Fields) -> ModelConfig:
    """Qwen2 and Qwen2.5: Llama's architecture with biases on the query, key and value projections."""
    refuse_unsupported(hf, DECODER | FULL_ATTENTION)
    _refuse_layer_types(hf)
    return ModelConfig(family="qwen2", qkv_bias=True, qk_norm=False, **decoder_facts(hf))


def _qwen3(hf: Fields) -> ModelConfig:
    """Qwen3: Llama's architecture with norms on the heads' queries and keys, and heads of a width of their own."""
    # A bias of attention would be one of its output, too.
    refuse_unsupported(hf, DECODER | FULL_ATTENTION | {"attention_bias": (False,)})
    _refuse_layer_types(hf)
    hf.require("head_dim", "num_key_value_heads")
    return ModelConfig(family="qwen3", qkv_bias=False, qk_norm=True, **decoder_facts(hf))


def _qwen3_moe(hf: Fields) -> ModelConfig:
    """Qwen3's mixtures of experts: Qwen3's attention, and routed experts in every layer."""
    accepted = {
        "attention_bias": (False,),
        # SGLang 0.5.21 takes every layer for a mixture, and never ties the head to the embedding.
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        "tie_word_embeddings": (False,),
    }
    refuse_unsupported(hf, DECODER | FULL_ATTENTION | accepted)
    experts = "num_local_experts" if "num_local_experts" in hf.values else "num_experts"  # transformers 5, 4
    routing = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    hf.require("head_dim", "num_key_value_heads", experts, *routing)
    moe = MoEConfig(
        num_experts=num_experts(hf, experts),
        top_k=hf.count("num_experts_per_tok", most=num_experts(hf, experts)),
        ffn_hidden_size=hf.count("moe_intermediate_size"),
        norm_topk_prob=hf.flag("norm_topk_prob"),
    )
    return ModelConfig(family="qwen3_moe", qkv_bias=False, qk_norm=True, moe=moe, **decoder_facts(hf))


_MIXTURE = {"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
"""Accepted values of fields that transformers 5 does not write, since its code knows no other values."""


# The norms of latent queries, keys and values take 1e-6 in Hugging Face's code whatever this field says; Megatron's and SGLang's take
# the field.
_LATENT_EPSILON = {"rms_norm_eps": (1e-6,)}


def _latent(family: str, more: dict[str, tuple[Any, ...]]) -> Callable[[Fields], ModelConfig]:
    """DeepSeek-V3 and R1, and Kimi-K2, which has the same architecture and names of weights under a type of its own: latent attention,
    sigmoid-scored experts in groups after dense layers, a layer for MTP. `more`: accepted values of further fields."""

    def config_from_hf(hf: Fields) -> ModelConfig:
        accepted = {
            "attention_bias": (False,),
            "rope_interleave": (True,),
            "num_key_value_heads": (hf.count("num_attention_heads"), None),
            **more,
        }
        refuse_unsupported(hf, DECODER | _MIXTURE | accepted)
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        hf.require(*sizes)
        mla = MLAConfig(
            q_lora_rank=hf.count("q_lora_rank") if "q_lora_rank" in hf else None,
            **{size: hf.count(size) for size in sizes},
        )
        facts = decoder_facts(hf, latent=True) | {"head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim}
        return ModelConfig(family=family, qkv_bias=False, qk_norm=False, mla=mla, **_mixture(hf), **facts)

    return config_from_hf


def _mixture(hf: Fields) -> dict[str, MoEConfig | int]:
    """A mixture of DeepSeek-V3's kind, and MTP layers: sigmoid scores with a bias for the choice, shared experts, dense first layers.

    Raises:
        ValueError: a needed field is missing.
    """
    hf.require(
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "first_k_dense_replace",
        "norm_topk_prob",
        "routed_scaling_factor",
    )
    experts, groups = num_experts(hf, "n_routed_experts"), hf.count("n_group", 1)
    if experts % groups:
        raise ValueError(
            f"{hf.file}: n_routed_experts must be a multiple of n_group, found {experts} and {groups}"
        )
    ffn = hf.count("moe_intermediate_size")
    dense = min(hf.count("first_k_dense_replace", least=0), hf.count("num_hidden_layers"))
    moe = MoEConfig(
        num_experts=experts,
        top_k=hf.count("num_experts_per_tok", most=experts),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=ffn * hf.count("n_shared_experts", least=0),
        dense_layers=tuple(range(dense)),
        scoring="sigmoid",
        norm_topk_prob=hf.flag("norm_topk_prob"),
        expert_bias=True,
        num_groups=groups,
        topk_group=hf.count("topk_group", 1, most=groups),
        scaling_factor=hf.number("routed_scaling_factor"),
    )
    return {"moe": moe, "num_mtp_layers": hf.count("num_nextn_predict_layers", 0, least=0, most=100)}


_latent_glm4_moe = _latent(
    # SGLang 0.5.21 never ties this model's head to its embedding.
    "glm4_moe_lite",
    {"tie_word_embeddings": (False,)},
)


def _glm4_moe_lite(hf: Fields) -> ModelConfig:
    """GLM-4.7-Flash: DeepSeek-V3's latent attention, mixture and layer for MTP.

    Its `rms_norm_eps` is 1e-5. The norms of latent queries, keys and values take it, too, as SGLang's do; those of transformers 5.12.1 take
    1e-6 whatever the config says, as its code for DeepSeek-V3 does.
    """
    dense = hf.count(
        "first_k_dense_replace", least=0
    )  # SGLang's field; transformers 5 writes `mlp_layer_types`
    layers = hf.count("num_hidden_layers")
    types, expected = hf.texts("mlp_layer_types"), ["dense"] * dense + ["sparse"] * (layers - dense)
    if types and types != expected[:layers]:
        raise ValueError(
            f"{hf.file}: mlp_layer_types={short(types)} and first_k_dense_replace={dense} are not the same layers; "
            f"the latter are {short(expected[:layers])}"
        )
    return _latent_glm4_moe(hf)


def _glm4_moe(hf: Fields) -> ModelConfig:
    """GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates a part of each head, DeepSeek-V3's mixture, a layer for MTP."""
    # SGLang 0.5.21 never ties this model's head to its embedding.
    refuse_unsupported(hf, DECODER | _MIXTURE | {"tie_word_embeddings": (False,)})
    hf.require("head_dim", "num_key_value_heads", "attention_bias", "use_qk_norm")
    biases = {"qkv_bias": hf.flag("attention_bias"), "qk_norm": hf.flag("use_qk_norm")}
    return ModelConfig(family="glm4_moe", **biases, **_mixture(hf), **decoder_facts(hf, rotary=0.5))


def _minimax_m2(hf: Fields) -> ModelConfig:
    """MiniMax-M2 (M2.1, M2.5, M2.7): grouped-query attention that rotates a part of each head and norms queries and keys over all heads
    together; sigmoid-scored experts in every layer, none shared. `num_mtp_modules` count layers that the published checkpoints do not have."""
    accepted = {
        # By layer: 1 is attention to all positions before; MiniMax-M1 has linear attention, too.
        "attn_type_list": ([1] * hf.count("num_hidden_layers"), None),
        "qk_norm_type": ("per_layer",),
        "router_jitter_noise": (0, 0.0),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0, None),
        "sliding_window": (None,),
        # SGLang 0.5.21 never ties this model's head to its embedding.
        "tie_word_embeddings": (False,),
        # Transformers 5.12.1 has these parts whatever the config says; SGLang has them only where it says so.
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    }
    refuse_unsupported(hf, DECODER | accepted)
    needed = ("head_dim", "num_key_value_heads", "num_local_experts", "num_experts_per_tok")
    hf.require(*needed, "rotary_dim", "scoring_func", "use_qk_norm", "use_routing_bias")
    experts = num_experts(hf, "num_local_experts")
    moe = MoEConfig(
        num_experts=experts,
        top_k=hf.count("num_experts_per_tok", most=experts),
        ffn_hidden_size=hf.count("intermediate_size"),
        scoring="sigmoid",
        expert_bias=True,
    )
    # SGLang reads rotary_dim alone, Hugging Face the share alone.
    head = hf.count("head_dim")
    share = hf.count("rotary_dim", most=head) / head
    facts = decoder_facts(hf, rotary=share)
    if facts["rotary_percent"] != share:
        raise ValueError(
            f"{hf.file}: partial_rotary_factor={facts['rotary_percent']:g} is not rotary_dim / head_dim, {share:g}"
        )
    norms = {"qk_norm": True, "qk_norm_all_heads": True}
    return ModelConfig(family="minimax_m2", qkv_bias=False, moe=moe, **norms, **facts)


def _gpt_oss(hf: Fields) -> ModelConfig:
    """gpt-oss: attention with sinks and biases, to a window of positions in some layers; experts with biases and a clamped gated unit."""
    accepted = {
        "attention_bias": (True,),
        "tie_word_embeddings": (False,),
        # Numbers that Hugging Face's code (transformers 5.12.1) has, whatever the config says.
        "hidden_act_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    }
    refuse_unsupported(hf, DECODER | accepted)
    hf.require("head_dim", "num_key_value_heads", "num_local_experts", "num_experts_per_tok")
    # SGLang 0.5.21 reads these without a default.
    hf.require("attention_bias", "swiglu_limit", "layer_types", "sliding_window")
    method = hf.object("quantization_config").values.get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ValueError(
            f"{hf.file}: quantization_config quant_method={method!r} is not supported; supported: mxfp4"
        )
    kinds = hf.texts("layer_types")
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other or len(kinds) != hf.count("num_hidden_layers"):
        found = f"{other} among them" if other else f"{len(kinds)} of them"
        raise ValueError(
            f"{hf.file}: layer_types must say full_attention or sliding_attention for each of the {hf.count('num_hidden_layers')} layers, "
            f"found {found}"
        )
    moe = MoEConfig(
        num_experts=num_experts(hf, "num_local_experts"),
        top_k=hf.count("num_experts_per_tok", most=num_experts(hf, "num_local_experts")),
        ffn_hidden_size=hf.count("intermediate_size"),
        biases=True,
        clamp=hf.number("swiglu_limit"),
    )
    # Experts in MXFP4 are read as bfloat16 (`megarl.checkpoints.hf.fused`).
    plain = {key: value for key, value in hf.values.items() if key != "quantization_config"}
    facts = decoder_facts(Fields(plain, hf.file)) | {"hf": hf.values}
    if "quantization_config" in hf and "dtype" not in hf and "torch_dtype" not in hf:
        facts["dtype"] = "bfloat16"  # published configs do not say
    return ModelConfig(
        family="gpt_oss",
        qkv_bias=True,
        qk_norm=False,
        output_bias=True,
        sinks=True,
        window=hf.count("sliding_window"),
        window_layers=tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention"),
        moe=moe,
        **facts,
    )


FAMILIES = {
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "deepseek_v3": _latent("deepseek_v3", _LATENT_EPSILON),
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "kimi_k2": _latent("kimi_k2", _LATENT_EPSILON),
    "minimax_m2": _minimax_m2,
}
"""By `model_type` of config.json: reads a model's facts; raises ValueError for a field that is missing or not supported."""
