"""SGLang's classes for the families of `megarl.models`."""

from sglang.srt.models import deepseek_v2, glm4_moe, gpt_oss, llama, qwen2, qwen3, qwen3_moe

EntryClass = [
    deepseek_v2.DeepseekV3ForCausalLM,  # Kimi-K2, too
    glm4_moe.Glm4MoeForCausalLM,
    gpt_oss.GptOssForCausalLM,
    llama.LlamaForCausalLM,
    qwen2.Qwen2ForCausalLM,
    qwen3.Qwen3ForCausalLM,
    qwen3_moe.Qwen3MoeForCausalLM,
]
