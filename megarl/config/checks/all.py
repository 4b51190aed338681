"""All checks of a configuration, for each command.

Guarantee: one call reports every violation it can find, each with the full keys and a valid alternative.
"""

from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks.algorithm import algorithm_problems
from megarl.config.checks.data import data_problems, file_problems, template_problems, tokenizer_name_problems
from megarl.config.checks.layout import engine_problems, layout_problems, pool_problems, update_problems
from megarl.config.checks.models import (
    checkpointing_problems,
    lora_problems,
    numerics_problems,
    optim_problems,
)
from megarl.config.checks.rewards import reward_model_problems, reward_problems
from megarl.config.checks.rollout import (
    evaluation_sampling_problems,
    multi_turn_problems,
    rollout_problems,
    training_sampling_problems,
    val_set_problems,
)
from megarl.config.checks.run import halves_problems, mode_problems, saving_problems, tracing_problems
from megarl.config.checks.values import secret_problems, value_problems
from megarl.config.loading.hub import model_problems, tokenizer_problems
from megarl.config.problems import raise_if_any
from megarl.config.resolve import GLOBAL_POOL, resolve
from megarl.config.schema.commands import POLICY, EvalConfig, TrainConfig
from megarl.config.schema.supervised import DPOConfig, RMConfig, SFTConfig, TuningConfig


def check_config(config: TrainConfig | TuningConfig | EvalConfig, data_files: bool = True) -> None:
    """Check a configuration, resolved or not, against itself and the file system.

    What depends on the model's sizes is checked by `check_models`.

    Args:
        data_files: whether a TrainConfig must name any, and those of any configuration must be there.

    Raises:
        ValueError: all violations in one message.
    """
    raise_if_any("configuration", config_problems(config, data_files))


def config_problems(config: TrainConfig | TuningConfig | EvalConfig, data_files: bool = True) -> list[str]:
    """What `check_config` raises, a line each."""
    problems = [*value_problems(config), *secret_problems(config)]
    if isinstance(config, TrainConfig):
        problems += _train_problems(config, data_files)
    elif isinstance(config, TuningConfig):
        problems += tuning_problems(config, data_files)
    else:
        problems += _eval_problems(config)
    return problems


def _train_problems(config: TrainConfig, data_files: bool) -> Iterator[str]:
    full = resolve(config)
    policy = full.actor_rollout_ref
    yield from _plugin_problems(config)
    yield from pool_problems(config)
    yield from checkpointing_problems(
        f"{POLICY}.model",
        f"{POLICY}.actor",
        config.actor_rollout_ref.model.enable_gradient_checkpointing,
        config.actor_rollout_ref.actor.megatron,
    )
    if config.critic is not None:
        yield from checkpointing_problems(
            "critic.model",
            "critic",
            config.critic.model.enable_gradient_checkpointing,
            config.critic.megatron,
        )
    yield from layout_problems(full)
    yield from update_problems(full)
    yield from engine_problems(full)
    yield from training_sampling_problems(policy.rollout)
    yield from multi_turn_problems(full)
    yield from algorithm_problems(full)
    yield from rollout_problems(full)
    yield from val_set_problems(full, data_files)
    yield from optim_problems(f"{POLICY}.actor.optim", policy.actor.optim)
    yield from model_problems(f"{POLICY}.model.path", policy.model.path)
    yield from tokenizer_problems(
        f"{POLICY}.model.tokenizer_path", config.actor_rollout_ref.model.tokenizer_path
    )
    yield from tokenizer_problems("data.tokenizer", config.data.tokenizer)
    yield from tokenizer_name_problems(config)
    if full.critic is not None:
        yield from optim_problems("critic.optim", full.critic.optim)
        if full.critic.model.path != policy.model.path:
            yield from model_problems("critic.model.path", full.critic.model.path)
    if full.reward_model.enable:
        reward = full.reward_model.model
        if reward.path is not None:
            yield from model_problems("reward_model.model.path", reward.path)
        yield from tokenizer_problems("reward_model.model.input_tokenizer", reward.input_tokenizer)
    yield from reward_model_problems(full)
    yield from numerics_problems(full)
    yield from lora_problems(full)
    yield from saving_problems(config.trainer, config.trainer.test_freq)
    yield from tracing_problems(config.trainer)
    yield from halves_problems(full)
    yield from mode_problems(full)
    yield from data_problems(full, data_files and config.trainer.train_only is None)
    yield from reward_problems(full)


