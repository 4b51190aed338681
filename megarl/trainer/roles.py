"""Who runs where: the worker groups of a run and the devices they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.cluster import ResourcePool, WorkerGroup
from megarl.config import (
    ActorConfig,
    CriticConfig,
    LoraConfig,
    PoolConfig,
    RolloutConfig,
    TrainConfig,
    needs_reference,
    reference_in_actor,
)
from megarl.hybrid_engine import EngineLayout, SyncPlan, best_device_order
from megarl.layout import RankPlace
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.rollout.engine import AdapterConfig, EngineConfig
from megarl.rollout.sglang_engine import sglang_environment
from megarl.trainer.dispatch import MicroBatching
from megarl.trainer.lora_sync import engine_adapters, served_adapters
from megarl.trainer.memory import DeviceMemory, device_memory, frees_engines
from megarl.trainer.run import Run
from megarl.trainer.specs import ModelSpec
from megarl.trainer.sync import SyncFacts, connect
from megarl.trainer.turns import TurnsSpec, turns_spec

ACTOR = "megarl.trainer.actor:ActorWorker"
ACTOR_CRITIC = "megarl.trainer.shared_critic:ActorCriticWorker"
CRITIC = "megarl.trainer.critic:CriticWorker"
REWARD_MODEL = "megarl.trainer.reward_worker:RewardModelWorker"
ENGINE = "megarl.trainer.engine:EngineWorker"


@dataclass(frozen=True)
class Role:
    """A model's ranks, how they share it, and how its batches are cut."""

    group: WorkerGroup
    layout: ParallelLayout
    cut: MicroBatching


@dataclass(frozen=True)
class Roles:
    """The parts of a run; `ref.group` is the actor's where the reference lives in the actor's processes, and
    `critic.group` where the critic shares the actor's model."""

    actor: Role
    engines: WorkerGroup
    sync: SyncFacts
    critic: Role | None
    ref: Role | None
    reward_model: Role | None
    memory: DeviceMemory


def start_roles(config: TrainConfig, run: Run, model: ModelConfig, num_steps: int) -> Roles:
    """Start all worker groups of a PPO run, at once, and wait until every process is ready."""
    open_pools(run, config.resource_pools)
    policy = config.actor_rollout_ref
    actor_pool, engine_pool = run.pools[policy.actor.resource_pool], run.pools[policy.rollout.resource_pool]
    layout = ParallelLayout.from_config(policy.actor.megatron, len(actor_pool))
    order = engine_devices(policy.rollout, model, layout, actor_pool, engine_pool)
    freed = frees_engines(config, run)
    adapters, way = served_adapters(policy.rollout, model, policy.model.lora, freed)
    if way is not None:
        run.say(way)
    sync = sync_plan(policy.rollout, model, layout, actor_pool, engine_pool, order, adapters)
    with run.status("starting models and rollout engines"):
        context = config.data.max_prompt_length + config.data.max_response_length
        engines = start_engines(
            run,
            policy.rollout,
            policy.model.path,
            engine_pool,
            context,
            device_order=order,
            synced=True,
            releasable=freed,
            adapters=engine_adapters(model, adapters) if adapters is not None else None,
            turns=turns_spec(
                policy.rollout, policy.model, config.data.apply_chat_template_kwargs, config.plugins
            ),
        )
        if freed:  # before anything else comes to their devices
            run.wait(engines.started)
            run.wait(engines.call("release_memory", ["kv_cache", "weights"]))
        actor = _start_actor(config, run, num_steps)
        critic = _start_critic(config, run, actor, num_steps) if config.critic is not None else None
        ref = _reference(config, run, actor, num_steps) if needs_reference(config) else None
        reward_model = _start_reward_model(config, run) if config.reward_model.enable else None
        run.wait([ref for group in run.groups for ref in group.started])
    facts = connect(
        run, actor.group, engines, sync, config.trainer.collective_timeout, policy.rollout.sync_skip_unchanged
    )
    memory = device_memory(config, run, actor, engines, critic, ref, reward_model)
    return Roles(actor, engines, facts, critic, ref, reward_model, memory)


def open_pools(run: Run, pools: dict[str, PoolConfig]) -> None:
    """Reserve the devices of every pool for the run."""
    for name, pool in pools.items():
        run.pools[name] = ResourcePool(name, pool.nnodes, pool.n_gpus_per_node)


