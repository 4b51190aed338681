"""Qwen2 and Qwen2.5: Llama's architecture with biases on the query, key and value projections."""

from typing import Any

from megarl.models.config import ModelConfig, dense_facts, refuse_unsupported

MODEL_TYPE = "qwen2"


def config_from_hf(hf: dict[str, Any], path: str) -> ModelConfig:
    """Facts of a `Qwen2ForCausalLM`; refuses by name what megarl's model would compute differently."""
    refuse_unsupported(
        hf,
        path,
        {
            "hidden_act": ("silu",),
            "use_sliding_window": (False,),
            "attention_dropout": (0, 0.0),
            "partial_rotary_factor": (1, 1.0, None),
        },
    )
    # transformers 5 always writes layer_types; only full attention is computed here
    other = sorted(set(hf.get("layer_types") or []) - {"full_attention"})
    if other:
        raise ValueError(f"{path}: layer_types {other} are not supported; supported: full_attention")
    return ModelConfig(family="qwen2", qkv_bias=True, qk_norm=False, **dense_facts(hf, path))
