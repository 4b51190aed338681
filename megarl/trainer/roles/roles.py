"""The worker groups of a run and the devices that they share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch

from megarl.cluster import ResourcePool, WorkerGroup
from megarl.config import (
    LoraConfig,
    PoolConfig,
    RolloutConfig,
    TrainConfig,
    eval_rollout,
    reference_in_actor,
    references,
    served_references,
    validates_concurrently,
)
from megarl.config.resolve import TEACHER
from megarl.costs.phases import frees_engines
from megarl.layout import RankPlace
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.rollout.engine import EngineConfig
from megarl.rollout.sglang.before_import import sglang_environment
from megarl.trainer.roles.adapters import served_adapters
from megarl.trainer.roles.device_memory import (
    DeviceMemory,
    device_memory,
    devices_of,
    gpu_pools,
    model_owners,
    take_off,
)
from megarl.trainer.roles.engines import fp8_block, reporting_slow_start, rollout_dtype, synced_engine
from megarl.trainer.roles.judges import WORKER as JUDGE
from megarl.trainer.roles.judges import JudgeEngines, judge_engine, judge_engines
from megarl.trainer.roles.model_roles import (
    Role,
    say_layers,
    start_actor,
    start_critic,
    start_references,
    start_reward_model,
)
from megarl.trainer.roles.restarts import EngineRestarts
from megarl.trainer.roles.types import EvalEngines, Roles
from megarl.trainer.roles.weight_sync import connect, sync_eval_weights, sync_weights
from megarl.trainer.run.checkpoints import Checkpoints, InFolder, Stateful
from megarl.trainer.run.cluster_setup import ENGINE_PROCESSES, pools_of
from megarl.trainer.run.export import export_hf
from megarl.trainer.run.facts import record_gpus
from megarl.trainer.run.run import Run
from megarl.trainer.workers.agents_spec import AgentsSpec, agents_spec
from megarl.trainer.workers.dispatch import ENGINES, EVAL_ENGINES
from megarl.trainer.workers.multi_turn import TurnsSpec, turns_spec
from megarl.weight_sync.layouts import EngineLayout, best_device_order
from megarl.weight_sync.sync_plan import SyncPlan

ENGINE = "megarl.trainer.workers.engine:EngineWorker"
AROUND_ENGINES = "megarl.trainer.workers.engine:ending_when_hung"
ENGINE_LOG = "rollout-rank0.log"  # of the first engine


def start_roles(
    config: TrainConfig, run: Run, model: ModelConfig, num_steps: int, *, trains: bool = True
) -> Roles:
    """Start all worker groups of a PPO run, and wait until every process is ready: at once, but for models that share GPUs.

    Args:
        trains: whether models are trained; else there is only an actor, without an optimizer.
    """
    open_pools(run, config.resource_pools)
    policy = config.actor_rollout_ref
    actor_pool, engine_pool = run.pools[policy.actor.resource_pool], run.pools[policy.rollout.resource_pool]
    layout = ParallelLayout.from_config(policy.actor.megatron, len(actor_pool))
    # The plan of the weight sync decides which devices the engines take, before they start.
    order = engine_devices(policy.rollout, model, layout, actor_pool, engine_pool)
    freed = frees_engines(config, gpu_pools(run))
    adapters, way = served_adapters(policy.rollout, model, policy.model.lora, freed)
    if way is not None:
        run.say(way)
    predicts = trains and policy.model.mtp == "train"
    sync = sync_plan(policy.rollout, model, layout, actor_pool, engine_pool, order, adapters, predicts)
    with (
        run.status("starting models and rollout engines"),
        reporting_slow_start(run.say, run.log_dir / ENGINE_LOG),
    ):
        engine = synced_engine(config, model, adapters, use_gpu=engine_pool.use_gpu, freed=freed)
        start_synced = partial(_synced_engines, config, run, engine_pool, order, engine)
        # The fork server of the models is ready before that of the engines: start the models first.
        last = ENGINE_PROCESSES in run.fork_servers and not freed
        engines = None if last else start_synced()
        actor, critic, judges, left = _start_models(config, run, num_steps if trains else None)
        engines = start_synced() if last else engines
        serving = _start_judges(config, run) if trains else {}
        reward_model = start_reward_model(config, run) if config.reward_model.enable else None
        own = None
        if validates_concurrently(config):
            own = _start_eval_engines(config, run, model, layout, actor_pool, adapters, predicts)
        run.wait([ref for group in run.groups for ref in group.started])
    say_layers(run, actor.group, actor_pool)
    # Connecting and syncing are repeated after each engine restart; `roles` exists by then.
    join = partial(connect, run, actor.group, engines, sync, config.trainer.collective_timeout)
    facts = join()
    memory = device_memory(
        config, run, actor, engines, critic, judges, reward_model, trains=trains, left=left
    )
    if gpu_pools(run):
        memory.reserve()
    restarts = EngineRestarts(
        run,
        engines,
        policy.rollout.max_restarts,
        memory,
        join,
        lambda version: sync_weights(run, roles, version),
    )
    of_eval = None
    if own is not None:
        of_eval = _connect_eval_engines(
            config, run, actor.group, *own, lambda version: sync_eval_weights(run, roles, version)
        )
    judges_of = teachers_of(judges)
    roles = Roles(
        actor,
        engines,
        facts,
        critic,
        judges.get("ref"),
        reward_model,
        memory,
        restarts,
        judges_of,
        of_eval,
        _serving(config, run, serving),
    )
    memory.recover, memory.serve = restarts.replace_lost, restarts.serve_all
    if restarts.max_restarts:
        run.restarts = restarts
        run.spares.append(engines)
    return roles


def start_learners(config: TrainConfig, run: Run, num_steps: int) -> Roles:
    """Start the trained models and the reference, on their pools alone: no engines, no reward model."""
    open_pools(run, pools_of(config))
    with run.status("starting models"):
        actor, critic, judges, left = _start_models(config, run, num_steps)
        serving = _start_judges(config, run)
        run.wait([ref for group in run.groups for ref in group.started])
    say_layers(run, actor.group, run.pools[config.actor_rollout_ref.actor.resource_pool])
    memory = device_memory(config, run, actor, None, critic, judges, None, left=left)
    served = _serving(config, run, serving)
    ref, teachers = judges.get("ref"), teachers_of(judges)
    return Roles(actor, None, None, critic, ref, None, memory, None, teachers, judges=served)


def teachers_of(judges: Mapping[str, Role]) -> dict[str, Role]:
    """The teachers by their names, from the references by their roles; {}: there are none."""
    return {role.removeprefix(TEACHER): judge for role, judge in judges.items() if role != "ref"}


def _start_judges(config: TrainConfig, run: Run) -> dict[str, WorkerGroup]:
    """The engines of references by their roles."""
    groups = {}
    for role, rollout in served_references(config).items():
        pool = run.pools[rollout.resource_pool]
        engine = judge_engine(config, role, use_gpu=pool.use_gpu)
        groups[role] = start_engines(run, rollout, pool, engine, None, role=role, worker=JUDGE)
    return groups


def _serving(config: TrainConfig, run: Run, groups: Mapping[str, WorkerGroup]) -> dict[str, JudgeEngines]:
    return {role: judge_engines(config, run, role, group) for role, group in groups.items()}


def _start_models(
    config: TrainConfig, run: Run, num_steps: int | None
) -> tuple[Role, Role | None, dict[str, Role], set[WorkerGroup]]:
    """Start the actor and, where the run has them, critic and references (by their roles); `num_steps` as for `start_actor`.

    Where models share GPUs and make room for each other in every phase, they do so here as well: each is loaded, and taken off the
    GPUs, before the next one starts. A reward model that starts after them finds room, too.

    Returns: also the groups that were taken off their devices.
    """
    actor, left = start_actor(config, run, num_steps), set[WorkerGroup]()
    if num_steps is None:
        return actor, None, {}, left
    # Roles in the actor's processes start nothing.
    own_critic = config.critic is not None and not config.critic.model.share_base
    critic = start_critic(config, run, actor, num_steps) if config.critic and not own_critic else None
    judges = start_references(config, run, actor) if reference_in_actor(config) else {}

    def make_room(pools: Collection[str]) -> None:
        """Take what has been started off the GPUs of these pools."""
        gpus = {device for name in pools if run.pools[name].use_gpu for device in run.pools[name].devices}
        there = [
            owner
            for owner in model_owners(config, run, actor, critic, judges)
            if owner.group not in left and not gpus.isdisjoint(devices_of(owner.group))
        ]
        take_off(run, there)
        left.update(owner.group for owner in there)

    if config.critic is not None and own_critic:
        make_room({config.critic.resource_pool})
        critic = start_critic(config, run, actor, num_steps)
    if not reference_in_actor(config):
        make_room({ref.resource_pool for ref in references(config).values()})
        judges = start_references(config, run, actor)
    if config.reward_model.enable:
        make_room({config.reward_model.resource_pool})
    return actor, critic, judges, left


def _synced_engines(
    config: TrainConfig, run: Run, pool: ResourcePool, order: Sequence[int], engine: EngineConfig
) -> WorkerGroup:
    """The engines of a run that syncs them; their memory is released already if it is freed in phases that do not need it."""
    policy = config.actor_rollout_ref
    engines = start_engines(run, policy.rollout, pool, engine, _turns(config), order)
    if engine.enable_memory_saver:  # before models are loaded onto their devices
        run.wait(engines.started)
        run.wait(engines.call("release_memory", ["kv_cache", "weights"]))
    return engines


def _turns(config: TrainConfig) -> TurnsSpec | AgentsSpec | None:
    policy, keywords = config.actor_rollout_ref, config.data.apply_chat_template_kwargs
    folder = config.trainer.default_local_dir
    agents = agents_spec(policy.rollout, policy.model, keywords, folder, config.plugins)
    return agents or turns_spec(policy.rollout, policy.model, keywords, config.plugins)


def _start_eval_engines(
    config: TrainConfig,
    run: Run,
    model: ModelConfig,
    layout: ParallelLayout,
    actor_pool: ResourcePool,
    adapters: LoraConfig | None,
    predicts: bool,
) -> tuple[WorkerGroup, SyncPlan]:
    """The engines of concurrent validation, and the plan of their syncs. They are sent adapters, or merged weights, as the rollouts'
    engines are, so that a validation has the same numbers with either."""
    rollout = eval_rollout(config)
    assert rollout.resource_pool is not None, "resolved"
    pool = run.pools[rollout.resource_pool]
    order = engine_devices(rollout, model, layout, actor_pool, pool)
    engine = synced_engine(config, model, adapters, use_gpu=pool.use_gpu, freed=False)
    group = start_engines(run, rollout, pool, engine, _turns(config), order, EVAL_ENGINES)
    return group, sync_plan(rollout, model, layout, actor_pool, pool, order, adapters, predicts)


def _connect_eval_engines(
    config: TrainConfig,
    run: Run,
    actor: WorkerGroup,
    group: WorkerGroup,
    plan: SyncPlan,
    sync: Callable[[int], object],
) -> EvalEngines:
    """Connect these engines, which have started; `sync`: sends them a version."""
    join = partial(connect, run, actor, group, plan, config.trainer.collective_timeout)
    facts = join()
    most = config.actor_rollout_ref.rollout.max_restarts
    # No other role is on their devices, and their memory never leaves these.
    memory = DeviceMemory(run, [], {"sync": (), "generate": ()})
    if most:
        run.spares.append(group)
    return EvalEngines(group, facts, EngineRestarts(run, group, most, memory, join, sync))


def policy_checkpoints(
    config: TrainConfig,
    run: Run,
    roles: Roles,
    parts: Mapping[str, Stateful | None],
    folders: Mapping[str, InFolder] | None = None,
) -> Checkpoints:
    """The checkpoints of a PPO run: of actor and critic, and of the controller's state (`parts` and `folders`, by name)."""
    groups = {"actor": roles.actor.group}
    if roles.critic is not None:
        groups["critic"] = roles.critic.group
    model = config.actor_rollout_ref.model
    return Checkpoints(
        run,
        config.trainer,
        groups,
        {name: part for name, part in parts.items() if part is not None},
        roles.memory.held,
        lambda folder: export_hf(run, roles.actor.group, model, folder),
        folders or {},
    )


