"""GLM-4.5: grouped-query attention that rotates a part of each head, DeepSeek-V3's mixture, a layer for MTP."""

from megarl.models.config import (
    DECODER,
    ModelConfig,
    decoder_facts,
    refuse_unsupported,
)
from megarl.models.deepseek_v3 import MIXTURE, mixture_facts, num_mtp_layers
from megarl.models.fields import Fields

MODEL_TYPE = "glm4_moe"
SGLANG_DP_ATTENTION = True


def config_from_hf(hf: Fields) -> ModelConfig:
    """Facts of a `Glm4MoeForCausalLM`; refuses by name what megarl's model would compute differently."""
    # SGLang 0.5.21 never ties this model's head to its embedding.
    refuse_unsupported(hf, DECODER | MIXTURE | {"tie_word_embeddings": (False,)})
    hf.require("head_dim", "num_key_value_heads", "attention_bias", "use_qk_norm")
    return ModelConfig(
        family="glm4_moe",
        qkv_bias=hf.flag("attention_bias"),
        qk_norm=hf.flag("use_qk_norm"),
        moe=mixture_facts(hf),
        num_mtp_layers=num_mtp_layers(hf),
        **decoder_facts(hf, rotary=0.5),
    )
