"""What can be known to be wrong with a run before any of its processes starts, all of it in one message.

It takes about a second: neither torch nor transformers nor Ray is imported, and of files only beginnings are read. What takes a
tokenizer, every row, or another process is found where the run reads its inputs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from megarl.config import EvalConfig, TrainConfig, TuningConfig, config_problems, fit_problems, resolve
from megarl.config.checks.layout import split_sequences
from megarl.config.loading.hub import fetch_models, model_problems
from megarl.config.loading.problems import raise_if_any
from megarl.config.schema.rollout import MultiTurnConfig
from megarl.data.tokenizer import tokenizer_files
from megarl.doctor.facts import gpus_here
from megarl.doctor.preflight_data import data_problems
from megarl.environments import find_environment
from megarl.environments.environment import ENVIRONMENTS
from megarl.models import ModelConfig, read_model_config
from megarl.models.weight_files import check_model_files
from megarl.trainer.roles.adapters import adapter_problems
from megarl.trainer.run.resumed import likely_refusals

Config = TrainConfig | TuningConfig | EvalConfig


def preflight(config: Config) -> None:
    """Check the keys of a configuration, resolved or not, and what they name: models' configurations, data, checkpoints.

    Models that are named by their id on the Hub are looked at (and their configurations downloaded) once all keys are right.

    Raises:
        ValueError: one line for each key, file or layout that is wrong.
    """
    problems = config_problems(config)
    config = resolve(config)
    problems += _weight_problems(config)
    if not problems:
        config = fetch_models(config, weights=False)
    models, unreadable = _read_models(config)
    problems += [*unreadable, *fit_problems(config, *models), *_vocabulary_problems(config, models[0])]
    problems += [*_tokenizer_problems(config), *_environment_problems(config), *data_problems(config)]
    problems += _attention_problems(config)
    if not unreadable and not isinstance(config, EvalConfig):
        problems += likely_refusals(config)
    if not problems and not isinstance(config, EvalConfig):
        problems += adapter_problems(config, *models[:2])  # of layouts that can be
    raise_if_any("configuration", problems)


def _read_models(config: Config) -> tuple[list[ModelConfig | None], list[str]]:
    """The facts of the trained or evaluated model, the critic and the reward model, None where there are none; and why."""
    facts: dict[str, ModelConfig | str] = {}  # by folder; what is wrong with it
    models: list[ModelConfig | None] = []
    for key, path in _model_paths(config).items():
        # One that is not there is config_problems' to tell; an id of the Hub's is no folder yet.
        if path is None or list(model_problems(key, path)) or not Path(path).expanduser().is_dir():
            models.append(None)
            continue
        if path not in facts:
            try:
                facts[path] = read_model_config(path)
            except (ValueError, OSError) as error:
                facts[path] = f"{key}: {error}"
        found = facts[path]
        models.append(None if isinstance(found, str) else found)
    return models, [found for found in facts.values() if isinstance(found, str)]


def _model_paths(config: Config) -> dict[str, str | None]:
    """The keys of the trained or evaluated model, the critic and the reward model, with their paths; None: there is none."""
    if not isinstance(config, TrainConfig):
        return {"model.path": config.model.path}
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    return {
        "actor_rollout_ref.model.path": policy.model.path,
        "critic.model.path": None if critic is None else critic.model.path,
        "reward_model.model.path": reward.model.path if reward.enable else None,
    }


def _weight_problems(config: Config) -> Iterator[str]:
    """Of models' folders; those of the Hub are checked once they are fetched."""
    for path, key in {path: key for key, path in reversed(_model_paths(config).items())}.items():
        if path is not None and (Path(path).expanduser() / "config.json").is_file():
            try:
                check_model_files(path)
            except (ValueError, OSError) as error:
                yield f"{key}: {error}"


def _tokenizer_problems(config: Config) -> Iterator[str]:
    """Of folders; one that is not there is config_problems' to tell."""
    if isinstance(config, TrainConfig):
        paths = {"actor_rollout_ref.model.tokenizer_path": config.actor_rollout_ref.model.tokenizer_path}
        if config.reward_model.enable:
            paths["reward_model.model.input_tokenizer"] = config.reward_model.model.input_tokenizer
    else:
        paths = {"model.tokenizer_path": config.model.tokenizer_path}
    for key, path in paths.items():
        if path is not None and Path(path).expanduser().is_dir():
            try:
                tokenizer_files(Path(path).expanduser())
            except ValueError as error:
                yield f"{key}: {error}"


def check_environment(config: TrainConfig | EvalConfig) -> None:
    """That there is an environment of the name, which takes the options. Users' plugins have been imported.

    Raises:
        ValueError: see `find_environment`.
    """
    multi_turn = _multi_turn(config)
    if multi_turn.enable and multi_turn.environment is not None:
        find_environment(multi_turn.environment, multi_turn.options or {})


def _environment_problems(config: Config) -> Iterator[str]:
    """Of options. Another name is config_problems' to tell, or an environment of a plugin that is imported later."""
    if not isinstance(config, TuningConfig) and _multi_turn(config).environment in ENVIRONMENTS:
        try:
            check_environment(config)
        except ValueError as error:
            yield str(error)


def _multi_turn(config: TrainConfig | EvalConfig) -> MultiTurnConfig:
    policy = config.actor_rollout_ref if isinstance(config, TrainConfig) else config
    return policy.rollout.multi_turn


def _attention_problems(config: Config) -> Iterator[str]:
    """Without Transformer Engine (megarl/megatron/cpu/attention.py) each context parallel rank would hold its scores of a sequence whole."""
    if isinstance(config, EvalConfig) or importlib.util.find_spec("transformer_engine") is not None:
        return
    if (keys := split_sequences(config)) and gpus_here():
        yield (
            f"{keys[0]}: context parallelism on GPUs needs Transformer Engine, which is not installed (requirements/gpu.txt): without "
            "its kernels attention has no place for long sequences; install it, or set context_parallel_size to 1"
        )


def _vocabulary_problems(config: Config, model: ModelConfig | None) -> Iterator[str]:
    """Engines on GPUs have equal shares of the vocabulary, padded to a multiple of 64; on a CPU SGLang (0.5.21) pads further."""
    if model is None or isinstance(config, TuningConfig):
        return
    of_run = isinstance(config, TrainConfig)
    key, rollout = (
        ("actor_rollout_ref.rollout", config.actor_rollout_ref.rollout)
        if of_run
        else ("rollout", config.rollout)
    )
    tp, padded = rollout.tensor_model_parallel_size, -(-model.vocab_size // 64) * 64
    if tp > 0 and padded % tp and gpus_here():
        yield (
            f"{key}.tensor_model_parallel_size={tp} does not divide the model's {model.vocab_size} tokens, padded to {padded}, "
            "as SGLang needs it on GPUs; a power of two up to 64 does"
        )