def open_pools(run: Run, pools: Mapping[str, PoolConfig]) -> None:
    """Reserve the devices of every pool for the run, and record their GPUs. ValueError: the cluster cannot give them."""
    for name, pool in pools.items():
        run.pools[name] = ResourcePool(name, pool.nnodes, pool.n_gpus_per_node, say=run.say)
    record_gpus(run.pools.values(), run.folder)


def engine_devices(
    rollout: RolloutConfig,
    model: ModelConfig,
    layout: ParallelLayout,
    actor_pool: ResourcePool,
    engine_pool: ResourcePool,
) -> tuple[int, ...]:
    """The devices of the engines' ranks, chosen so that most of their weights are there already."""
    sources = _places(actor_pool)[: layout.world]
    return best_device_order(model, layout, sources, EngineLayout.of(rollout), _places(engine_pool))


def sync_plan(
    rollout: RolloutConfig,
    model: ModelConfig,
    layout: ParallelLayout,
    actor_pool: ResourcePool,
    engine_pool: ResourcePool,
    device_order: Sequence[int],
    adapters: LoraConfig | None = None,
    mtp: bool = False,
) -> SyncPlan:
    """The plan by which the actor's weights reach the engines.

    Args:
        adapters: the adapters that the engines serve next to the weights.
        mtp: whether the actor has its multi-token prediction layers.
    """
    places = _places(engine_pool)
    return SyncPlan(
        config=model,
        parallel=layout,
        engines=EngineLayout.of(rollout, draft=mtp and rollout.speculative.algorithm == "mtp"),
        dtype=getattr(torch, rollout_dtype(rollout, engine_pool.use_gpu)),
        bucket_bytes=rollout.sync_bucket_mb << 20,
        source_places=_places(actor_pool)[: layout.world],
        target_places=tuple(places[number] for number in device_order),
        device="cuda" if actor_pool.use_gpu else "cpu",
        transport=rollout.sync_transport,
        skip_unchanged=rollout.sync_skip_unchanged,
        fp8_block=fp8_block(rollout),
        adapters=adapters,
        mtp=mtp,
    )


