"""Models named by their id on the Hugging Face Hub, such as Qwen/Qwen2.5-0.5B-Instruct, and the folders they stand for."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from megarl.config.schema import value_at, with_value
from megarl.config.schema.commands import EvalConfig, TrainConfig
from megarl.config.schema.supervised import TuningConfig

C = TypeVar("C", bound=TrainConfig | TuningConfig | EvalConfig)

# Which keys name a model, and which a tokenizer alone; a command has some of them.
MODEL_KEYS = (
    *("model.path", "actor_rollout_ref.model.path", "actor_rollout_ref.ref.model.path"),
    *("critic.model.path", "reward_model.model.path"),
)
TOKENIZER_KEYS = (
    "model.tokenizer_path",
    "actor_rollout_ref.model.tokenizer_path",
    "reward_model.model.input_tokenizer",
)
_TEXTS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
_WEIGHTS = ("*.safetensors",)
# The same weights in another format, as gpt-oss has them in folders, and Mistral's models beside Hugging Face's.
_AGAIN = ("*/*.safetensors", "consolidated*.safetensors")
_CODE = ("*.py",)


def model_keys(config: TrainConfig | TuningConfig | EvalConfig) -> tuple[str, ...]:
    """The keys that name models: MODEL_KEYS, and a key for each of several teachers."""
    teachers = value_at(config, "actor_rollout_ref.teachers") or {}
    return (*MODEL_KEYS, *(f"actor_rollout_ref.teachers.{name}.model.path" for name in teachers))


def is_hub_id(path: str) -> bool:
    """Whether `path` may be an id: owner/name, and no existing path."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) is not None and not Path(path).exists()


def path_problems(config: TrainConfig | TuningConfig | EvalConfig) -> Iterator[str]:
    """Models and tokenizers that a configuration (resolved or not) names and that are neither on this machine nor ids on the Hub."""
    policy_keys = ("model.path", "actor_rollout_ref.model.path")
    policy = next(path for key in policy_keys if (path := value_at(config, key)) is not None)
    models = model_keys(config)
    for key in (*models, *TOKENIZER_KEYS, "data.tokenizer"):
        path = value_at(config, key)
        # A folder that is the policy's is the policy's problem.
        if path is None or (path == policy and key not in policy_keys):
            continue
        if key.startswith("reward_model.") and not value_at(config, "reward_model.enable"):
            continue
        if key in models:
            yield from model_problems(key, path)
        elif not is_hub_id(path) and not Path(path).expanduser().is_dir():
            yield f"{key}: {path} is no folder (working directory {Path.cwd()})"


def model_problems(key: str, path: str) -> Iterator[str]:
    """A model's folder must be there, unless it is an id, which is downloaded once everything else is right."""
    folder = Path(path).expanduser()
    if is_hub_id(path):
        return
    if not folder.is_dir():
        yield (
            f"{key}: {path} is no folder (working directory {Path.cwd()}); give the folder of a downloaded "
            "Hugging Face model, or its id on the Hub (owner/name)"
        )
    elif not (folder / "config.json").is_file():
        yield f"{key}: the folder {path} has no config.json, so it is no Hugging Face model"


def fetch_models(config: C, weights: bool = True) -> C:
    """The configuration with the folder in the Hub's cache in place of each id; a model that is not in the cache is downloaded.

    Args:
        config: resolved and checked.
        weights: without them, only configurations and tokenizers.

    Raises:
        ValueError: names the key and the id, and what to do.
    """
    folders: dict[tuple[str, tuple[str, ...]], str] = {}
    models = model_keys(config)
    for key in (*models, *TOKENIZER_KEYS):
        path = value_at(config, key)
        if key.startswith("reward_model.") and not value_at(config, "reward_model.enable"):
            continue
        if path is not None and is_hub_id(path):
            model = value_at(config, "actor_rollout_ref.model") or value_at(config, "model")
            texts = (*_TEXTS, *_CODE) if model.trust_remote_code else _TEXTS
            wanted = (path, (*texts, *_WEIGHTS) if weights and key in models else texts)
            if wanted not in folders:
                folders[wanted] = _download(key, *wanted)
            config = with_value(config, key, folders[wanted])
    return config


def _download(key: str, name: str, patterns: tuple[str, ...]) -> str:
    # Imported where it is needed: most runs name folders.
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    print(
        f"{key}: {name} from the Hugging Face Hub (or its cache, {constants.HF_HUB_CACHE}) ...",
        file=sys.stderr,
    )
    try:
        return snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(_AGAIN))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{key}: {name} is no folder (working directory {Path.cwd()}), and downloading it from the Hugging Face Hub "
            f"failed: {type(error).__name__}: {reason}\nWithout a way to the Hub: run `hf download {name} --local-dir "
            f"FOLDER` on a machine that has one, copy the folder here, and set {key}=FOLDER. For a gated model: log in "
            "with `hf auth login` first."
        ) from error
