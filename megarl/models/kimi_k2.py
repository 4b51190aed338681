"""Kimi-K2: DeepSeek-V3's architecture and weights' names under a name of its own."""

from megarl.models.config import ModelConfig
from megarl.models.deepseek_v3 import latent_model
from megarl.models.fields import Fields

MODEL_TYPE = "kimi_k2"
SGLANG_DP_ATTENTION = True


def config_from_hf(hf: Fields) -> ModelConfig:
    """Facts of a `DeepseekV3ForCausalLM` of type kimi_k2; refuses what DeepSeek-V3's refuses."""
    return latent_model("kimi_k2", hf)
