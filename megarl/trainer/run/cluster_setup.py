"""The cluster of a run: the pools of devices that it asks for, whether this machine has them, and the kinds of processes on them.

What each kind imports is in the fork server that its processes come from (cluster/fork_server.py).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megarl.cluster import ClusterSetup, ProcessKind, gpus_here, open_cluster_setup, rank_environment
from megarl.config import (
    EvalConfig,
    PoolConfig,
    RolloutConfig,
    TrainConfig,
    TuningConfig,
    all_references,
    served_references,
)
from megarl.config.resolve import GLOBAL_POOL
from megarl.rollout.sglang.before_import import sglang_environment

SLOTS_PER_CORE = 16  # 32 on each of 2 cores did not come up within the two minutes that a group has


def pools_of(config: TrainConfig | TuningConfig | EvalConfig) -> Mapping[str, PoolConfig]:
    """The pools of devices that a resolved run reserves; with train_only the pools of the trained models and the reference alone."""
    trainer = config.trainer
    if not isinstance(config, TrainConfig):
        return {GLOBAL_POOL: PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)}
    assert config.resource_pools is not None, "resolved"
    if config.trainer.train_only is None:
        return config.resource_pools
    used = {config.actor_rollout_ref.actor.resource_pool}
    if config.critic is not None:
        used.add(config.critic.resource_pool)
    used |= {section.resource_pool for section in all_references(config).values()}
    return {name: pool for name, pool in config.resource_pools.items() if name in used}


def check_devices(config: TrainConfig | TuningConfig | EvalConfig) -> None:
    """Check the devices of this machine before anything is started; an existing cluster is asked when the run joins it.

    Without GPUs each device is one or more processes, and a core can start a limited number of processes in time.

    Raises:
        ValueError: this machine has fewer devices than the run asks for.
    """
    if config.trainer.ray_address is not None:
        return
    pools = pools_of(config).values()
    devices = sum(pool.nnodes * pool.n_gpus_per_node for pool in pools)
    asked = " + ".join(f"{pool.nnodes} x {pool.n_gpus_per_node}" for pool in pools)
    wish = f"trainer.nnodes x trainer.n_gpus_per_node (or resource_pools) ask for {asked} devices"
    gpus, cores = gpus_here(), len(os.sched_getaffinity(0))
    if gpus and devices > gpus:
        raise ValueError(
            f"{wish}; this machine has {gpus} GPUs for them, and trainer.ray_address names no cluster of several; ask for fewer"
        )
    if not gpus and devices > SLOTS_PER_CORE * cores:
        raise ValueError(
            f"{wish}; this machine has no GPU, so that each is a process, and on its {cores} cores at most "
            f"{SLOTS_PER_CORE * cores} come up in time; ask for fewer"
        )


MODEL_PROCESSES, ENGINE_PROCESSES = "model", "engine"
# The slow imports of a model's ranks, without Ray.
_MODEL = (
    "megarl.megatron.build",
    "torch._dynamo",  # which Megatron's model imports when it is made
    "megarl.weight_sync.sender",
    "megarl.weight_sync.sync_plan",
    "megarl.checkpoints.hf.adapters",
    "megarl.checkpoints.hf.export",
    "megarl.data.trajectories",
    "megarl.checkpoints",
    "megarl.config",
)
_ENGINE = (
    "megarl.rollout.sglang.process",
    "megarl.rollout.turns",
    "megarl.data.trajectories",
    "megarl.config",
)


@contextmanager
def cluster_setup_of(config: TrainConfig | TuningConfig | EvalConfig) -> Iterator[ClusterSetup | None]:
    """The fork servers of a command's cluster, opened before it starts; None: it joins an existing cluster.

    Raises:
        ValueError: this machine has fewer devices than its cluster is asked for.
    """
    check_devices(config)
    if config.trainer.ray_address is not None:
        yield None
        return
    kinds = {} if isinstance(config, EvalConfig) else {MODEL_PROCESSES: _kind(_MODEL, {})}
    if isinstance(config, EvalConfig):
        kinds[ENGINE_PROCESSES] = _engine(config.rollout)
    elif isinstance(config, TrainConfig) and config.trainer.train_only is None:
        kinds[ENGINE_PROCESSES] = _engine(config.actor_rollout_ref.rollout)
    elif isinstance(config, TrainConfig) and (served := served_references(config)):
        kinds[ENGINE_PROCESSES] = _engine(next(iter(served.values())))
    with open_cluster_setup(kinds) as cluster_setup:
        yield cluster_setup


def _engine(rollout: RolloutConfig) -> ProcessKind:
    """The processes that own engines."""
    env = sglang_environment("cpu", rollout.tensor_model_parallel_size, nodes=rollout.nodes_per_engine)
    return _kind(_ENGINE, env)


def _kind(modules: tuple[str, ...], env: Mapping[str, str]) -> ProcessKind:
    return ProcessKind(modules, tuple((rank_environment((), single_machine=True) | env).items()))
