"""Checks of how models are trained: number formats, optimizers, the exact KL, loggers, health, low-rank adapters."""

from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from megarl.config.resolve import full_kl_in_loss, full_kl_in_reward, reference_in_actor
from megarl.config.schema.commands import POLICY, ActorConfig, CriticConfig, TrainConfig
from megarl.config.schema.models import LoraConfig, MegatronConfig, OptimConfig
from megarl.config.schema.run import TRACKERS, HealthConfig
from megarl.config.schema.supervised import TuningConfig

_LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def numerics_problems(config: TrainConfig | TuningConfig) -> Iterator[str]:
    """Of a resolved configuration."""
    yield from _logger_problems(config.trainer.logger)
    if isinstance(config, TuningConfig):
        yield from _loss_scale_problems("", config.optim, config.megatron)
        return
    roles: dict[str, ActorConfig | CriticConfig] = {f"{POLICY}.actor.": config.actor_rollout_ref.actor}
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
        f"{POLICY}.actor.kl_loss_type": full_kl_in_loss(config),
        "algorithm.kl_penalty": full_kl_in_reward(config),
    }
    for key, used in uses.items():
        if used and not reference_in_actor(config):
            yield (
                f"{key}='full' compares whole distributions, so policy and reference must be in the same processes: give "
                f"{POLICY}.ref neither a layout (megatron) nor a resource_pool of its own, or choose low_var_kl"
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


_BASE_BLOCK = next(member.default for member in fields(LoraConfig) if member.name == "base_block")
_OWN = ("seed", "grad_offload", "optimizer_offload")  # what a critic on the actor's base may have otherwise


def lora_problems(config: TrainConfig | TuningConfig) -> Iterator[str]:
    """Of a resolved configuration."""
    if isinstance(config, TuningConfig):
        yield from _section_problems("model.lora", config.model.lora)
        return
    lora = config.actor_rollout_ref.model.lora
    yield from _section_problems(f"{POLICY}.model.lora", lora)
    if lora.rank and lora.dropout:
        yield (
            f"{POLICY}.model.lora.dropout={lora.dropout:g}: the policy that is trained would not be the one that generated, "
            "and the ratio of the first update not 1; leave it out"
        )
    if config.critic is not None:
        yield from _section_problems("critic.model.lora", config.critic.model.lora)
        if config.critic.model.share_base:
            yield from _shared_base_problems(config, config.critic)


def _section_problems(key: str, lora: LoraConfig) -> Iterator[str]:
    if lora.rank == 0:
        given = [
            member.name
            for member in fields(LoraConfig)
            if member.name != "rank" and getattr(lora, member.name) != member.default
        ]
        if given:
            yield f"{key} has {', '.join(given)}, but no adapters: give {key}.rank, or leave these out"
        return
    if not lora.target_modules:
        yield f"{key}.target_modules is empty; leave it out for all-linear, or {key}.rank for no adapters"
    if lora.base_dtype is None and lora.base_block != _BASE_BLOCK:
        yield f"{key}.base_block={lora.base_block}, but {key}.base_dtype is null: give float8, or leave it out"
    path = lora.adapter_path
    if path is not None and not (Path(path) / "adapter_config.json").is_file():
        yield (
            f"{key}.adapter_path={path!r} is no folder of an adapter in PEFT's format: it has no adapter_config.json "
            f"(working directory {Path.cwd()})"
        )


def _shared_base_problems(config: TrainConfig, critic: CriticConfig) -> Iterator[str]:
    """What a critic on the actor's base cannot have: anything else of its own but adapters, value head and training."""
    policy, key = config.actor_rollout_ref, "critic.model.share_base=true"
    for section, lora in ((f"{POLICY}.model", policy.model.lora), ("critic.model", critic.model.lora)):
        if lora.rank == 0:
            yield f"{key} needs {section}.lora.rank: what two models share is frozen, and adapters are trained on it"
    own, base = critic.model.lora, policy.model.lora
    if own.base_dtype is not None and (own.base_dtype, own.base_block) != (base.base_dtype, base.base_block):
        yield f"{key}, but critic.model.lora.base_dtype is given: it is {POLICY}.model.lora's; leave it out"
    if critic.model.path != policy.model.path:
        yield (
            f"{key}, but critic.model.path={critic.model.path!r} is not {POLICY}.model.path={policy.model.path!r}; leave "
            "one of them out"
        )
    if critic.resource_pool != policy.actor.resource_pool:
        yield (
            f"{key}, but critic.resource_pool={critic.resource_pool!r} is not the actor's "
            f"({policy.actor.resource_pool!r}); leave one of them out"
        )
    actors, critics = policy.actor.megatron, critic.megatron
    assert critics is not None, "resolved"
    other = [
        f"{member.name}={getattr(critics, member.name)} (the actor's: {getattr(actors, member.name)})"
        for member in fields(MegatronConfig)
        if member.name not in _OWN and getattr(critics, member.name) != getattr(actors, member.name)
    ]
    if other:
        yield f"{key}, but critic.megatron has {', '.join(other)}: the model has one layout; leave critic.megatron out"
