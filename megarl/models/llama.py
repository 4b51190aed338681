"""Llama (2, 3 and models of the same architecture): no biases, RMSNorm, SwiGLU, grouped-query attention."""

from typing import Any

from megarl.models.config import ModelConfig, dense_facts, refuse_unsupported

MODEL_TYPE = "llama"


def config_from_hf(hf: dict[str, Any], path: str) -> ModelConfig:
    """Facts of a `LlamaForCausalLM`; refuses by name what megarl's model would compute differently."""
    refuse_unsupported(
        hf,
        path,
        {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "attention_dropout": (0, 0.0),
            "partial_rotary_factor": (1, 1.0, None),
        },
    )
    return ModelConfig(family="llama", qkv_bias=False, qk_norm=False, **dense_facts(hf, path))
