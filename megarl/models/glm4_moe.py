"""GLM-4.5: grouped-query attention that rotates a part of each head, DeepSeek-V3's mixture, a layer for MTP."""

from typing import Any

from megarl.models.config import (
    DECODER,
    ModelConfig,
    decoder_facts,
    refuse_unsupported,
    require,
)
from megarl.models.deepseek_v3 import MIXTURE, mixture_facts

MODEL_TYPE = "glm4_moe"
SGLANG_DP_ATTENTION = True


def config_from_hf(hf: dict[str, Any], path: str) -> ModelConfig:
    """Facts of a `Glm4MoeForCausalLM`; refuses by name what megarl's model would compute differently."""
    # SGLang 0.5.21 never ties this model's head to its embedding.
    refuse_unsupported(hf, path, DECODER | MIXTURE | {"tie_word_embeddings": (False,)})
    require(hf, path, "head_dim", "num_key_value_heads", "attention_bias", "use_qk_norm")
    return ModelConfig(
        family="glm4_moe",
        qkv_bias=hf["attention_bias"],
        qk_norm=hf["use_qk_norm"],
        moe=mixture_facts(hf, path),
        num_mtp_layers=hf.get("num_nextn_predict_layers") or 0,
        **decoder_facts(hf, path, rotary=0.5),
    )
