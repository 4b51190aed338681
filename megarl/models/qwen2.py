"""Qwen2 and Qwen2.5: Llama's architecture with biases on the query, key and value projections."""

from megarl.models.config import (
    DECODER,
    FULL_ATTENTION,
    ModelConfig,
    decoder_facts,
    refuse_layer_types,
    refuse_unsupported,
)
from megarl.models.fields import Fields

MODEL_TYPE = "qwen2"
SGLANG_DP_ATTENTION = False  # SGLang 0.5.21 cuts its attention over all ranks


def config_from_hf(hf: Fields) -> ModelConfig:
    """Facts of a `Qwen2ForCausalLM`; refuses by name what megarl's model would compute differently."""
    refuse_unsupported(hf, DECODER | FULL_ATTENTION)
    refuse_layer_types(hf)
    return ModelConfig(family="qwen2", qkv_bias=True, qk_norm=False, **decoder_facts(hf))
