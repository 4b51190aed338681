"""DeepSeek-V3 and R1: latent attention, sigmoid-scored experts in groups after dense layers, a layer for MTP."""

from typing import Any

from megarl.models.config import (
    DECODER,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    decoder_facts,
    refuse_unsupported,
    require,
)

MODEL_TYPE = "deepseek_v3"
SGLANG_DP_ATTENTION = True

MIXTURE = {"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
"""What is accepted of fields that transformers 5 does not write, since its code knows no other values."""


def config_from_hf(hf: dict[str, Any], path: str) -> ModelConfig:
    """Facts of a `DeepseekV3ForCausalLM`; refuses by name what megarl's model would compute differently."""
    return latent_model("deepseek_v3", hf, path)


def latent_model(family: str, hf: dict[str, Any], path: str) -> ModelConfig:
    """Facts of a model of DeepSeek-V3's architecture."""
    accepted = {
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "num_key_value_heads": (hf.get("num_attention_heads"), None),
        # The norms of latent queries, keys and values take 1e-6 in Hugging Face's code whatever is written here,
        # and what is written here in Megatron's and SGLang's.
        "rms_norm_eps": (1e-6,),
    }
    refuse_unsupported(hf, path, DECODER | MIXTURE | accepted)
    require(hf, path, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    mla = MLAConfig(
        q_lora_rank=hf.get("q_lora_rank"),
        kv_lora_rank=hf["kv_lora_rank"],
        qk_nope_head_dim=hf["qk_nope_head_dim"],
        qk_rope_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
    )
    facts = decoder_facts(hf, path, latent=True)
    facts["head_dim"] = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return ModelConfig(
        family=family,
        qkv_bias=False,
        qk_norm=False,
        mla=mla,
        moe=mixture_facts(hf, path),
        num_mtp_layers=hf.get("num_nextn_predict_layers") or 0,
        **facts,
    )


def mixture_facts(hf: dict[str, Any], path: str) -> MoEConfig:
    """A mixture of DeepSeek-V3's kind: sigmoid scores with a bias for the choice, shared experts, dense first layers.

    Raises:
        ValueError: a needed field is missing.
    """
    require(
        hf,
        path,
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "first_k_dense_replace",
        "norm_topk_prob",
        "routed_scaling_factor",
    )
    dense = min(hf["first_k_dense_replace"], hf["num_hidden_layers"])
    return MoEConfig(
        num_experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        ffn_hidden_size=hf["moe_intermediate_size"],
        shared_ffn_hidden_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
        dense_layers=tuple(range(dense)),
        scoring="sigmoid",
        norm_topk_prob=hf["norm_topk_prob"],
        expert_bias=True,
        num_groups=hf.get("n_group") or 1,
        topk_group=hf.get("topk_group") or 1,
        scaling_factor=float(hf["routed_scaling_factor"]),
    )
