"""Bytes that a run will hold on the fullest device in each phase of a step, owner by owner, before it runs.

`megarl.costs.phases` defines owners and phases; the run is one on GPUs. Runs of `megarl sft`, `rm` and `dpo` have one model, which
is on all devices all the time: there are no engines to make room for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from megarl.config import (
    PoolConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
    TuningConfig,
    evaluates,
    leaves_tokens_out,
    pool_devices,
    reference_in_actor,
    reference_is_actor,
    references,
    resolve,
    validates_concurrently,
)
from megarl.config.loading.hub import fetch_models
from megarl.config.resolve import GLOBAL_POOL, drafted_room, least_tokens, served_context
from megarl.costs.engine import (
    cache_bytes,
    engine_adapter_bytes,
    engine_weight_bytes,
    rotary_bytes,
    state_bytes,
    token_bytes,
)
from megarl.costs.model import StageBytes, model_bytes
from megarl.costs.phases import frees_engines, leaves, phase_needs, trained_parts
from megarl.costs.reserve import EngineRank, reserved
from megarl.layout.grid import ParallelLayout
from megarl.plan.drafts import draft_folder
from megarl.plan.inputs import (
    PlanInputs,
    cache_dtype,
    engine_layout,
    layout_of,
    model_use,
    precision,
    role_facts,
    roles_of,
    tuned_role,
)
from megarl.plan.judges import judge_bytes, judging_rank
from megarl.trainer.roles.adapters import served_adapters

MOVED = ("weights", "adapters", "optimizer")  # parts that come from the host: gradients are dropped
SLOTS = 2  # of a sync, each of a bucket
EVAL = "eval"  # the role of the engines of concurrent validation
GIB = 1 << 30


@dataclass(frozen=True)
class Owner:
    """Memory that is on every device of a pool in some phases, and in others entirely off them.

    Attributes:
        stages: bytes, by pipeline stage of the role (one entry where it has none).
        phases: in which it is there; None: in all.
        host: bytes on the host in all phases, by stage; empty where the owner is either entirely on the device or entirely off it.
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
        """Page-locked host memory for the owner, kept in all phases: data that stays on the host, or a copy of data that comes and goes.

        Gradients and caches are dropped, and the engines' weights come anew.
        """
        if any(self.host):
            return self.host
        moves = self.phases is not None and self.name.rpartition("_")[2] in MOVED and self.role != "rollout"
        return self.stages if moves else (0,) * len(self.stages)


@dataclass(frozen=True)
class MemoryPlan:
    """The owners and their totals.

    Attributes:
        phases: of a step.
        kv_tokens: tokens in an engine's cache, 0 where nothing is left for it; kv_token_bytes: of each, on a rank that has it; kv_groups:
            groups of an engine's ranks that each have an equal part of its tokens.
        lacking: why trajectories do not fit the caches of engines that judge.
        limit: bytes of a device. reserve: the part of it that is not planned owner by owner; reserved: its causes, where they are known.
    """

    owners: tuple[Owner, ...]
    phases: tuple[str, ...]
    pools: Mapping[str, PoolConfig]
    kv_tokens: int
    kv_token_bytes: int
    longest: int
    limit: int
    reserve: int
    reserved: tuple[tuple[str, int], ...] = ()
    kv_groups: int = 1
    lacking: tuple[str, ...] = ()

    def total(self, phase: str, pool: str) -> int:
        """Bytes of the pool's fullest device: the fullest stage of each role."""
        return self._most(pool, lambda owner: owner.at(phase))

    def host(self, pool: str) -> int:
        """Bytes of the host's memory for the pool's fullest device."""
        return self._most(pool, lambda owner: owner.on_host)

    def _most(self, pool: str, sizes: Callable[[Owner], tuple[int, ...]]) -> int:
        roles: dict[str, list[int]] = {}
        for owner in self.owners:
            if owner.pool == pool:
                found = roles.setdefault(owner.role, [0] * len(owner.stages))
                roles[owner.role] = [a + b for a, b in zip(found, sizes(owner), strict=True)]
        return sum(max(stages) for stages in roles.values())

    def fullest(self, phase: str) -> int:
        return self.total(phase, self.fullest_pool(phase))

    def fullest_pool(self, phase: str) -> str:
        return max(self.pools, key=lambda pool: self.total(phase, pool))

    def without_engines(self) -> MemoryPlan:
        """The same plan without the engines, which then have devices of their own."""
        owners = tuple(owner for owner in self.owners if owner.role not in ("rollout", EVAL))
        return replace(self, owners=owners, kv_tokens=self.longest, kv_token_bytes=0, kv_groups=1)

    @property
    def peak(self) -> int:
        return max(map(self.fullest, self.phases))

    @property
    def fits(self) -> bool:
        return (
            self.peak + self.reserve <= self.limit and self.group_tokens >= self.longest and not self.lacking
        )

    @property
    def group_tokens(self) -> int:
        """Tokens in the cache of each group of an engine's ranks: a trajectory is in one."""
        return self.kv_tokens // self.kv_groups

    def problems(self) -> list[str]:
        """Reasons why it does not fit, each with a remedy."""
        found = []
        for phase in self.phases:
            over = self.fullest(phase) + self.reserve - self.limit
            if over > 0:
                pool = self.fullest_pool(phase)
                there = (owner for owner in self.owners if owner.pool == pool)
                largest = max(there, key=lambda owner: max(owner.at(phase)))
                found.append(
                    f"{phase} takes {over / GIB:.1f} GiB more than there are; the largest part is {largest.name} "
                    f"({max(largest.at(phase)) / GIB:.1f} GiB)"
                )
        if self.group_tokens < self.longest:
            found.append(
                f"the engines' cache holds {max(self.group_tokens, 0):,} tokens, less than one trajectory of {self.longest:,}: "
                "raise rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size, or rollout.quantization=fp8"
            )
        return [*found, *self.lacking]


