"""Models that the steps run: the shapes of real ones, with random weights, made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.util.packages import example, shipped

QWEN_HALF: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 896, "num_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "ffn_hidden_size": 4864, "max_position_embeddings": 32768, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
"""Qwen2.5-0.5B's shape, for `make_model`."""
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "ffn_hidden_size": 512,
}  # fmt: skip
"""Small, but with heads of 64, which all kernels of attention take."""
CONFIG = "qwen2.5-0.5b"


def make_model(folder: Path, shape: dict[str, Any]) -> Path:
    """A Hugging Face folder with weights and tokenizer."""
    example("tiny_model").make_tiny_model(folder, example("arithmetic").arithmetic_texts(), **shape)
    return folder


def config_folder(name: str = CONFIG) -> str:
    """The folder of a real model's config.json, without weights."""
    return str(shipped() / "recipes" / "models" / name)
