"""Qwen3: Llama's architecture with norms on the heads' queries and keys, and heads of a width of their own."""

from megarl.models.config import (
    DECODER,
    FULL_ATTENTION,
    ModelConfig,
    decoder_facts,
    refuse_layer_types,
    refuse_unsupported,
)
from megarl.models.fields import Fields

MODEL_TYPE = "qwen3"
SGLANG_DP_ATTENTION = True


def config_from_hf(hf: Fields) -> ModelConfig:
    """Facts of a `Qwen3ForCausalLM`; refuses by name what megarl's model would compute differently."""
    # A bias of attention would be one of its output, too.
    refuse_unsupported(hf, DECODER | FULL_ATTENTION | {"attention_bias": (False,)})
    refuse_layer_types(hf)
    hf.require("head_dim", "num_key_value_heads")
    return ModelConfig(family="qwen3", qkv_bias=False, qk_norm=True, **decoder_facts(hf))