def plan_of(
    config: TrainConfig | TuningConfig, inputs: PlanInputs, limit: int, reserve: int | None = None
) -> MemoryPlan:
    """The plan of a resolved configuration of any command that trains; the arguments are as in `plan_memory`."""
    plan = plan_memory if isinstance(config, TrainConfig) else _plan_supervised
    return plan(config, inputs, limit, reserve)


def plan_memory(
    config: TrainConfig, inputs: PlanInputs, limit: int, reserve: int | None = None
) -> MemoryPlan:
    """The plan of a resolved configuration.

    Args:
        limit: bytes of a device.
        reserve: bytes that are left out of the plan; None: they follow from the processes on a GPU.

    Raises:
        ValueError: an impossible layout.
    """
    pools, needs = config.resource_pools, phase_needs(config)
    owners = [*_trained(config, inputs, "actor", needs)]
    if config.critic is not None:
        owners += _trained(config, inputs, "critic", needs)
    for role in () if reference_is_actor(config) else references(config):
        owners += _evaluated(config, inputs, role, "actor" if reference_in_actor(config) else role, needs)
    if config.reward_model.enable:
        owners += _evaluated(config, inputs, "reward_model", "reward_model", needs)
    served, kv_tokens, token = engine_owners(config, inputs, needs, limit)
    phases = ["sync", "generate", *(["score_model"] if config.reward_model.enable else [])]
    phases += ["evaluate_models"] if evaluates(config) else []
    phases += ["update_actor"] if config.critic is None else ["update_critic", "update_actor"]
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = max((_pool_rows(config, inputs, pool) for pool in pools), key=_total) if reserve is None else ()
    reserve = _total(rows) if reserve is None else reserve
    judges = list(judge_bytes(config, inputs, limit))
    for judge in judges:  # on devices of their own, which nothing leaves
        for part, size in (("weights", judge.weights), ("kv_cache", judge.cache)):
            served.append(Owner(f"{judge.role}_{part}", judge.role, judge.pool, (size,), None))
    owned, lacking = (*owners, *served), tuple(judge.lacking for judge in judges if judge.lacking)
    groups = config.actor_rollout_ref.rollout.attention_data_parallel_size
    return MemoryPlan(
        owned, tuple(phases), pools, kv_tokens, token, longest, limit, reserve, rows, groups, lacking
    )


Rows = tuple[tuple[str, int], ...]
"""Bytes that are not planned owner by owner, each with its cause."""


def _total(rows: Rows) -> int:
    return sum(size for _, size in rows)


def _reserved(layouts: list[ParallelLayout], engine: EngineRank | None, exchanges: int = 0) -> Rows:
    return tuple((cause, size) for cause, size in reserved(layouts, engine, exchanges).items() if size)


