"""Checks of low-rank adapters: what their keys need of each other. What the model's layers say to them is checked where its
files are read."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from megarl.config.schema.commands import CriticConfig, TrainConfig
from megarl.config.schema.lora import LoraConfig
from megarl.config.schema.sections import MegatronConfig
from megarl.config.schema.supervised import TuningConfig

_POLICY = "actor_rollout_ref"
_BASE_BLOCK = next(member.default for member in fields(LoraConfig) if member.name == "base_block")
_OWN = ("seed", "grad_offload", "optimizer_offload")  # what a critic on the actor's base may have otherwise


def lora_problems(config: TrainConfig | TuningConfig) -> Iterator[str]:
    """Of a resolved configuration."""
    if isinstance(config, TuningConfig):
        yield from _section_problems("model.lora", config.model.lora)
        return
    lora = config.actor_rollout_ref.model.lora
    yield from _section_problems(f"{_POLICY}.model.lora", lora)
    if lora.rank and lora.dropout:
        yield (
            f"{_POLICY}.model.lora.dropout={lora.dropout:g}: the policy that is trained would not be the one that generated, "
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
    for section, lora in ((f"{_POLICY}.model", policy.model.lora), ("critic.model", critic.model.lora)):
        if lora.rank == 0:
            yield f"{key} needs {section}.lora.rank: what two models share is frozen, and adapters are trained on it"
    own, base = critic.model.lora, policy.model.lora
    if own.base_dtype is not None and (own.base_dtype, own.base_block) != (base.base_dtype, base.base_block):
        yield f"{key}, but critic.model.lora.base_dtype is given: it is {_POLICY}.model.lora's; leave it out"
    if critic.model.path != policy.model.path:
        yield (
            f"{key}, but critic.model.path={critic.model.path!r} is not {_POLICY}.model.path={policy.model.path!r}; leave "
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
