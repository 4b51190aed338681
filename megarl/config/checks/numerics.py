"""Checks of number formats, of optimizers, of the exact KL, of loggers and of health: what they need."""

from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec

from megarl.config.resolve import full_kl_in_loss, full_kl_in_reward, reference_in_actor
from megarl.config.schema.commands import ActorConfig, CriticConfig, TrainConfig
from megarl.config.schema.health import HealthConfig
from megarl.config.schema.sections import TRACKERS, MegatronConfig, OptimConfig
from megarl.config.schema.supervised import TuningConfig

_POLICY = "actor_rollout_ref"
_LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def numerics_problems(config: TrainConfig | TuningConfig) -> Iterator[str]:
    """Of a resolved configuration."""
    yield from _logger_problems(config.trainer.logger)
    if isinstance(config, TuningConfig):
        yield from _loss_scale_problems("", config.optim, config.megatron)
        return
    roles: dict[str, ActorConfig | CriticConfig] = {f"{_POLICY}.actor.": config.actor_rollout_ref.actor}
    if config.critic is not None:
        roles["critic."] = config.critic
    for key, role in roles.items():
        assert role.megatron is not None, "resolved"
        yield from _loss_scale_problems(key, role.optim, role.megatron)
        if role.optim.optimizer_cpu_offload and role.megatron.optimizer_offload is False:
            yield (
                f"{key}optim.optimizer_cpu_offload=true has the optimizer's states on the host, "
                f"{key}megatron.optimizer_offload=false on the devices: leave out one of them"
            )
    yield from _full_kl_problems(config)
    yield from _health_problems(config)


def _logger_problems(loggers: tuple[str, ...]) -> Iterator[str]:
    for name, install in TRACKERS.items():
        if name in loggers and find_spec(name) is None:
            yield f"trainer.logger has {name}, which is not installed: {install} (or leave it out)"


def _loss_scale_problems(prefix: str, optim: OptimConfig, megatron: MegatronConfig) -> Iterator[str]:
    defaults = {member.name: member.default for member in fields(OptimConfig)}
    if megatron.dtype != "float16":
        for name in _LOSS_SCALING:
            if getattr(optim, name) != defaults[name]:
                yield (
                    f"{prefix}optim.{name}={getattr(optim, name):g} is for {prefix}megatron.dtype=float16, which is "
                    f"{megatron.dtype or 'null'}: losses are not scaled; leave it out"
                )
    elif optim.min_loss_scale > optim.initial_loss_scale:
        yield (
            f"{prefix}optim.min_loss_scale={optim.min_loss_scale:g} is greater than "
            f"{prefix}optim.initial_loss_scale={optim.initial_loss_scale:g}"
        )


def _full_kl_problems(config: TrainConfig) -> Iterator[str]:
    uses = {
        f"{_POLICY}.actor.kl_loss_type": full_kl_in_loss(config),
        "algorithm.kl_penalty": full_kl_in_reward(config),
    }
    for key, used in uses.items():
        if used and not reference_in_actor(config):
            yield (
                f"{key}='full' compares whole distributions, so policy and reference must be in the same processes: give "
                f"{_POLICY}.ref neither a layout (megatron) nor a resource_pool of its own, or choose low_var_kl"
            )
    if full_kl_in_reward(config) and config.algorithm.rollout_correction.bypass_mode:
        yield (
            "algorithm.kl_penalty='full' needs the policy's forward pass, which "
            "algorithm.rollout_correction.bypass_mode=true leaves out; choose low_var_kl, or leave bypass_mode out"
        )


def _health_problems(config: TrainConfig) -> Iterator[str]:
    health: HealthConfig = config.health
    if not health.enable and (health.early_stop or health.auto_action):
        yield "health.early_stop and health.auto_action need health.enable=true"
    if (
        health.ppo_kl_low is not None
        and health.ppo_kl_high is not None
        and health.ppo_kl_low >= health.ppo_kl_high
    ):
        yield f"health.ppo_kl_low={health.ppo_kl_low:g} must be less than health.ppo_kl_high={health.ppo_kl_high:g}"
    if "stagnation" in health.early_stop and config.trainer.test_freq < 1:
        yield (
            "health.early_stop has stagnation, which is seen by validations: set trainer.test_freq (and data.val_files or "
            "data.val_sets)"
        )


def checkpointing_problems(
    model_key: str, role_key: str, checkpointing: bool | None, megatron: MegatronConfig | None
) -> Iterator[str]:
    """enable_gradient_checkpointing and recompute_granularity (of the same model, unresolved) must not contradict."""
    granularity = None if megatron is None else megatron.recompute_granularity
    if granularity is not None and checkpointing is not None and checkpointing != (granularity == "full"):
        key = f"{role_key}.megatron" if role_key else "megatron"
        yield (
            f"{model_key}.enable_gradient_checkpointing={str(checkpointing).lower()} contradicts "
            f"{key}.recompute_granularity={granularity}; give one of them"
        )


def optim_problems(key: str, optim: OptimConfig) -> Iterator[str]:
    if optim.min_lr > optim.lr:
        yield f"{key}.min_lr={optim.min_lr:g} is greater than {key}.lr={optim.lr:g}"
    if optim.lr_decay_steps is not None and optim.lr_warmup_steps >= optim.lr_decay_steps:
        yield (
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} must be less than "
            f"{key}.lr_decay_steps={optim.lr_decay_steps}"
        )