def _pool_rows(config: TrainConfig, inputs: PlanInputs, pool: str) -> Rows:
    """The reserve of a GPU of a resource pool, for the roles with processes of their own on it and a rank of an engine."""
    facts = [role_facts(config, inputs, role) for role in roles_of(config)]
    layouts = [
        layout_of(role.section.megatron, config.resource_pools[pool])
        for role in facts
        if role.section.resource_pool == pool
    ]
    rollout, model, engine = config.actor_rollout_ref.rollout, inputs.model, None
    validates = validates_concurrently(config) and config.trainer.eval_resource_pool == pool
    if rollout.resource_pool == pool or validates:
        layout = engine_layout(rollout)
        requests, cut = rollout.max_num_seqs // layout.dp, layout.tp // layout.dp
        drafted = 0 if rollout.speculative.algorithm is None else rollout.speculative.num_draft_tokens
        engine = EngineRank(
            layout.tp,
            requests,
            model.vocab_size,
            model.mla is not None,
            attention_tp=cut,
            tokens=1 + drafted,
            leaves_out=leaves_tokens_out(rollout),
        )
    # Weights are exchanged among the actor's ranks, and with engines that have devices of their own.
    actors, several = config.actor_rollout_ref.actor.resource_pool, pool_devices(config.resource_pools, pool)
    apart = rollout.resource_pool != actors
    exchanges = int(pool == actors and (apart or several > 1)) + int(
        validates or (apart and engine is not None)
    )
    exchanges += int(pool == actors and validates_concurrently(config))
    return _reserved(layouts, engine or judging_rank(config, inputs, pool), exchanges)


def _trained(
    config: TrainConfig, inputs: PlanInputs, role: str, needs: Mapping[str, tuple[str, ...]]
) -> Iterator[Owner]:
    """The owners of a role that is trained."""
    section = config.actor_rollout_ref.actor if role == "actor" else config.critic
    pool, megatron = section.resource_pool, section.megatron
    on_host = section.optim.optimizer_cpu_offload
    key = ("stages", role, megatron, config.resource_pools[pool], section.ppo_max_token_len_per_gpu, on_host)
    stages = inputs.once(key, lambda: model_bytes(model_use(config, inputs, role), inputs.once))
    shared_head = None
    if role == "critic" and section.model.share_base:
        shared_head = inputs.model.hidden_size * precision(megatron.dtype).itemsize
    parts = {
        part: _when(needs, f"{role}_{part}") if leaves(config, switch, pool, config.resource_pools) else None
        for part, switch in trained_parts(megatron).items()
    }
    yield from _model_owners(stages, role, pool, parts, f"update_{role}", "evaluate_models", shared_head)
    if role == "actor":
        rollout = config.actor_rollout_ref.rollout
        bucket = SLOTS * (rollout.sync_bucket_mb << 20)
        # Where engines share the devices a trainer rank also receives for the engine rank on its device.
        if rollout.resource_pool == pool and pool_devices(config.resource_pools, pool) > 1:
            bucket *= 2
        yield Owner("actor_sync_buffers", role, pool, (bucket,) * len(stages), frozenset({"sync"}))
        if any(stage.gathered for stage in stages):
            yield Owner("actor_gathered", role, pool, _of(stages, "gathered"), frozenset({"sync"}))
        if any(stage.merged for stage in stages):
            yield Owner("actor_merging", role, pool, _of(stages, "merged"), frozenset({"sync"}))


def _model_owners(
    stages: list[StageBytes],
    role: str,
    pool: str,
    parts: Mapping[str, frozenset[str] | None],
    update: str,
    evaluate: str,
    shared_head: int | None = None,
) -> Iterator[Owner]:
    """The owners of a model that is trained.

    Args:
        parts: of the model, each with the phases in which it is there (None: all).
        update, evaluate: the phases of its passes with gradients, and without.
        shared_head: bytes of the value head of a critic that shares the actor's weights; it is where the critic's adapters are.
    """
    owner = role if shared_head is None else "actor"
    for part, there in parts.items():
        if part == "weights" and shared_head is not None:
            continue
        sizes = tuple(getattr(stage.held, part) for stage in stages)
        if part == "adapters" and shared_head is not None:
            sizes = (*sizes[:-1], sizes[-1] + shared_head)
        if any(sizes):
            host = tuple(stage.held.host for stage in stages) if part == "optimizer" else ()
            yield Owner(f"{role}_{part}", owner, pool, sizes, there, host)
    yield Owner(f"{role}_activations", owner, pool, _of(stages, "kept"), frozenset({update}))
    yield Owner(f"{role}_working", owner, pool, _of(stages, "working"), frozenset({update}))
    yield Owner(f"{role}_evaluating", owner, pool, _of(stages, "evaluating"), frozenset({evaluate}))


