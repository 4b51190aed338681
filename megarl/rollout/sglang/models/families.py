"""SGLang's classes for the families of `megarl.models`; MiniMax-M2, Qwen3-Next, Qwen3.5 and sparse attention have modules of their own."""

from sglang.srt.models import deepseek_v2, glm4_moe, glm4_moe_lite, gpt_oss, llama, qwen2, qwen3, qwen3_moe

EntryClass = [
    deepseek_v2.DeepseekV3ForCausalLM,  # Kimi-K2, too
    glm4_moe.Glm4MoeForCausalLM,
    glm4_moe_lite.Glm4MoeLiteForCausalLM,
    gpt_oss.GptOssForCausalLM,
    llama.LlamaForCausalLM,
    qwen2.Qwen2ForCausalLM,
    qwen3.Qwen3ForCausalLM,
    qwen3_moe.Qwen3MoeForCausalLM,
]
