"""DeepSeek-V3 and R1: latent attention, sigmoid-scored experts in groups after dense layers, a layer for MTP."""

from megarl.models.config import (
    DECODER,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    decoder_facts,
    num_experts,
    refuse_unsupported,
)
from megarl.models.fields import Fields

MODEL_TYPE = "deepseek_v3"
SGLANG_DP_ATTENTION = True

MIXTURE = {"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
"""What is accepted of fields that transformers 5 does not write, since its code knows no other values."""


def config_from_hf(hf: Fields) -> ModelConfig:
    """Facts of a `DeepseekV3ForCausalLM`; refuses by name what megarl's model would compute differently."""
    return latent_model("deepseek_v3", hf)


def latent_model(family: str, hf: Fields) -> ModelConfig:
    """Facts of a model of DeepSeek-V3's architecture."""
    accepted = {
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "num_key_value_heads": (hf.count("num_attention_heads"), None),
        # The norms of latent queries, keys and values take 1e-6 in Hugging Face's code whatever is written here,
        # and what is written here in Megatron's and SGLang's.
        "rms_norm_eps": (1e-6,),
    }
    refuse_unsupported(hf, DECODER | MIXTURE | accepted)
    hf.require("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    mla = MLAConfig(
        q_lora_rank=hf.count("q_lora_rank") if "q_lora_rank" in hf else None,
        kv_lora_rank=hf.count("kv_lora_rank"),
        qk_nope_head_dim=hf.count("qk_nope_head_dim"),
        qk_rope_head_dim=hf.count("qk_rope_head_dim"),
        v_head_dim=hf.count("v_head_dim"),
    )
    facts = decoder_facts(hf, latent=True)
    facts["head_dim"] = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return ModelConfig(
        family=family,
        qkv_bias=False,
        qk_norm=False,
        mla=mla,
        moe=mixture_facts(hf),
        num_mtp_layers=num_mtp_layers(hf),
        **facts,
    )


def mixture_facts(hf: Fields) -> MoEConfig:
    """A mixture of DeepSeek-V3's kind: sigmoid scores with a bias for the choice, shared experts, dense first layers.

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
    return MoEConfig(
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


def num_mtp_layers(hf: Fields) -> int:
    """Multi-token prediction layers of the model's checkpoint."""
    return hf.count("num_nextn_predict_layers", 0, least=0, most=100)