def _of(stages: list[StageBytes], part: str) -> tuple[int, ...]:
    return tuple(getattr(stage, part) for stage in stages)


def _evaluated(
    config: TrainConfig, inputs: PlanInputs, name: str, role: str, needs: Mapping[str, tuple[str, ...]]
) -> Iterator[Owner]:
    """The owners of a model that is only evaluated, in the processes of `role`."""
    section = role_facts(config, inputs, name).section
    pool, there = section.resource_pool, _when(needs, f"{name}_weights")
    stages = model_bytes(model_use(config, inputs, name), inputs.once)
    movable = leaves(config, section.megatron.param_offload, pool, config.resource_pools)
    weights = tuple(stage.held.weights for stage in stages)
    yield Owner(f"{name}_weights", role, pool, weights, there if movable else None)
    # In the actor's processes these passes and its own are one after the other; a teacher's may take more.
    if role != "actor" or inputs.teachers:
        yield Owner(f"{name}_evaluating", role, pool, _of(stages, "evaluating"), there)


def engine_owners(
    config: TrainConfig, inputs: PlanInputs, needs: Mapping[str, tuple[str, ...]], limit: int
) -> tuple[list[Owner], int, int]:
    """The engines' owners, the tokens of an engine's cache in all its groups, and the bytes of a token on a rank of its group."""
    policy = config.actor_rollout_ref
    rollout, model = policy.rollout, inputs.model
    layout, dtype, pool = engine_layout(rollout), precision(rollout.dtype), rollout.resource_pool
    weights, freed = served_bytes(rollout, inputs), frees_engines(config, config.resource_pools)
    adapters, _ = served_adapters(rollout, model, policy.model.lora, freed)
    if adapters is not None:
        weights += engine_adapter_bytes(model, layout, adapters, dtype)
    drafted = drafted_room(rollout.speculative.algorithm, rollout.speculative.num_draft_tokens)
    length = config.data.max_prompt_length + config.data.max_response_length
    context = served_context(length, model.context_length[1], drafted)
    weights += rotary_bytes(model, context)
    cached = cache_dtype(rollout)
    external = draft_folder(rollout)
    weights += external.weights + external.rotary
    checked = 0 if rollout.speculative.algorithm is None else rollout.speculative.num_draft_tokens + 1
    states = state_bytes(model, layout, dtype, rollout.max_num_seqs, "cuda", checked)
    token = token_bytes(model, layout, cached) + external.token * cached.itemsize
    if rollout.max_total_tokens is None:
        # SGLang sizes the pool as if a draft's layers had the model's keys and values (0.5.21, pool_configurator.py).
        sized = token_bytes(model, layout, cached, more=external.num_layers)
        tokens = math.floor((rollout.gpu_memory_utilization * limit - weights - states) / sized)
    else:
        tokens = rollout.max_total_tokens // layout.dp
    cache = cache_bytes(model, layout, cached, max(tokens, 0), rollout.max_num_seqs, context)
    cache += states + max(tokens, 0) * external.token * cached.itemsize
    found = [
        Owner(name, "rollout", pool, (size,), _when(needs, name) if freed else None)
        for name, size in (("rollout_weights", weights), ("rollout_kv_cache", cache))
    ]
    # Engines with devices of their own receive into slots of their own; others read the trainer's.
    buffers = (SLOTS * (rollout.sync_bucket_mb << 20),)
    if pool != policy.actor.resource_pool:
        found.append(Owner("rollout_sync_buffers", "rollout", pool, buffers, frozenset({"sync"})))
    if validates_concurrently(config):  # the same engines on their own devices, which nothing leaves
        own = config.trainer.eval_resource_pool
        assert own is not None, "resolved"
        found += [
            Owner(f"{EVAL}_{part}", EVAL, own, (size,), phases)
            for part, size, phases in (
                ("weights", weights, None),
                ("kv_cache", cache, None),
                ("sync_buffers", buffers[0], frozenset({"sync"})),
            )
        ]
    return found, layout.dp * tokens, token


