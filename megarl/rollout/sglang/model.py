"""A model's config.json as SGLang needs it: checked against the engine's layout, and completed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.rollout.engine import EngineConfig

# By model type: fields that SGLang 0.5.21 reads and transformers 5 does not write, whose code knows no other values.
_IMPLIED = {
    model_type: {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    for model_type in ("deepseek_v3", "kimi_k2")
}


def read_model(config: EngineConfig) -> dict[str, Any]:
    """The model's config.json, checked against the engine's layout.

    Raises:
        ValueError: no such file; or sizes that the parallel sizes do not divide.
    """
    path = Path(config.model_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"model_path: {path} does not exist; give a Hugging Face model folder")
    model = json.loads(path.read_text())
    tp, ep = config.tensor_parallel_size, config.expert_parallel_size
    if tp % ep:
        raise ValueError(f"expert_parallel_size={ep} does not divide tensor_parallel_size={tp}")
    for key, parts, name, size in _divisions(model, tp, ep):
        if size % parts:
            raise ValueError(f"{key}={parts} does not divide {name}={size} of {path}")
    groups = _key_value_heads(model)
    if groups % tp and tp % groups:
        raise ValueError(
            f"tensor_parallel_size={tp} and num_key_value_heads={groups} of {path}: one must divide the other"
        )
    return model


def config_overrides(config: EngineConfig, model: dict[str, Any]) -> dict[str, Any]:
    """Fields of the model's config that SGLang is told beside config.json, or in place of what is there."""
    implied = _IMPLIED.get(model.get("model_type", ""), {})
    told = {name: value for name, value in implied.items() if name not in model}
    if config.fp8_block is not None:
        told["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(config.fp8_block),
        }
    elif config.load_format == "dummy" and "quantization_config" in model:
        told["quantization_config"] = None  # what is synced is of another type than what lies in the folder
    return told


def _divisions(model: dict[str, Any], tp: int, ep: int) -> Iterator[tuple[str, int, str, int]]:
    """What has to divide what: (key, its value, config field, its value)."""
    whole = ("tensor_parallel_size", tp)
    yield *whole, "num_attention_heads", model["num_attention_heads"]
    experts = next(
        (name for name in ("n_routed_experts", "num_local_experts", "num_experts") if name in model), None
    )
    if experts is None or model.get("first_k_dense_replace"):
        yield *whole, "intermediate_size", model["intermediate_size"]
    if experts is None:
        if ep > 1:
            yield "expert_parallel_size", ep, "number of experts", 1
        return
    width = model["moe_intermediate_size"]
    yield "expert_parallel_size", ep, experts, model[experts]
    yield "tensor_parallel_size / expert_parallel_size", tp // ep, "moe_intermediate_size", width
    if model.get("n_shared_experts"):
        yield *whole, "n_shared_experts * moe_intermediate_size", model["n_shared_experts"] * width


def _key_value_heads(model: dict[str, Any]) -> int:
    """Heads of the KV cache that are cut or repeated; latent attention has none: its queries' heads are cut."""
    heads = model["num_attention_heads"]
    return heads if "kv_lora_rank" in model else model.get("num_key_value_heads") or heads
