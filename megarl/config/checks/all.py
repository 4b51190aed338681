"""What no single key can tell: values out of range, and keys that do not fit each other, files or devices.

Guarantee: one call reports every violation it can find, each with the full keys and what would be right.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.config.checks.algorithm import algorithm_problems
from megarl.config.checks.data import data_problems, file_problems, template_problems, tokenizer_name_problems
from megarl.config.checks.layout import engine_problems, layout_problems, pool_problems, update_problems
from megarl.config.checks.lora import lora_problems
from megarl.config.checks.modes import mode_problems
from megarl.config.checks.numerics import checkpointing_problems, numerics_problems, optim_problems
from megarl.config.checks.offline import halves_problems
from megarl.config.checks.reward_model import reward_model_problems
from megarl.config.checks.rewards import reward_problems
from megarl.config.checks.rollouts import rollout_problems, val_set_problems
from megarl.config.checks.sampling import (
    evaluation_sampling_problems,
    multi_turn_problems,
    training_sampling_problems,
)
from megarl.config.checks.saving import saving_problems
from megarl.config.checks.secrets import secret_problems
from megarl.config.checks.supervised import tuning_problems
from megarl.config.checks.tracing import tracing_problems
from megarl.config.loading.hub import model_problems, tokenizer_problems
from megarl.config.loading.problems import did_you_mean, raise_if_any
from megarl.config.resolve import GLOBAL_POOL, resolve
from megarl.config.schema.commands import EvalConfig, TrainConfig
from megarl.config.schema.options import walk_values
from megarl.config.schema.supervised import TuningConfig

_POLICY = "actor_rollout_ref"


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


def value_problems(config: Any) -> Iterator[str]:
    """Choices and bounds, as declared beside each key."""
    for key, member, value in walk_values(config):
        rules = member.metadata
        for item in value if isinstance(value, tuple) else (value,):
            if item is None:
                continue
            choices = rules.get("choices")
            if choices is not None and item not in choices:
                hint = did_you_mean(str(item), choices)
                yield f"{key}={item!r} is unknown; megarl has {', '.join(choices)}{hint}"
            yield from _bound_problems(key, item, rules)
        last = key.rpartition(".")[2]
        if last in ("test_freq", "save_freq", "top_k") and value == 0:
            meaning = "-1 (all)" if last == "top_k" else "-1 (never)"
            yield f"{key}=0: it must be {meaning} or at least 1"


def _bound_problems(key: str, value: Any, rules: Any) -> Iterator[str]:
    holds = {
        "gt": ("greater than", lambda bound: value > bound),
        "ge": ("at least", lambda bound: value >= bound),
        "lt": ("less than", lambda bound: value < bound),
        "le": ("at most", lambda bound: value <= bound),
    }
    bounds = {name: rules[name] for name in holds if rules.get(name) is not None}
    if not all(holds[name][1](bound) for name, bound in bounds.items()):
        valid = " and ".join(f"{holds[name][0]} {bound:g}" for name, bound in bounds.items())
        yield f"{key}={value} is out of range: it must be {valid}"


def _train_problems(config: TrainConfig, data_files: bool) -> Iterator[str]:
    full = resolve(config)
    policy = full.actor_rollout_ref
    yield from _plugin_problems(config)
    yield from pool_problems(config)
    yield from checkpointing_problems(
        f"{_POLICY}.model",
        f"{_POLICY}.actor",
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
    yield from optim_problems(f"{_POLICY}.actor.optim", policy.actor.optim)
    yield from model_problems(f"{_POLICY}.model.path", policy.model.path)
    yield from tokenizer_problems(
        f"{_POLICY}.model.tokenizer_path", config.actor_rollout_ref.model.tokenizer_path
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