def served_bytes(rollout: RolloutConfig, inputs: PlanInputs, draft: bool = True) -> int:
    """Weights that a rank of an engine holds, without adapters; `draft`: with the weights of the model's own layer that drafts tokens."""
    layout, dtype = engine_layout(rollout), precision(rollout.dtype)
    layout = replace(layout, draft=draft and layout.draft)
    block = rollout.quantization_block_size if rollout.quantization == "fp8" else None
    key = ("served", replace(layout, num_engines=1), dtype, block)
    return inputs.once(key, lambda: engine_weight_bytes(inputs.model, layout, dtype, block))


def _when(needs: Mapping[str, tuple[str, ...]], name: str) -> frozenset[str]:
    return frozenset(phase for phase, owners in needs.items() if name in owners)


def _plan_supervised(
    config: TuningConfig, inputs: PlanInputs, limit: int, reserve: int | None = None
) -> MemoryPlan:
    pool = PoolConfig(nnodes=config.trainer.nnodes, n_gpus_per_node=config.trainer.n_gpus_per_node)
    # Supervised fine-tuning evaluates held-out examples alone; rewards and the reference's log-probs are always computed.
    evaluates = config.data.val_files is not None or not isinstance(config, SFTConfig)
    phases = ("evaluate", "update") if evaluates else ("update",)
    role, longest = tuned_role(config), least_tokens(config)
    use = model_use(config, inputs, role)
    parts = dict.fromkeys(trained_parts(config.megatron))
    found = _model_owners(model_bytes(use, inputs.once), role, GLOBAL_POOL, parts, "update", "evaluate")
    owners = tuple(owner for owner in found if owner.phases is None or owner.phases & {*phases})
    rows = _reserved([use.layout], None) if reserve is None else ()
    reserve = _total(rows) if reserve is None else reserve
    return MemoryPlan(owners, phases, {GLOBAL_POOL: pool}, longest, 0, longest, limit, reserve, rows)


MULTIPLES = (16, 8, 4, 2)  # candidates, as multiples of the least size of a micro-batch
MOST_TOKENS = 65536  # once a GPU is full, more tokens make it no faster


def fitting_tokens(config: TrainConfig | TuningConfig, least: int, limit: int) -> int:
    """The greatest of `MULTIPLES` times `least` with which the models and their work fit; `least` if none does.

    Args:
        config: unresolved, accepted by `preflight`.
        least: tokens that a micro-batch must hold. limit: bytes of a GPU.
    """
    full = fetch_models(resolve(config), weights=False)
    inputs = PlanInputs.read(full)
    for multiple in MULTIPLES:
        tokens = multiple * least
        if tokens <= MOST_TOKENS and taken(config, inputs, tokens, limit) <= limit:
            return tokens
    return least


def taken(config: TrainConfig | TuningConfig, inputs: PlanInputs, tokens: int, limit: int) -> int:
    """Bytes of the fullest device in the phases of the models, with the reserve, if micro-batches have `tokens` tokens."""
    if isinstance(config, TrainConfig):
        policy = config.actor_rollout_ref
        actor = replace(policy.actor, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=tokens)
        config = replace(config, actor_rollout_ref=replace(policy, actor=actor))
    else:
        config = replace(config, max_token_len_per_gpu=tokens)
    plan = plan_of(resolve(config), inputs, limit)
    phases = [phase for phase in plan.phases if phase not in ("sync", "generate")]
    # Devices of engines alone, which fill them, hold the same whatever the size.
    pools = {owner.pool for owner in plan.owners if owner.name.endswith(("_activations", "_evaluating"))}
    return max(plan.total(phase, pool) for phase in phases for pool in pools) + plan.reserve


def memory_json(plan: MemoryPlan, keys: list[str]) -> dict[str, object]:
    """The plan in bytes."""
    return {
        "fits": plan.fits,
        "problems": plan.problems(),
        "phases": {
            phase: {
                "total": plan.fullest(phase),
                **{owner.name: max(owner.at(phase)) for owner in plan.owners if max(owner.at(phase))},
            }
            for phase in plan.phases
        },
        "host": {
            name: {"device": plan.host(name), "node": plan.host(name) * pool.n_gpus_per_node}
            for name, pool in plan.pools.items()
        },
        "peak": plan.peak,
        "reserve": plan.reserve,
        "reserved": dict(plan.reserved),
        "limit": plan.limit,
        "kv_tokens": plan.kv_tokens,
        "kv_token_bytes": plan.kv_token_bytes,
        "kv_groups": plan.kv_groups,
        "layout": keys,
    }