def _plugin_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    for path in config.plugins:
        if not Path(path).is_file() or not path.endswith(".py"):
            yield f"plugins: {path} is no .py file that is there (working directory {Path.cwd()})"


def _eval_problems(config: EvalConfig) -> Iterator[str]:
    yield from _plugin_problems(config)
    yield from engine_problems(resolve(config))
    yield from evaluation_sampling_problems(config.rollout)
    yield from multi_turn_problems(config)
    if config.rollout.free_cache_engine is not None:
        yield "rollout.free_cache_engine: evaluation trains nothing that could use the memory; leave it out"
    if config.rollout.resource_pool not in (None, GLOBAL_POOL):
        yield f"rollout.resource_pool={config.rollout.resource_pool!r}: evaluation has one pool; leave it out"
    yield from model_problems("model.path", config.model.path)
    yield from tokenizer_problems("model.tokenizer_path", config.model.tokenizer_path)
    yield from file_problems("data.val_files", config.data.val_files)
    yield from template_problems(
        config.data.apply_chat_template_kwargs, config.data.tools_key, config.data.prompt_key
    )
    yield from val_set_problems(config, True)
    yield from reward_problems(config)


def tuning_problems(config: TuningConfig, data_files: bool = True) -> Iterator[str]:
    """Of a configuration that may be unresolved. `data_files`: whether its files must be there."""
    yield from checkpointing_problems(
        "model", "", config.model.enable_gradient_checkpointing, config.megatron
    )
    yield from layout_problems(resolve(config))
    yield from update_problems(resolve(config))
    yield from optim_problems("optim", config.optim)
    yield from numerics_problems(config)
    yield from lora_problems(config)
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        if getattr(config.megatron, name) is not None:
            yield f"megatron.{name} is for runs with rollout engines: fine-tuning uses all it has all the time; leave it out"
    yield from model_problems("model.path", config.model.path)
    yield from tokenizer_problems("model.tokenizer_path", config.model.tokenizer_path)
    if data_files:
        yield from file_problems("data.train_files", config.data.train_files)
        yield from file_problems("data.val_files", config.data.val_files)
        if isinstance(config, RMConfig):
            yield from file_problems("data.normalize_files", config.data.normalize_files)
    yield from template_problems(config.data.apply_chat_template_kwargs, config.data.tools_key)
    yield from _validation_problems(config)
    yield from saving_problems(config.trainer, config.trainer.test_freq)
    yield from tracing_problems(config.trainer)
    if isinstance(config, SFTConfig):
        yield from _text_problems(config)
    if isinstance(config, RMConfig):
        yield from _reward_model_problems(config)
    if isinstance(config, DPOConfig) and config.dpo.loss_type == "ipo" and config.dpo.label_smoothing > 0:
        yield f"dpo.label_smoothing={config.dpo.label_smoothing:g} is of dpo.loss_type=sigmoid; leave it out"


def _validation_problems(config: TuningConfig) -> Iterator[str]:
    trainer = config.trainer
    if config.data.val_files is None and trainer.test_freq > 0:
        yield f"trainer.test_freq={trainer.test_freq} needs data.val_files"
    if trainer.test_freq > 0:
        return
    if trainer.save_best:
        yield "trainer.save_best=true needs trainer.test_freq: the best model is that of the lowest val/loss"
    if trainer.early_stop_patience is not None:
        yield (
            f"trainer.early_stop_patience={trainer.early_stop_patience} counts validations: it needs trainer.test_freq"
        )


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
    if data.normalize_max_samples == 0:
        yield "data.normalize_max_samples=0: it must be -1 (all) or at least 1"
    if data.normalize == "none" and data.normalize_files is not None:
        yield "data.normalize_files: data.normalize=none uses no reference answers; leave one of them out"
    if data.normalize_response_key is not None and data.normalize_files is None:
        yield (
            f"data.normalize_response_key={data.normalize_response_key!r} is a column of data.normalize_files, which is null"
        )
    if config.model.mtp == "keep":
        yield "model.mtp=keep: a reward model predicts no tokens, so it has no such layers; leave it out"
