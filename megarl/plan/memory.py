"""What a run will hold on the fullest device in each phase of a step, owner by owner, before it runs.

Owners and phases are those of `megarl.costs.phases`; the run is one on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from megarl.config import (
    PoolConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
    TrainConfig,
    evaluates,
    needs_reference,
    pool_devices,
    reference_in_actor,
)
from megarl.costs.model import StageBytes, model_bytes
from megarl.costs.phases import frees_engines, leaves, phase_needs, trained_parts
from megarl.costs.serving import (
    cache_bytes,
    engine_adapter_bytes,
    engine_weight_bytes,
    rotary_bytes,
    token_bytes,
)
from megarl.plan.inputs import PlanInputs
from megarl.plan.model_uses import model_use, precision
from megarl.plan.reserve import reserve_rows
from megarl.trainer.roles.adapters import served_adapters
from megarl.weight_sync.model_layouts import EngineLayout

MOVED = ("weights", "adapters", "optimizer")  # parts that come from the host: gradients are dropped
SLOTS = 2  # of a sync, each of a bucket
GIB = 1 << 30


@dataclass(frozen=True)
class Owned:
    """Memory that is on every device of a pool, or is not, as a whole.

    Attributes:
        stages: bytes, by pipeline stage of the role (one entry where it has none).
        phases: in which it is there; None: in all.
        host: bytes that are on the host in all phases, by stage; none where it is on the device as a whole, or as a whole not.
    """

    name: str
    role: str
    pool: str
    stages: tuple[int, ...]
    phases: frozenset[str] | None
    host: tuple[int, ...] = ()

    def at(self, phase: str) -> tuple[int, ...]:
        return self.stages if self.phases is None or phase in self.phases else (0,) * len(self.stages)

    @property
    def on_host(self) -> tuple[int, ...]:
        """Page-locked memory of the host for it, which is kept: what is there in all phases, or a copy of what comes and goes.

        Gradients and caches are dropped, and the engines' weights come anew.
        """
        if any(self.host):
            return self.host
        moves = self.phases is not None and self.name.rpartition("_")[2] in MOVED and self.role != "rollout"
        return self.stages if moves else (0,) * len(self.stages)


@dataclass(frozen=True)
class MemoryPlan:
    """The owners, and what follows from them.

    Attributes:
        phases: of a step.
        kv_tokens: that an engine's cache holds, 0 where nothing is left for it; kv_token_bytes: of each, on a rank.
        limit: bytes of a device. reserve: of it, what is not planned owner by owner; reserved: its causes, where they are known.
    """

    owners: tuple[Owned, ...]
    phases: tuple[str, ...]
    pools: Mapping[str, PoolConfig]
    kv_tokens: int
    kv_token_bytes: int
    longest: int
    limit: int
    reserve: int
    reserved: tuple[tuple[str, int], ...] = ()

    def total(self, phase: str, pool: str) -> int:
        """Of the pool's fullest device: the fullest stage of each role."""
        return self._most(pool, lambda owner: owner.at(phase))

    def host(self, pool: str) -> int:
        """Bytes of the host's memory for the pool's fullest device."""
        return self._most(pool, lambda owner: owner.on_host)

    def _most(self, pool: str, sizes: Callable[[Owned], tuple[int, ...]]) -> int:
        roles: dict[str, list[int]] = {}
        for owner in self.owners:
            if owner.pool == pool:
                found = roles.setdefault(owner.role, [0] * len(owner.stages))
                roles[owner.role] = [a + b for a, b in zip(found, sizes(owner), strict=True)]
        return sum(max(stages) for stages in roles.values())

    def fullest(self, phase: str) -> int:
        return max(self.total(phase, pool) for pool in self.pools)

    def without_engines(self) -> MemoryPlan:
        """The same for engines that have devices of their own, which are not planned."""
        owners = tuple(owner for owner in self.owners if owner.role != "rollout")
        return replace(self, owners=owners, kv_tokens=self.longest, kv_token_bytes=0)

    @property
    def peak(self) -> int:
        return max(map(self.fullest, self.phases))

    @property
    def fits(self) -> bool:
        return self.peak + self.reserve <= self.limit and self.kv_tokens >= self.longest

    def problems(self) -> list[str]:
        """Why it does not fit, each with what would make it."""
        found = []
        for phase in self.phases:
            over = self.fullest(phase) + self.reserve - self.limit
            if over > 0:
                largest = max(self.owners, key=lambda owner: max(owner.at(phase)))
                found.append(
                    f"{phase} takes {over / GIB:.1f} GiB more than there are; the largest part is {largest.name} "
                    f"({max(largest.at(phase)) / GIB:.1f} GiB)"
                )
        if self.kv_tokens < self.longest:
            found.append(
                f"the engines' cache holds {max(self.kv_tokens, 0):,} tokens, less than one trajectory of {self.longest:,}: "
                "raise rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size, or rollout.quantization=fp8"
            )
        return found


