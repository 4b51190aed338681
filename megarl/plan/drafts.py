"""A draft model in a folder of its own (EAGLE3), as the plan of an engine's memory and time counts it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from megarl.config import RolloutConfig
from megarl.plan.inputs import precision

KEY = "rollout.speculative.draft_path"
_POSITIONS = 2048  # the default of transformers' LlamaConfig, for a folder that gives none


@dataclass(frozen=True)
class DraftFolder:
    """An engine rank's share of a draft model: bytes of weights and of rotary tables, and values in the cache for a token, over all layers."""

    num_layers: int = 0
    weights: int = 0
    rotary: int = 0
    token: int = 0


def draft_folder(rollout: RolloutConfig) -> DraftFolder:
    """An engine rank's share of the draft model of a resolved section; all 0 where there is no draft.

    As SGLang's LlamaForCausalLMEagle3 holds it (sglang 0.5.21): in the engine's type; heads, columns of the feed-forward layer and rows of
    the head are cut, norms and the projection of the model's hidden states are not; the embedding is the model's.

    Raises:
        ValueError: the folder has no config.json with a model's sizes, or no weights.
    """
    path = rollout.speculative.draft_path
    if path is None:
        return DraftFolder()
    folder, tp = Path(path), rollout.tensor_model_parallel_size
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not (folder / "config.json").is_file() or not files:
        raise ValueError(
            f"{KEY}: {folder} has no config.json and files of weights; give a Hugging Face model folder"
        )
    config = json.loads((folder / "config.json").read_text())
    missing = [
        name for name in ("hidden_size", "num_attention_heads", "num_hidden_layers") if name not in config
    ]
    if missing:
        raise ValueError(f"{KEY}: {folder / 'config.json'} lacks {', '.join(missing)}")
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    groups = config.get("num_key_value_heads") or heads
    shared = max(1, groups // tp)
    numel = 0
    for name, shape in (tensor for file in files for tensor in _tensors(file)):
        if any(part in name for part in ("embed_tokens", "d2t", "t2d")):
            continue
        whole = len(shape) < 2 or name.startswith("fc.")
        cut = groups // shared if ".k_proj." in name or ".v_proj." in name else tp
        numel += math.prod(shape) // (1 if whole else cut)
    return DraftFolder(
        num_layers=config["num_hidden_layers"],
        weights=numel * precision(rollout.dtype).itemsize,
        rotary=config.get("max_position_embeddings", _POSITIONS) * width * torch.float32.itemsize,
        token=config["num_hidden_layers"] * 2 * shared * width,
    )


def _tensors(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors in a file of weights, whose values are not read."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                yield name, tuple(weights.get_slice(name).get_shape())
    else:
        for name, value in torch.load(file, map_location="meta", weights_only=True).items():
            yield name, tuple(value.shape)
