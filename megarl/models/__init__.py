"""Model families: a Hugging Face config's facts, and the place of each weight in Megatron and SGLang.

Promises: every fact comes from the config, none is assumed; a field that changes the computation and is
not supported is refused by name. Must not know: process groups, engines, RL; sniffs no class names.
"""

from collections.abc import Mapping

from megarl.models.alike import llama_alike
from megarl.models.config import COMPANIONS, ModelConfig
from megarl.models.families import FAMILIES
from megarl.models.fields import load_hf_config
from megarl.models.shards import MegatronPlace, SGLangPlace
from megarl.models.table import (
    BUFFERS,
    DRAFT,
    head_chunk_tokens,
    keeps_float32,
    kinds_of_layers,
    logical_tensors,
    megatron_pieces,
    mtp_copies,
    padded_vocab_size,
    sglang_keeps_float32,
    sglang_padding,
    sglang_pieces,
)


def read_model_config(path: str, parts: Mapping[str, bool] | None = None) -> ModelConfig:
    """The facts of the model in the Hugging Face folder `path`.

    Args:
        parts: see `llama_alike`; families do not need them.

    Raises:
        ValueError: no such model, a family that is not supported, or a config field that is not.
    """
    hf = load_hf_config(path)
    kind = hf.text("model_type")
    return FAMILIES[kind](hf) if kind in FAMILIES else llama_alike(hf, path, parts)


__all__ = [
    "BUFFERS",
    "COMPANIONS",
    "DRAFT",
    "FAMILIES",
    "MegatronPlace",
    "ModelConfig",
    "SGLangPlace",
    "head_chunk_tokens",
    "keeps_float32",
    "kinds_of_layers",
    "logical_tensors",
    "megatron_pieces",
    "mtp_copies",
    "padded_vocab_size",
    "read_model_config",
    "sglang_keeps_float32",
    "sglang_padding",
    "sglang_pieces",
]