def plan_memory(
    config: TrainConfig, inputs: PlanInputs, limit: int, reserve: int | None = None
) -> MemoryPlan:
    """The plan of a resolved configuration.

    Args:
        limit: bytes of a device.
        reserve: bytes that are not planned with; None: by what is on a GPU (`reserve_rows`).

    Raises:
        ValueError: a layout that cannot be.
    """
    pools, needs = config.resource_pools, phase_needs(config)
    owners = [*_actor(config, inputs, needs), *_others(config, inputs, needs)]
    served, kv_tokens, token = engine_owners(config, inputs, needs, limit)
    phases = ["sync", "generate", *(["score_model"] if config.reward_model.enable else [])]
    phases += ["evaluate_models"] if evaluates(config) else []
    phases += ["update_actor"] if config.critic is None else ["update_critic", "update_actor"]
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = reserve_rows(config, inputs.model) if reserve is None else ()
    reserve = sum(size for _, size in rows) if reserve is None else reserve
    owned = (*owners, *served)
    return MemoryPlan(owned, tuple(phases), pools, kv_tokens, token, longest, limit, reserve, rows)


def _trained(
    config: TrainConfig, inputs: PlanInputs, role: str, needs: Mapping[str, tuple[str, ...]]
) -> Iterator[Owned]:
    """The owners of a role that is trained."""
    section = config.actor_rollout_ref.actor if role == "actor" else config.critic
    pool, megatron = section.resource_pool, section.megatron
    on_host = section.optim.optimizer_cpu_offload
    key = (role, megatron, config.resource_pools[pool], section.ppo_max_token_len_per_gpu, on_host)
    if key not in inputs.stages:
        inputs.stages[key] = model_bytes(model_use(config, inputs, role), inputs.tables)
    stages = inputs.stages[key]
    shares = role == "critic" and section.model.share_base
    for part, switch in trained_parts(megatron).items():
        if shares and part == "weights":
            continue
        name = f"{role}_{part}"
        sizes = tuple(getattr(stage.held, part) for stage in stages)
        if shares and part == "adapters":  # beside them, and where they are, is the value head
            head = inputs.model.hidden_size * precision(megatron.dtype).itemsize
            sizes = (*sizes[:-1], sizes[-1] + head)
        if any(sizes):
            there = _when(needs, name) if leaves(config, switch, pool, config.resource_pools) else None
            host = tuple(stage.held.host for stage in stages) if part == "optimizer" else ()
            yield Owned(name, "actor" if shares else role, pool, sizes, there, host)
    owner = "actor" if shares else role
    update = frozenset({f"update_{role}"})
    yield Owned(f"{role}_activations", owner, pool, _of(stages, "kept"), update)
    yield Owned(f"{role}_working", owner, pool, _of(stages, "working"), update)
    yield Owned(f"{role}_evaluating", owner, pool, _of(stages, "evaluating"), frozenset({"evaluate_models"}))
    if role == "actor":
        bucket = SLOTS * (config.actor_rollout_ref.rollout.sync_bucket_mb << 20)
        yield Owned("actor_sync_buffers", role, pool, (bucket,) * len(stages), frozenset({"sync"}))
        if any(stage.merged for stage in stages):
            yield Owned("actor_merging", role, pool, _of(stages, "merged"), frozenset({"sync"}))


def _of(stages: list[StageBytes], part: str) -> tuple[int, ...]:
    return tuple(getattr(stage, part) for stage in stages)


def _actor(config: TrainConfig, inputs: PlanInputs, needs: Mapping[str, tuple[str, ...]]) -> Iterator[Owned]:
    yield from _trained(config, inputs, "actor", needs)
    if config.critic is not None:
        yield from _trained(config, inputs, "critic", needs)


