"""Configs as published with some models' weights: the fields that are facts of the model, as transformers 4 wrote them.

`PARAMETERS`: how many elements the headers of the weight files add up to (as the model pages show), multi-token prediction
layers and what they repeat included; of float8 files, the weights without their scales.
"""

from typing import Any

_COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_LLAMA = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN2 = {
    **_COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
_QWEN3 = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_MOE = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_DEEPSEEK = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = {
    **_DEEPSEEK,
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "vocab_size": 129280,
}
_GLM = {
    **_COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "topk_group": 1,
    "vocab_size": 151552,
}


_GPT_OSS = {
    **{key: value for key, value in _COMMON.items() if key != "torch_dtype"},
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "initial_context_length": 4096,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "eos_token_id": 200002,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **fields,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **_LLAMA,
        **_sizes(4096, 14336, 32, 32, rope_scaling={**_LLAMA_ROPE, "factor": 8.0}),
    },
    "Llama-3.2-1B": {
        **_LLAMA,
        **_sizes(2048, 8192, 16, 32, rope_scaling={**_LLAMA_ROPE, "factor": 32.0}),
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Llama-3.3-70B-Instruct": {
        **_LLAMA,
        **_sizes(8192, 28672, 80, 64, rope_scaling={**_LLAMA_ROPE, "factor": 8.0}),
    },
    "Qwen2.5-0.5B": {
        **_QWEN2,
        **_sizes(896, 4864, 24, 14, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    },
    "Qwen2.5-7B": {**_QWEN2, **_sizes(3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064)},
    "Qwen3-0.6B": {**_QWEN3, **_sizes(1024, 3072, 28, 16, tie_word_embeddings=True)},
    "Qwen3-8B": {**_QWEN3, **_sizes(4096, 12288, 36, 32)},
    "Qwen3-32B": {**_QWEN3, **_sizes(5120, 25600, 64, 64)},
    "Qwen3-30B-A3B": {**_QWEN3_MOE, **_sizes(2048, 6144, 48, 32, moe_intermediate_size=768)},
    "Qwen3-235B-A22B": {**_QWEN3_MOE, **_sizes(4096, 12288, 94, 64, moe_intermediate_size=1536)},
    "DeepSeek-V3": _DEEPSEEK_V3,
    "DeepSeek-V3.1": {
        **_DEEPSEEK_V3,
        "quantization_config": {**_DEEPSEEK["quantization_config"], "scale_fmt": "ue8m0"},
    },
    "GLM-4.5": {
        **_GLM,
        **_sizes(5120, 12288, 92, 96, moe_intermediate_size=1536, n_routed_experts=160),
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "GLM-4.5-Air": {
        **_GLM,
        **_sizes(4096, 10944, 46, 96, moe_intermediate_size=1408, n_routed_experts=128),
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "gpt-oss-20b": {
        **_GPT_OSS,
        **_sizes(2880, 2880, 24, 64, num_local_experts=32),
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gpt-oss-120b": {
        **_GPT_OSS,
        **_sizes(2880, 2880, 36, 64, num_local_experts=128),
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "Kimi-K2-Instruct": {
        **_DEEPSEEK,
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    },
}

PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    # 684,531,386,000 with 41,540,496 scales: one a block of 128 x 128, of every projection but that of the MTP layer
    "DeepSeek-V3": 684_531_386_000 - 41_540_496,
    "GLM-4.5": 358_337_791_296,
    "GLM-4.5-Air": 110_468_824_832,
    # arXiv:2508.10925, table 1: 20.91B and 116.83B; files in MXFP4 count bytes of packed values
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
