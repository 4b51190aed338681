"""What megarl knows of one model: facts read from its Hugging Face config, none assumed."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """The facts of a decoder-only model. `hf` is the Hugging Face config that they were read from."""

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    hf: dict[str, Any] = field(repr=False, compare=False)


def load_hf_config(path: str) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face model folder.

    Raises:
        ValueError: no such folder or file, or not JSON.
    """
    folder = Path(path).expanduser()
    file = folder / "config.json"
    if not folder.is_dir():
        raise ValueError(f"model path {path!r} is not a folder; a Hugging Face model folder is needed")
    if not file.is_file():
        raise ValueError(f"model folder {path!r} has no config.json")
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None


def rope_facts(hf: dict[str, Any], path: str) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`) keys.

    Megatron-core 0.19 implements plain RoPE and Llama 3's scaling with its published constants (low and
    high frequency factors 1 and 4, original length 8192); anything else is refused.
    """
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = float(rope.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{path}: rope type {kind!r} is not supported; supported: default, llama3")
    expected = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for key, value in expected.items():
        if float(rope.get(key, value)) != value:
            raise ValueError(f"{path}: rope {key}={rope[key]} is not supported; supported: {value}")
    return theta, {"rope_type": "llama3", "factor": float(rope["factor"])}


def refuse_unsupported(hf: dict[str, Any], path: str, required: dict[str, Collection[Any]]) -> None:
    """Refuse by name each field of `required` that is present with a value outside its accepted ones."""
    for key, accepted in required.items():
        if key in hf and hf[key] not in accepted:
            raise ValueError(
                f"{path}: config field {key}={hf[key]!r} changes the computation and is not supported; "
                f"supported: {', '.join(repr(value) for value in accepted)}"
            )


def dense_facts(hf: dict[str, Any], path: str) -> dict[str, Any]:
    """The ModelConfig fields that every dense decoder family names alike in its Hugging Face config.

    Raises:
        ValueError: a needed field is missing.
    """
    needed = [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ]
    missing = [key for key in needed if hf.get(key) is None]
    if missing:
        raise ValueError(f"{path}/config.json lacks {', '.join(missing)}")
    theta, scaling = rope_facts(hf, path)
    heads = hf["num_attention_heads"]
    return {
        "architecture": (hf.get("architectures") or [""])[0],
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "ffn_hidden_size": hf["intermediate_size"],
        "vocab_size": hf["vocab_size"],
        "norm_epsilon": float(hf["rms_norm_eps"]),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "max_position_embeddings": hf["max_position_embeddings"],
        "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
        "hf": hf,
    }
