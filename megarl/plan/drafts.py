"""A draft model in a folder of its own (EAGLE3), as the plan of an engine's memory and time counts it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megarl.config import RolloutConfig


@dataclass(frozen=True)
class DraftFolder:
    """What a rank of an engine has of a draft model: bytes of weights, and values in the cache for a token."""

    weights: int = 0
    token: int = 0


def draft_folder(rollout: RolloutConfig) -> DraftFolder:
    """The draft model of a resolved section, with its weights as large as its files and cut evenly; nothing of it where there is none.

    Raises:
        ValueError: the folder has no config.json with a model's sizes, or no weights.
    """
    path = rollout.speculative.draft_path
    if path is None:
        return DraftFolder()
    key, folder, tp = "rollout.speculative.draft_path", Path(path), rollout.tensor_model_parallel_size
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not (folder / "config.json").is_file() or not files:
        raise ValueError(
            f"{key}: {folder} has no config.json and files of weights; give a Hugging Face model folder"
        )
    config = json.loads((folder / "config.json").read_text())
    missing = [
        name for name in ("hidden_size", "num_attention_heads", "num_hidden_layers") if name not in config
    ]
    if missing:
        raise ValueError(f"{key}: {folder / 'config.json'} lacks {', '.join(missing)}")
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    shared = max(1, (config.get("num_key_value_heads") or heads) // tp)
    weights = sum(file.stat().st_size for file in files)
    return DraftFolder(-(-weights // tp), config["num_hidden_layers"] * 2 * shared * width)