def start_engines(
    run: Run,
    rollout: RolloutConfig,
    pool: ResourcePool,
    engine: EngineConfig,
    turns: TurnsSpec | AgentsSpec | None,
    device_order: Sequence[int] | None = None,
    role: str = ENGINES,
    worker: str = ENGINE,
) -> WorkerGroup:
    """Start engines, which generate or (`worker`) judge.

    Args:
        turns: how trajectories of several turns are generated; None: trajectories have one turn.
        device_order: the numbers of the pool's devices in the order in which the engines' ranks take them.
    """
    tp, nodes = rollout.tensor_model_parallel_size, rollout.nodes_per_engine
    return run.start(
        WorkerGroup(
            role,
            worker,
            pool,
            rollout.num_engines,
            {"config": engine, "turns": turns},
            run.log_dir,
            env=sglang_environment(engine.device, tp, nodes=nodes),
            devices_per_rank=tp,
            parts=nodes,
            device_order=device_order,
            watched_groups=run.groups,
            watch=run.watch,
            around=AROUND_ENGINES,
            fork_server=run.fork_servers.get(ENGINE_PROCESSES),
            spared_groups=run.spares,  # an engine of the other role may be lost while one is restarted
        )
    )


def _places(pool: ResourcePool) -> tuple[RankPlace, ...]:
    """The pool's devices; a slot without a GPU is a device of its own."""
    return tuple(
        RankPlace(
            device.node_id,
            device.gpu_id if device.gpu_id is not None else f"{device.placement.id.hex()}/{device.bundle}",
        )
        for device in pool.devices
    )