def _others(config: TrainConfig, inputs: PlanInputs, needs: Mapping[str, tuple[str, ...]]) -> Iterator[Owned]:
    """The models that are only evaluated; a reference in the actor's processes is the actor itself if that has adapters."""
    policy, reward = config.actor_rollout_ref, config.reward_model
    inside = reference_in_actor(config)
    if needs_reference(config) and not (inside and policy.model.lora.rank):
        yield from _evaluated(config, inputs, policy.ref, "ref", "actor" if inside else "ref", needs)
    if reward.enable:
        yield from _evaluated(config, inputs, reward, "reward_model", "reward_model", needs)


def _evaluated(
    config: TrainConfig,
    inputs: PlanInputs,
    section: RefConfig | RewardModelConfig,
    name: str,
    role: str,
    needs: Mapping[str, tuple[str, ...]],
) -> Iterator[Owned]:
    use, pool = model_use(config, inputs, name), section.resource_pool
    stages, there = model_bytes(use, inputs.tables), _when(needs, f"{name}_weights")
    movable = leaves(config, section.megatron.param_offload, pool, config.resource_pools)
    weights = tuple(stage.held.weights for stage in stages)
    yield Owned(f"{name}_weights", role, pool, weights, there if movable else None)
    if role != "actor":  # beside the actor's own passes they are one after the other
        yield Owned(f"{name}_evaluating", role, pool, _of(stages, "evaluating"), there)


def engine_owners(
    config: TrainConfig, inputs: PlanInputs, needs: Mapping[str, tuple[str, ...]], limit: int
) -> tuple[list[Owned], int, int]:
    """The engines' owners, the tokens of their cache, and the bytes of one."""
    policy = config.actor_rollout_ref
    rollout, model = policy.rollout, inputs.model
    layout, dtype, pool = engine_layout(rollout), precision(rollout.dtype), rollout.resource_pool
    weights, freed = served_bytes(rollout, inputs), frees_engines(config, config.resource_pools)
    adapters, _ = served_adapters(rollout, model, policy.model.lora, freed)
    if adapters is not None:
        weights += engine_adapter_bytes(model, layout, adapters, dtype)
    context = config.data.max_prompt_length + config.data.max_response_length
    weights += rotary_bytes(model, context)
    token, tokens = token_bytes(model, layout, dtype), rollout.max_total_tokens
    if tokens is None:
        tokens = math.floor((rollout.gpu_memory_utilization * limit - weights) / token)
    kv = cache_bytes(model, layout, dtype, max(tokens, 0), rollout.max_num_seqs, context)
    owned = [
        Owned(
            "rollout_weights", "rollout", pool, (weights,), _when(needs, "rollout_weights") if freed else None
        ),
        Owned(
            "rollout_kv_cache", "rollout", pool, (kv,), _when(needs, "rollout_kv_cache") if freed else None
        ),
    ]
    # What another GPU sends comes into slots of the rank's own; what its own has it reads where that is.
    if pool != policy.actor.resource_pool or pool_devices(config.resource_pools, pool) > 1:
        owned.append(
            Owned(
                "rollout_sync_buffers",
                "rollout",
                pool,
                (SLOTS * (rollout.sync_bucket_mb << 20),),
                frozenset({"sync"}),
            )
        )
    return owned, tokens, token


def served_bytes(rollout: RolloutConfig, inputs: PlanInputs) -> int:
    """Weights that a rank of an engine holds, without adapters."""
    layout, dtype = engine_layout(rollout), precision(rollout.dtype)
    block = rollout.quantization_block_size if rollout.quantization == "fp8" else None
    key = (layout.tp, layout.ep, dtype, block)
    if key not in inputs.served:
        inputs.served[key] = engine_weight_bytes(inputs.model, layout, dtype, block)
    return inputs.served[key]


def engine_layout(rollout: RolloutConfig) -> EngineLayout:
    """Of a resolved section."""
    return EngineLayout(
        rollout.tensor_model_parallel_size, rollout.expert_parallel_size, num_engines=rollout.num_engines
    )


def _when(needs: Mapping[str, tuple[str, ...]], name: str) -> frozenset[str]:
    return frozenset(phase for phase, owners in needs.items() if name in owners)
