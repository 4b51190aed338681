"""What a run has on its GPUs beside what is planned owner by owner: by the processes that each GPU has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config import MegatronConfig, TrainConfig, needs_reference, reference_in_actor
from megarl.costs.reserve import EngineRank, reserved
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


def reserve_rows(config: TrainConfig, model: ModelConfig) -> tuple[tuple[str, int], ...]:
    """(cause, bytes) on a GPU of the resource pool (of a resolved configuration) that has the most."""
    found = [
        reserved(list(_models(config, pool)), _engine(config, model, pool)) for pool in config.resource_pools
    ]
    most = max(found, key=lambda rows: sum(rows.values()))
    return tuple((cause, size) for cause, size in most.items() if size)


def _models(config: TrainConfig, pool: str) -> Iterator[ParallelLayout]:
    """The layouts of the roles that have processes of their own on a pool's GPUs."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    roles: list[tuple[str | None, MegatronConfig]] = [(policy.actor.resource_pool, policy.actor.megatron)]
    if needs_reference(config) and not reference_in_actor(config):
        roles.append((policy.ref.resource_pool, policy.ref.megatron))
    if critic is not None and not critic.model.share_base:
        roles.append((critic.resource_pool, critic.megatron))
    if reward.enable:
        roles.append((reward.resource_pool, reward.megatron))
    devices = config.resource_pools[pool].nnodes * config.resource_pools[pool].n_gpus_per_node
    yield from (ParallelLayout.from_config(megatron, devices) for of, megatron in roles if of == pool)


def _engine(config: TrainConfig, model: ModelConfig, pool: str) -> EngineRank | None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.resource_pool != pool:
        return None
    return EngineRank(
        rollout.tensor_model_parallel_size, rollout.max_num_seqs, model.vocab_size, model.mla is not None
    )
