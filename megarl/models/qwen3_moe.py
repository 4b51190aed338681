"""Qwen3's mixtures of experts: Qwen3's attention, and routed experts in every layer."""

from megarl.models.config import (
    DECODER,
    FULL_ATTENTION,
    ModelConfig,
    MoEConfig,
    decoder_facts,
    num_experts,
    refuse_unsupported,
)
from megarl.models.fields import Fields

MODEL_TYPE = "qwen3_moe"
SGLANG_DP_ATTENTION = True


def config_from_hf(hf: Fields) -> ModelConfig:
    """Facts of a `Qwen3MoeForCausalLM`; refuses by name what megarl's model would compute differently."""
    accepted = {
        "attention_bias": (False,),
        # SGLang 0.5.21 takes every layer for a mixture, and never ties the head to the embedding.
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        "tie_word_embeddings": (False,),
    }
    refuse_unsupported(hf, DECODER | FULL_ATTENTION | accepted)
    experts = "num_local_experts" if "num_local_experts" in hf.values else "num_experts"  # transformers 5, 4
    hf.require(
        "head_dim",
        "num_key_value_heads",
        experts,
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
    )
    moe = MoEConfig(
        num_experts=num_experts(hf, experts),
        top_k=hf.count("num_experts_per_tok", most=num_experts(hf, experts)),
        ffn_hidden_size=hf.count("moe_intermediate_size"),
        norm_topk_prob=hf.flag("norm_topk_prob"),
    )
    return ModelConfig(family="qwen3_moe", qkv_bias=False, qk_norm=True, moe=moe, **decoder_facts(hf))
