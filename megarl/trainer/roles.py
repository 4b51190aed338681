"""Who runs where: the worker groups of a run and the devices they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.cluster import ResourcePool, WorkerGroup
from megarl.config import (
    ActorConfig,
    CriticConfig,
    PoolConfig,
    RolloutConfig,
    TrainConfig,
    needs_reference,
    reference_in_actor,
)
from megarl.hybrid_engine import SyncPlan
from megarl.layout import RankPlace
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.rollout.engine import EngineConfig
from megarl.rollout.sglang_engine import sglang_environment
from megarl.trainer.dispatch import MicroBatching
from megarl.trainer.run import Run
from megarl.trainer.specs import ModelSpec

ACTOR = "megarl.trainer.actor:ActorWorker"
CRITIC = "megarl.trainer.critic:CriticWorker"
ENGINE = "megarl.trainer.engine:EngineWorker"


@dataclass(frozen=True)
class Role:
    """A model's ranks, how they share it, and how its batches are cut."""

    group: WorkerGroup
    layout: ParallelLayout
    cut: MicroBatching


@dataclass(frozen=True)
class Roles:
    """The parts of a run; `ref.group` is the actor's where the reference lives in the actor's processes."""

    actor: Role
    engines: WorkerGroup
    sync: SyncPlan
    critic: Role | None
    ref: Role | None


def start_roles(config: TrainConfig, run: Run, model: ModelConfig, num_steps: int) -> Roles:
    """Start all worker groups of a PPO run, at once, and wait until every process is ready."""
    open_pools(run, config.resource_pools)
    policy = config.actor_rollout_ref
    actor_pool, engine_pool = run.pools[policy.actor.resource_pool], run.pools[policy.rollout.resource_pool]
    layout = ParallelLayout.from_config(policy.actor.megatron, len(actor_pool))
    tp = policy.rollout.tensor_model_parallel_size
    sync = SyncPlan(
        config=model,
        parallel=layout,
        engine_tp=tp,
        dtype=getattr(torch, rollout_dtype(policy.rollout, engine_pool)),
        bucket_bytes=policy.rollout.sync_bucket_mb << 20,
        source_places=_places(actor_pool, layout.world),
        target_places=_places(engine_pool, tp),
    )
    with run.status("starting actor, critic and rollout engines"):
        actor = _start_actor(config, run, sync, num_steps)
        context = config.data.max_prompt_length + config.data.max_response_length
        engines = start_engines(run, policy.rollout, policy.model.path, engine_pool, context, sync)
        critic = _start_critic(config, run, num_steps) if config.critic is not None else None
        ref = _reference(config, run, actor, num_steps) if needs_reference(config) else None
        run.wait([ref for group in run.groups for ref in group.started])
    return Roles(actor, engines, sync, critic, ref)


def open_pools(run: Run, pools: dict[str, PoolConfig]) -> None:
    """Reserve the devices of every pool for the run."""
    for name, pool in pools.items():
        run.pools[name] = ResourcePool(name, pool.nnodes, pool.n_gpus_per_node)


def start_engines(
    run: Run,
    rollout: RolloutConfig,
    model_path: str,
    pool: ResourcePool,
    context_length: int,
    sync: SyncPlan | None,
) -> WorkerGroup:
    """Start the rollout engines; without `sync` they serve the weights of the model folder."""
    tp = rollout.tensor_model_parallel_size
    engine = EngineConfig(
        model_path=model_path,
        tensor_parallel_size=tp,
        device="cuda" if pool.use_gpu else "cpu",
        dtype=rollout_dtype(rollout, pool),
        load_format="auto" if sync is None else "dummy",
        context_length=context_length,
        max_num_seqs=rollout.max_num_seqs,
        max_total_tokens=rollout.max_total_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        seed=rollout.seed,
        start_timeout=rollout.start_timeout,
        request_timeout=rollout.request_timeout,
    )
    return run.start(
        WorkerGroup(
            "rollout",
            ENGINE,
            pool,
            rollout.num_engines,
            {"config": engine, "sync": sync},
            run.log_dir,
            env=sglang_environment(engine.device, tp),
            devices_per_rank=tp,
        )
    )


def rollout_dtype(rollout: RolloutConfig, pool: ResourcePool) -> str:
    """The dtype that the engines hold: the configured one, or the machine's own."""
    return rollout.dtype or ("bfloat16" if pool.use_gpu else "float32")


def _start_actor(config: TrainConfig, run: Run, sync: SyncPlan, num_steps: int) -> Role:
    policy = config.actor_rollout_ref
    shared_reference = needs_reference(config) and reference_in_actor(config)
    spec = ModelSpec(
        path=policy.model.path,
        head="lm",
        megatron=policy.actor.megatron,
        optim=policy.actor.optim,
        num_updates=num_steps * _updates_per_step(config, policy.actor),
        timeout=config.trainer.collective_timeout,
    )
    kwargs = {
        "spec": spec,
        "temperature": policy.rollout.temperature,
        "reference_path": policy.model.path if shared_reference else None,
        "sync": sync,
    }
    return _start_model(
        run, "actor", ACTOR, policy.actor.resource_pool, spec, kwargs, _cut(config, policy.actor)
    )


def _start_critic(config: TrainConfig, run: Run, num_steps: int) -> Role:
    critic = config.critic
    spec = ModelSpec(
        path=critic.model.path,
        head="value",
        megatron=critic.megatron,
        optim=critic.optim,
        num_updates=num_steps * _updates_per_step(config, critic),
        timeout=config.trainer.collective_timeout,
    )
    return _start_model(
        run, "critic", CRITIC, critic.resource_pool, spec, {"spec": spec}, _cut(config, critic)
    )


def _reference(config: TrainConfig, run: Run, actor: Role, num_steps: int) -> Role:
    """The reference policy: in the actor's processes, or in processes of its own."""
    policy = config.actor_rollout_ref
    cut = MicroBatching(0, policy.ref.log_prob_max_token_len_per_gpu, None)
    if reference_in_actor(config):
        return Role(actor.group, actor.layout, cut)
    spec = ModelSpec(
        path=policy.model.path,
        head="lm",
        megatron=policy.ref.megatron,
        optim=None,
        num_updates=0,
        timeout=config.trainer.collective_timeout,
    )
    kwargs = {"spec": spec, "temperature": policy.rollout.temperature}
    return _start_model(run, "ref", ACTOR, policy.ref.resource_pool, spec, kwargs, cut)


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


def _places(pool: ResourcePool, count: int) -> tuple[RankPlace, ...]:
    devices: Sequence = pool.devices[:count]
    return tuple(
        RankPlace(device.node_id, str(index) if device.gpu_id is None else device.gpu_id)
        for index, device in enumerate(devices)
    )
