"""What would make a job fit, or nearer to it: changes of one or two keys that are legal, each with the memory it leads to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.config import TrainConfig
from megarl.config.model_fit import check_models
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, plan_memory

_POLICY = "actor_rollout_ref"
_MEGATRON = f"{_POLICY}.actor.megatron"


@dataclass(frozen=True)
class Change:
    """Keys to set, why they help, and what the fullest device then holds, in bytes."""

    keys: tuple[str, ...]
    why: str
    peak: int
    fits: bool


def changes(
    recipe: str, overrides: Sequence[str], config: TrainConfig, limit: int, reserve: int | None
) -> list[Change]:
    """Those that lower the peak or make the job fit, best first: what fits, then by the memory that is left.

    Args:
        config: what the recipe with `overrides` is, resolved.
        limit, reserve: as those of `plan_memory`.
    """
    found = []
    for keys, why in _possible_changes(config):
        try:
            changed, inputs = read_inputs(recipe, [*overrides, *keys])
            check_models(changed, inputs.model, inputs.critic, inputs.reward)
            plan = plan_memory(changed, inputs, limit, reserve)
        except ValueError:  # not for this model, or these devices
            continue
        found.append(Change(keys, why, plan.peak, plan.fits))
    base, inputs = read_inputs(recipe, list(overrides))
    peak = plan_memory(base, inputs, limit, reserve).peak
    found = [change for change in found if change.fits or change.peak < peak]
    return sorted(found, key=lambda change: (not change.fits, change.peak))


def as_words(change: Change) -> str:
    """One line."""
    fits = "fits" if change.fits else "does not fit yet"
    return f"{' '.join(change.keys)}: {change.peak / GIB:.1f} GiB, {fits} ({change.why})"


def _possible_changes(config: TrainConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    policy = config.actor_rollout_ref
    actor, rollout, megatron = policy.actor, policy.rollout, policy.actor.megatron
    if megatron.recompute_granularity != "full":
        key = f"{_MEGATRON}.recompute_granularity=full"
        yield (key,), "activations are computed again instead of being kept"
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = actor.ppo_max_token_len_per_gpu
    if tokens is not None and tokens > longest:
        key = f"{_POLICY}.actor.ppo_max_token_len_per_gpu={max(longest, tokens // 2)}"
        yield (key,), "smaller micro-batches keep fewer activations"
    for name, why in (
        ("tensor_model_parallel_size", "each layer is cut further"),
        ("pipeline_model_parallel_size", "each device has fewer layers"),
        ("context_parallel_size", "texts are cut further"),
        ("expert_model_parallel_size", "each device has fewer experts"),
    ):
        yield (f"{_MEGATRON}.{name}={2 * getattr(megatron, name)}",), why
    if not megatron.use_distributed_optimizer:
        yield (f"{_MEGATRON}.use_distributed_optimizer=true",), "optimizer states are shared out"
    parts = ("param", "grad", "optimizer")
    if any(getattr(megatron, f"{part}_offload") is False for part in parts):
        keys = tuple(f"{_MEGATRON}.{part}_offload=true" for part in parts)
        yield keys, "what a phase does not use leaves the devices"
    if not actor.optim.optimizer_cpu_offload:
        key = f"{_POLICY}.actor.optim.optimizer_cpu_offload=true"
        yield (key,), "optimizer states stay on the host, also while they are updated"
    if rollout.quantization is None:
        yield (f"{_POLICY}.rollout.quantization=fp8",), "engines hold a byte for each weight"
    size = rollout.tensor_model_parallel_size
    keys = (f"{_POLICY}.rollout.tensor_model_parallel_size={2 * size}", f"{_POLICY}.rollout.num_engines=null")
    yield keys, "each device serves a smaller part"
    for part in (0.1, -0.1):
        share = round(rollout.gpu_memory_utilization + part, 3)
        if 0 < share <= 0.95:
            key = f"{_POLICY}.rollout.gpu_memory_utilization={share}"
            yield (key,), "a larger cache" if part > 0 else "a smaller cache"
    if config.resource_pools is not None and len(config.resource_pools) == 1:
        nodes = config.trainer.nnodes
        yield (f"trainer.nnodes={2 * nodes}",), "more devices share optimizer states"
