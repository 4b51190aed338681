"""What the engines serve of a policy with adapters: these beside the weights, or weights with them merged in."""

from __future__ import annotations

from megarl.config import LoraConfig, RolloutConfig
from megarl.models import ModelConfig
from megarl.models.lora import adapted_layers, adapted_weights, scaling, why_not_served
from megarl.rollout.engine import AdapterConfig

MERGED, ADAPTERS = "merged", "adapters"


def why_merged(rollout: RolloutConfig, model: ModelConfig, lora: LoraConfig) -> str | None:
    """Why the engines cannot serve the adapters beside the weights; None: they can."""
    if rollout.quantization is not None:
        return f"rollout.quantization={rollout.quantization}: float8 engines are sent merged weights"
    return why_not_served(model, lora)


def served_adapters(
    rollout: RolloutConfig, model: ModelConfig, lora: LoraConfig, freed: bool
) -> tuple[LoraConfig | None, str | None]:
    """What the engines serve beside the weights (None: nothing), and how to tell the user (None: there are no adapters).

    Args:
        freed: whether the engines' weights leave their devices in each step: they are sent whole then, either way.
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
    """What an engine is started with to serve adapters."""
    return AdapterConfig(lora.rank, scaling(lora), adapted_layers(adapted_weights(model, lora)))