def engine_layout(rollout: RolloutConfig) -> EngineLayout:
    """How the ranks of all engines share the model."""
    return EngineLayout(
        tp=rollout.tensor_model_parallel_size,
        ep=rollout.expert_parallel_size,
        num_engines=rollout.num_engines,
    )


def engine_devices(
    rollout: RolloutConfig,
    model: ModelConfig,
    layout: ParallelLayout,
    actor_pool: ResourcePool,
    engine_pool: ResourcePool,
) -> tuple[int, ...]:
    """Which devices the engines' ranks take: those that hold most of their weights already."""
    sources = _places(actor_pool)[: layout.world]
    return best_device_order(model, layout, sources, engine_layout(rollout), _places(engine_pool))


def sync_plan(
    rollout: RolloutConfig,
    model: ModelConfig,
    layout: ParallelLayout,
    actor_pool: ResourcePool,
    engine_pool: ResourcePool,
    device_order: Sequence[int],
    adapters: LoraConfig | None = None,
) -> SyncPlan:
    """The way of the actor's weights into the engines. `adapters`: what these serve beside the weights."""
    places = _places(engine_pool)
    return SyncPlan(
        config=model,
        parallel=layout,
        engines=engine_layout(rollout),
        dtype=getattr(torch, rollout_dtype(rollout, engine_pool)),
        bucket_bytes=rollout.sync_bucket_mb << 20,
        source_places=_places(actor_pool)[: layout.world],
        target_places=tuple(places[number] for number in device_order),
        device="cuda" if actor_pool.use_gpu else "cpu",
        transport=rollout.sync_transport,
        fp8_block=fp8_block(rollout),
        adapters=adapters,
    )


def start_engines(
    run: Run,
    rollout: RolloutConfig,
    model_path: str,
    pool: ResourcePool,
    context_length: int,
    *,
    synced: bool,
    device_order: Sequence[int] | None = None,
    releasable: bool = False,
    adapters: AdapterConfig | None = None,
    turns: TurnsSpec | None = None,
) -> WorkerGroup:
    """Start the rollout engines.

    Args:
        device_order: the numbers of the pool's devices in the order in which the engines' ranks take them.
        synced: whether they wait for weights; others serve those of the model folder.
        releasable: whether their memory can be released.
        adapters: what they serve beside the weights; None: nothing.
        turns: how trajectories of several turns are played; None: they have one.
    """
    tp = rollout.tensor_model_parallel_size
    engine = EngineConfig(
        model_path=model_path,
        tensor_parallel_size=tp,
        expert_parallel_size=rollout.expert_parallel_size,
        device="cuda" if pool.use_gpu else "cpu",
        dtype=rollout_dtype(rollout, pool),
        fp8_block=fp8_block(rollout),
        load_format="dummy" if synced else "auto",
        context_length=context_length,
        max_num_seqs=rollout.max_num_seqs,
        max_total_tokens=rollout.max_total_tokens,
        enable_memory_saver=releasable,
        allow_unknown_version=rollout.allow_unknown_version,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        seed=rollout.seed,
        start_timeout=rollout.start_timeout,
        request_timeout=rollout.request_timeout,
        stop_token_ids=rollout.stop_token_ids,
        adapters=adapters,
    )
    return run.start(
        WorkerGroup(
            "rollout",
            ENGINE,
            pool,
            rollout.num_engines,
            {"config": engine, "turns": turns},
            run.log_dir,
            env=sglang_environment(engine.device, tp),
            devices_per_rank=tp,
            device_order=device_order,
        )
    )


def rollout_dtype(rollout: RolloutConfig, pool: ResourcePool) -> str:
    """The dtype that the engines hold: the configured one, or the machine's own."""
    return rollout.dtype or ("bfloat16" if pool.use_gpu else "float32")


def fp8_block(rollout: RolloutConfig) -> tuple[int, int] | None:
    """The blocks in which the engines hold weights in float8; None: they do not."""
    return rollout.quantization_block_size if rollout.quantization == "fp8" else None


