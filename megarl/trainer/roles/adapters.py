"""The sections `lora` of a run: checked against the models' files before anything is started, and the form in which engines serve adapters.

Engines serve the adapters next to the frozen weights, or weights with the adapters merged in.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import LoraConfig, MegatronConfig, RolloutConfig, TrainConfig, pool_devices
from megarl.config.checks.rollout import ADAPTERS_OF_GROUPS
from megarl.config.problems import raise_if_any
from megarl.config.schema.supervised import TuningConfig
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.models.layers import SHARED
from megarl.models.lora import adapted_layers, adapted_weights, check_expert_groups, scaling, why_not_served
from megarl.rollout.engine import AdapterConfig


def check_adapters(
    config: TrainConfig | TuningConfig, model: ModelConfig, critic: ModelConfig | None = None
) -> None:
    """Check the adapters of all models of a resolved configuration.

    Args:
        model: facts of the model that is trained.
        critic: facts of critic.model.path.

    Raises:
        ValueError: in one message, patterns that fit no layer, groups into which experts do not divide, blocks that
            shards cut, folders of adapters that do not fit the section.
    """
    raise_if_any("adapters that do not fit their model", adapter_problems(config, model, critic))


def adapter_problems(
    config: TrainConfig | TuningConfig, model: ModelConfig, critic: ModelConfig | None = None
) -> list[str]:
    """The problems that `check_adapters` raises, one line each."""
    problems: list[str] = []
    if isinstance(config, TuningConfig):
        devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
        problems += _problems("model", config.model.lora, "megatron", config.megatron, devices, model)
        return problems
    policy, own = config.actor_rollout_ref, config.critic
    devices = pool_devices(config.resource_pools, policy.actor.resource_pool)
    key, section = "actor_rollout_ref.model", "actor_rollout_ref.actor.megatron"
    problems += _problems(key, policy.model.lora, section, policy.actor.megatron, devices, model)
    if critic is not None:
        devices = pool_devices(config.resource_pools, own.resource_pool)
        problems += _problems(
            "critic.model", own.model.lora, "critic.megatron", own.megatron, devices, critic
        )
    return problems or list(_serving_problems(config, model))


def _serving_problems(config: TrainConfig, model: ModelConfig) -> Iterator[str]:
    rollout, lora = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.lora
    asked = lora.rank and rollout.lora_sync == ADAPTERS
    if asked and (reason := why_merged(rollout, model, lora)) is not None:
        yield f"actor_rollout_ref.rollout.lora_sync=adapters cannot be: {reason}; leave it out for merged weights"


def _problems(
    key: str, lora: LoraConfig, section: str, megatron: MegatronConfig, devices: int, model: ModelConfig
) -> Iterator[str]:
    """The problems of one model's adapters. `key`: of the section around `lora`; `section`: of `megatron`; `devices`: how many the model is on."""
    if lora.rank == 0:
        return
    layout = ParallelLayout.from_config(megatron, devices)
    try:
        weights = adapted_weights(model, lora)
        check_expert_groups(model, lora, layout.ep)
        if lora.base_dtype is not None:
            from megarl.models.float8 import check_base_block  # which imports torch, and so takes seconds

            check_base_block(model, layout, lora.base_block)
    except ValueError as error:
        yield f"{key}.{error}"
        return
    tp, overlap = megatron.tensor_model_parallel_size, "moe_shared_expert_overlap"
    overlaps = (megatron.override_transformer_config or {}).get(overlap)
    if tp > 1 and overlaps and any(f".{SHARED}" in name for name in weights):
        yield (
            f"{key}.lora.rank={lora.rank}: adapters of shared experts go without {section}.override_transformer_config.{overlap}=true where "
            f"{section}.tensor_model_parallel_size={tp} is over 1: Megatron-core (0.19.2) gathers and sums their tokens outside of the layers "
            f"then, which adapters do within; set it to false, or leave shared experts out ({key}.lora.exclude_modules=['*.{SHARED}*'])"
        )
    if lora.adapter_path is None:
        return
    from megarl.checkpoints.hf.peft import PeftReader

    try:
        with PeftReader(lora.adapter_path, model) as reader:
            reader.check(lora)
    except ValueError as error:
        yield f"{key}.lora.adapter_path: {error}"


MERGED, ADAPTERS = "merged", "adapters"


def why_merged(rollout: RolloutConfig, model: ModelConfig, lora: LoraConfig) -> str | None:
    """The reason why engines cannot serve the adapters next to the weights; None: they can."""
    if rollout.quantization is not None:
        return f"rollout.quantization={rollout.quantization}: float8 engines are sent merged weights"
    if rollout.attention_data_parallel_size > 1:
        return f"rollout.attention_data_parallel_size={rollout.attention_data_parallel_size}: {ADAPTERS_OF_GROUPS}"
    return why_not_served(model, lora)


def served_adapters(
    rollout: RolloutConfig, model: ModelConfig, lora: LoraConfig, freed: bool
) -> tuple[LoraConfig | None, str | None]:
    """The adapters that engines serve next to the weights (None: none), and a line for the user (None: there are no adapters).

    Args:
        freed: whether the engines' weights leave their devices in each step: all weights are then sent in each sync.
    """
    if lora.rank == 0:
        return None, None
    reason = why_merged(rollout, model, lora)
    if reason is None and freed:
        reason = "the engines' memory is freed in each step, so that all weights are sent in each"
    if reason is None and rollout.sync_skip_unchanged:
        reason = "rollout.sync_skip_unchanged=true"
    if rollout.lora_sync == ADAPTERS or (rollout.lora_sync is None and reason is None):
        return lora, "rollout engines serve adapters beside the weights: only adapters are sent"
    reason = "rollout.lora_sync=merged" if rollout.lora_sync == MERGED else reason
    return None, f"rollout engines are sent weights with adapters merged in: {reason}"


def engine_adapters(model: ModelConfig, lora: LoraConfig) -> AdapterConfig:
    """The start options with which an engine serves adapters."""
    return AdapterConfig(lora.rank, scaling(lora), adapted_layers(adapted_weights(model, lora)))
