"""What the sections `lora` of a run say, against the models' files: before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config import LoraConfig, MegatronConfig, TrainConfig, pool_devices
from megarl.config.loading.problems import raise_if_any
from megarl.config.schema.supervised import TuningConfig
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.models.lora import adapted_weights, check_expert_groups
from megarl.trainer.roles.lora_sync import ADAPTERS, why_merged


@dataclass(frozen=True)
class _Section:
    """A section `lora`, `key` the one that it is in, and the model on `devices` of which it is."""

    key: str
    lora: LoraConfig
    megatron: MegatronConfig
    devices: int
    model: ModelConfig


def check_adapters(
    config: TrainConfig | TuningConfig, model: ModelConfig, critic: ModelConfig | None = None
) -> None:
    """Check the adapters of all models of a resolved configuration.

    Args:
        model: facts of the model that is trained.
        critic: those of critic.model.path.

    Raises:
        ValueError: in one message, patterns that fit no layer, groups into which experts do not divide, blocks that
            shards cut, folders of adapters that are not those of the section.
    """
    raise_if_any("adapters that do not fit their model", adapter_problems(config, model, critic))


def adapter_problems(
    config: TrainConfig | TuningConfig, model: ModelConfig, critic: ModelConfig | None = None
) -> list[str]:
    """What `check_adapters` raises, a line each."""
    if isinstance(config, TuningConfig):
        devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
        sections = [_Section("model", config.model.lora, config.megatron, devices, model)]
    else:
        policy = config.actor_rollout_ref
        devices = pool_devices(config.resource_pools, policy.actor.resource_pool)
        sections = [
            _Section("actor_rollout_ref.model", policy.model.lora, policy.actor.megatron, devices, model)
        ]
        if critic is not None:
            own = config.critic
            devices = pool_devices(config.resource_pools, own.resource_pool)
            sections.append(_Section("critic.model", own.model.lora, own.megatron, devices, critic))
    problems = [problem for section in sections if section.lora.rank for problem in _problems(section)]
    if isinstance(config, TrainConfig) and not problems:
        problems += _serving_problems(config, model)
    return problems


def _serving_problems(config: TrainConfig, model: ModelConfig) -> Iterator[str]:
    rollout, lora = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.lora
    if (
        lora.rank
        and rollout.lora_sync == ADAPTERS
        and (reason := why_merged(rollout, model, lora)) is not None
    ):
        yield f"actor_rollout_ref.rollout.lora_sync=adapters cannot be: {reason}; leave it out for merged weights"


def _problems(section: _Section) -> Iterator[str]:
    key, lora, model = section.key, section.lora, section.model
    layout = ParallelLayout.from_config(section.megatron, section.devices)
    try:
        adapted_weights(model, lora)
        check_expert_groups(model, lora, layout.ep)
        if lora.base_dtype is not None:
            from megarl.models.float8 import check_base_block  # which needs torch: seconds before a refusal

            check_base_block(model, layout, lora.base_block)
    except ValueError as error:
        yield f"{key}.{error}"
        return
    if lora.adapter_path is None:
        return
    from megarl.checkpoints.hf.peft import PeftReader

    try:
        with PeftReader(lora.adapter_path, model) as reader:
            reader.check(lora)
    except ValueError as error:
        yield f"{key}.lora.adapter_path: {error}"