def _start_actor(config: TrainConfig, run: Run, num_steps: int) -> Role:
    """The actor's processes, with the critic in them where it shares the actor's model."""
    policy = config.actor_rollout_ref
    shared_reference = needs_reference(config) and reference_in_actor(config)
    spec = ModelSpec(
        path=policy.model.path,
        head="lm",
        megatron=policy.actor.megatron,
        optim=policy.actor.optim,
        num_updates=num_steps * _updates_per_step(config, policy.actor),
        timeout=config.trainer.collective_timeout,
        # The ranks' working directory need not be this one.
        plugins=tuple(str(Path(file).expanduser().resolve()) for file in config.plugins),
        lora=policy.model.lora,
    )
    kwargs: dict[str, object] = {
        "spec": spec,
        "temperature": policy.rollout.temperature,
        "reference_path": policy.model.path if shared_reference and not spec.adapted else None,
    }
    shared_critic = config.critic is not None and config.critic.model.share_base
    if shared_critic:
        kwargs["critic"] = _critic_spec(config, num_steps)
    worker = ACTOR_CRITIC if shared_critic else ACTOR
    return _start_model(
        run, "actor", worker, policy.actor.resource_pool, spec, kwargs, _cut(config, policy.actor)
    )


def _start_critic(config: TrainConfig, run: Run, actor: Role, num_steps: int) -> Role:
    """The critic: in processes of its own, or in the actor's where it shares the actor's model."""
    critic, cut = config.critic, _cut(config, config.critic)
    if critic.model.share_base:
        return Role(actor.group, actor.layout, cut)
    spec = _critic_spec(config, num_steps)
    return _start_model(run, "critic", CRITIC, critic.resource_pool, spec, {"spec": spec}, cut)


def _critic_spec(config: TrainConfig, num_steps: int) -> ModelSpec:
    critic = config.critic
    return ModelSpec(
        path=critic.model.path,
        head="value",
        megatron=critic.megatron,
        optim=critic.optim,
        num_updates=num_steps * _updates_per_step(config, critic),
        timeout=config.trainer.collective_timeout,
        lora=critic.model.lora,
    )


def _reference(config: TrainConfig, run: Run, actor: Role, num_steps: int) -> Role:
    """The reference policy: in the actor's processes, or in processes of its own."""
    policy = config.actor_rollout_ref
    cut = MicroBatching(
        0, policy.ref.log_prob_max_token_len_per_gpu, policy.ref.log_prob_micro_batch_size_per_gpu
    )
    if reference_in_actor(config):
        return Role(actor.group, actor.layout, cut)
    spec = ModelSpec(
        path=policy.model.path,
        head="lm",
        megatron=policy.ref.megatron,
        optim=None,
        num_updates=0,
        timeout=config.trainer.collective_timeout,
        lora=policy.model.lora,  # not that it had adapters: its weights are held as the actor's are
    )
    kwargs = {"spec": spec, "temperature": policy.rollout.temperature}
    return _start_model(run, "ref", ACTOR, policy.ref.resource_pool, spec, kwargs, cut)


def _start_reward_model(config: TrainConfig, run: Run) -> Role:
    reward = config.reward_model
    spec = ModelSpec(
        path=reward.model.path,
        head="value",
        megatron=reward.megatron,
        optim=None,
        num_updates=0,
        timeout=config.trainer.collective_timeout,
    )
    cut = MicroBatching(0, reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu)
    return _start_model(run, "reward_model", REWARD_MODEL, reward.resource_pool, spec, {"spec": spec}, cut)


def _start_model(
    run: Run,
    name: str,
    worker_class: str,
    pool_name: str,
    spec: ModelSpec,
    kwargs: dict[str, object],
    cut: MicroBatching,
) -> Role:
    pool = run.pools[pool_name]
    group = WorkerGroup(name, worker_class, pool, len(pool), kwargs, run.log_dir)
    return Role(run.start(group), ParallelLayout.from_config(spec.megatron, len(pool)), cut)


def _cut(config: TrainConfig, section: ActorConfig | CriticConfig) -> MicroBatching:
    return MicroBatching(
        mini_batch_size=section.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        max_tokens=section.ppo_max_token_len_per_gpu,
        micro_batch_size=section.ppo_micro_batch_size_per_gpu,
        epochs=section.ppo_epochs,
        shuffle=config.actor_rollout_ref.actor.shuffle,
    )


def _updates_per_step(config: TrainConfig, section: ActorConfig | CriticConfig) -> int:
    return config.data.train_batch_size // section.ppo_mini_batch_size * section.ppo_epochs


def _places(pool: ResourcePool) -> tuple[RankPlace, ...]:
    """The pool's devices; a slot without a GPU is a device of its own."""
    return tuple(
        RankPlace(
            device.node_id,
            device.gpu_id if device.gpu_id is not None else f"{device.placement.id.hex()}/{device.bundle}",
        )
        for device in pool.devices
    )
