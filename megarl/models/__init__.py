"""Model families: what a Hugging Face config says, and where each of its weights lies elsewhere.

Promises: every fact comes from the config, none is assumed; a field that changes the computation and is
not supported is refused by name. Must not know: process groups, engines, RL; sniffs no class names.
"""

from types import ModuleType

from megarl.models import llama, qwen2
from megarl.models.config import ModelConfig, load_hf_config
from megarl.models.dense import (
    logical_tensors,
    megatron_pieces,
    padded_vocab_size,
    sglang_pieces,
    sglang_vocab_share,
)

FAMILIES: dict[str, ModuleType] = {family.MODEL_TYPE: family for family in (llama, qwen2)}


def read_model_config(path: str) -> ModelConfig:
    """The facts of the model in the Hugging Face folder `path`.

    Raises:
        ValueError: no such model, a family that is not supported, or a config field that is not.
    """
    hf = load_hf_config(path)
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {kind!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind].config_from_hf(hf, path)


__all__ = [
    "FAMILIES",
    "ModelConfig",
    "logical_tensors",
    "megatron_pieces",
    "padded_vocab_size",
    "read_model_config",
    "sglang_pieces",
    "sglang_vocab_share",
]
