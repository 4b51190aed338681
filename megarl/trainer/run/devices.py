"""Whether this machine has the devices that a run asks for, where the run starts a cluster of its own on it."""

import os
from collections.abc import Mapping

from megarl.cluster import gpus_here
from megarl.config import EvalConfig, PoolConfig, TrainConfig, TuningConfig, needs_reference
from megarl.config.resolve import GLOBAL_POOL

SLOTS_PER_CORE = 16  # 32 on each of 2 cores did not come up within the two minutes that a group has


def pools_of(config: TrainConfig | TuningConfig | EvalConfig) -> Mapping[str, PoolConfig]:
    """The pools of devices that a run (resolved) reserves: of one that only learns, those of the models that it trains."""
    trainer = config.trainer
    if not isinstance(config, TrainConfig):
        return {GLOBAL_POOL: PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)}
    assert config.resource_pools is not None, "resolved"
    if config.trainer.train_only is None:
        return config.resource_pools
    used = {config.actor_rollout_ref.actor.resource_pool}
    if config.critic is not None:
        used.add(config.critic.resource_pool)
    if needs_reference(config):
        used.add(config.actor_rollout_ref.ref.resource_pool)
    return {name: pool for name, pool in config.resource_pools.items() if name in used}


def check_devices(config: TrainConfig | TuningConfig | EvalConfig) -> None:
    """Before anything is started; a cluster that the run joins is asked when it does.

    Without GPUs each device is a process or more, of which a core can start only so many in time.

    Raises:
        ValueError: this machine has fewer.
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
