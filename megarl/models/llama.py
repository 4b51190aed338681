"""Llama (2, 3 and models of the same architecture): no biases, RMSNorm, SwiGLU, grouped-query attention."""

from megarl.models.config import DECODER, ModelConfig, decoder_facts, refuse_unsupported
from megarl.models.fields import Fields

MODEL_TYPE = "llama"
SGLANG_DP_ATTENTION = False  # SGLang 0.5.21 cuts its attention over all ranks


def config_from_hf(hf: Fields) -> ModelConfig:
    """Facts of a `LlamaForCausalLM`; refuses by name what megarl's model would compute differently."""
    refuse_unsupported(hf, DECODER | {"attention_bias": (False,), "mlp_bias": (False,)})
    return ModelConfig(family="llama", qkv_bias=False, qk_norm=False, **decoder_facts(hf))
