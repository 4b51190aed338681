"""Configurations that are refused, and why: all checks, for each command.

Guarantee: one call reports every violation it can find, each with the full keys and a valid alternative.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from megarl.config.checks.data import data_problems, file_problems, template_problems
from megarl.config.checks.float8 import float8_problems
from megarl.config.checks.gateway import gateway_problems
from megarl.config.checks.given_responses import given_response_problems
from megarl.config.checks.layout import engine_problems, layout_problems, pool_problems, update_problems
from megarl.config.checks.rollout import (
    evaluation_sampling_problems,
    multi_turn_problems,
    reward_model_problems,
    reward_problems,
    rollout_problems,
    speculative_problems,
    training_sampling_problems,
    val_set_problems,
)
from megarl.config.checks.run import run_problems
from megarl.config.checks.training import training_problems
from megarl.config.checks.values import secret_problems, value_problems
from megarl.config.loading.hub import path_problems
from megarl.config.problems import raise_if_any
from megarl.config.resolve import GLOBAL_POOL, resolve
from megarl.config.schema.commands import EvalConfig, TrainConfig
from megarl.config.schema.supervised import DPOConfig, RMConfig, SFTConfig, TuningConfig

C = TypeVar("C", bound=TrainConfig | TuningConfig | EvalConfig)


def check_config(config: C, data_files: bool = True) -> C:
    """Check a configuration against itself and the file system, and resolve it.

    The model's sizes are left to `check_models`.

    Args:
        config: as it was written, or resolved.
        data_files: whether a TrainConfig must name data files, and those that a configuration names must exist.

    Raises:
        ValueError: all violations in one message.
    """
    full = resolve(config)
    raise_if_any("configuration", config_problems(config, full, data_files))
    return full


def config_problems(config: C, full: C, data_files: bool = True) -> list[str]:
    """The problems that `check_config` raises, a line each.

    Args:
        config: as it was written: a value that several keys take from one is reported for that one.
        full: `config`, resolved.
    """
    problems = [*value_problems(config), *secret_problems(config), *path_problems(config)]
    if not isinstance(full, TuningConfig):
        problems += _plugin_problems(full)
    if isinstance(full, TrainConfig):
        assert isinstance(config, TrainConfig)
        problems += [*pool_problems(full, config), *_train_problems(full, data_files)]
    elif isinstance(full, TuningConfig):
        problems += _supervised_problems(full, data_files)
    else:
        problems += _eval_problems(full)
    return problems


def _train_problems(config: TrainConfig, data_files: bool) -> Iterator[str]:
    yield from layout_problems(config)
    yield from float8_problems(config)
    yield from update_problems(config)
    yield from engine_problems(config)
    yield from training_sampling_problems(config)
    yield from multi_turn_problems(config)
    yield from gateway_problems(config)
    yield from speculative_problems(config)
    yield from training_problems(config)
    yield from rollout_problems(config)
    yield from val_set_problems(config, data_files)
    yield from run_problems(config)
    yield from data_problems(config, data_files and config.trainer.train_only is None)
    yield from given_response_problems(config)
    yield from reward_model_problems(config)
    yield from reward_problems(config)


def _plugin_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    for path in config.plugins:
        if not Path(path).is_file() or not path.endswith(".py"):
            yield f"plugins: {path} is no .py file that is there (working directory {Path.cwd()})"


def _eval_problems(config: EvalConfig) -> Iterator[str]:
    yield from engine_problems(config)
    yield from evaluation_sampling_problems(config.rollout)
    yield from multi_turn_problems(config)
    yield from gateway_problems(config)
    yield from speculative_problems(config)
    if config.rollout.free_cache_engine is not None:
        yield "rollout.free_cache_engine: evaluation trains nothing that could use the memory; leave it out"
    if config.rollout.resource_pool != GLOBAL_POOL:
        yield f"rollout.resource_pool={config.rollout.resource_pool!r}: evaluation has one pool; leave it out"
    yield from file_problems("data.val_files", config.data.val_files)
    yield from template_problems(
        config.data.apply_chat_template_kwargs, config.data.tools_key, config.data.prompt_key
    )
    yield from val_set_problems(config, True)
    yield from reward_problems(config)


def _supervised_problems(config: TuningConfig, data_files: bool) -> Iterator[str]:
    yield from layout_problems(config)
    yield from float8_problems(config)
    yield from update_problems(config)
    yield from training_problems(config)
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        if getattr(config.megatron, name) is not None:
            yield f"megatron.{name} is for runs with rollout engines: fine-tuning uses all it has all the time; leave it out"
    if data_files:
        for name in ("train_files", "val_files", "normalize_files"):
            yield from file_problems(f"data.{name}", getattr(config.data, name, None))
    yield from template_problems(config.data.apply_chat_template_kwargs, config.data.tools_key)
    yield from run_problems(config)
    trainer = config.trainer
    if trainer.test_freq <= 0:
        if trainer.save_best:
            yield "trainer.save_best=true needs trainer.test_freq: the best model is that of the lowest val/loss"
        if trainer.early_stop_patience is not None:
            yield (
                f"trainer.early_stop_patience={trainer.early_stop_patience} counts validations: it needs trainer.test_freq"
            )
    if isinstance(config, SFTConfig):
        yield from _text_problems(config)
    if isinstance(config, RMConfig):
        yield from _reward_model_problems(config)
    if isinstance(config, DPOConfig):
        dpo = config.dpo
        for kind, name, value, default in (
            ("sigmoid", "label_smoothing", dpo.label_smoothing, 0.0),
            ("simpo", "gamma", dpo.gamma, 0.0),
            ("kto", "desirable_weight", dpo.desirable_weight, 1.0),
            ("kto", "undesirable_weight", dpo.undesirable_weight, 1.0),
        ):
            if value != default and dpo.loss_type != kind:
                yield f"dpo.{name}={value:g} is of dpo.loss_type={kind}; leave it out"


def _text_problems(config: SFTConfig) -> Iterator[str]:
    data = config.data
    if data.text_key is None:
        if data.truncation == "split":
            yield "data.truncation=split is for plain text (data.text_key): a chat is not cut into several"
        return
    for name in ("response_key", "apply_chat_template_kwargs"):
        if getattr(data, name) is not None:
            yield f"data.{name} is of chats, but data.text_key={data.text_key!r} reads plain text; give one of them"


def _reward_model_problems(config: RMConfig) -> Iterator[str]:
    data = config.data
    if data.normalize == "none" and data.normalize_files is not None:
        yield "data.normalize_files: data.normalize=none uses no reference answers; leave one of them out"
    if data.normalize_response_key is not None and data.normalize_files is None:
        yield (
            f"data.normalize_response_key={data.normalize_response_key!r} is a column of data.normalize_files, which is null"
        )
    if config.model.mtp != "drop":
        yield f"model.mtp={config.model.mtp}: a reward model predicts no tokens, so it has no such layers; leave it out"
    if config.model.indexer == "train":
        yield "model.indexer=train: indexers learn with the tokens that a model learns to predict, and a reward model predicts none; leave it out"
