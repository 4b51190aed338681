"""The supported model families: how each reads its facts from a Hugging Face config.

A field that changes the computation and is not supported is refused by name.
"""

from megarl.models.config import (
    DECODER,
    FULL_ATTENTION,
    ModelConfig,
    MoEConfig,
    decoder_facts,
    num_experts,
    refuse_unsupported,
    require_rope,
)
from megarl.models.fields import Fields
from megarl.models.hybrids import qwen3_5, qwen3_next
from megarl.models.latent import LATENT, MIXTURE, mixture


def refuse_layer_types(hf: Fields) -> None:
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
    refuse_layer_types(hf)
    return ModelConfig(family="qwen2", qkv_bias=True, qk_norm=False, **decoder_facts(hf))


def _qwen3(hf: Fields) -> ModelConfig:
    """Qwen3: Llama's architecture with norms on the heads' queries and keys, and heads of a width of their own."""
    # A bias of attention would be one of its output, too.
    refuse_unsupported(hf, DECODER | FULL_ATTENTION | {"attention_bias": (False,)})
    refuse_layer_types(hf)
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


def _glm4_moe(hf: Fields) -> ModelConfig:
    """GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates a part of each head, DeepSeek-V3's mixture, a layer for MTP."""
    # SGLang 0.5.21 never ties this model's head to its embedding.
    refuse_unsupported(hf, DECODER | MIXTURE | {"tie_word_embeddings": (False,)})
    hf.require("head_dim", "num_key_value_heads", "attention_bias", "use_qk_norm")
    biases = {"qkv_bias": hf.flag("attention_bias"), "qk_norm": hf.flag("use_qk_norm")}
    return ModelConfig(family="glm4_moe", **biases, **mixture(hf), **decoder_facts(hf, rotary=0.5))


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
    # Transformers' class, by which SGLang reads configs, has 5e6 where the field is missing.
    require_rope(hf, "rope_theta")
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
    # Transformers' class has base 150,000 where there is none, and yarn by 32 where there is no scaling, or null.
    require_rope(hf, "rope_theta", "rope_type")
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
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    **LATENT,
}
"""By `model_type` of config.json: reads a model's facts; raises ValueError for a field that is missing or not supported."""
