"""Checks of `trainer.mode`: generation and training at the same time need devices of their own."""

from collections.abc import Iterator

from megarl.config.resolve import needs_reference
from megarl.config.schema.commands import STREAMED, TrainConfig

_POLICY = "actor_rollout_ref"


def mode_problems(config: TrainConfig) -> Iterator[str]:
    """Of a resolved configuration."""
    trainer, policy = config.trainer, config.actor_rollout_ref
    if trainer.max_staleness is not None and trainer.mode not in STREAMED:
        yield (
            f"trainer.max_staleness={trainer.max_staleness}: trainer.mode={trainer.mode} does not read it; leave it out, or set the mode "
            f"to {' or '.join(STREAMED)}"
        )
    if trainer.mode == "sync":
        return
    mode = f"trainer.mode={trainer.mode}"
    for key, given in (
        ("rollout_only", trainer.rollout_only),
        ("train_only", trainer.train_only is not None),
    ):
        if given:
            yield f"trainer.{key}: {mode} has no such half; leave one of the two out"
    if trainer.mode == "partial_rollouts":
        return
    if trainer.mode == "fully_async" and policy.rollout.free_cache_engine:
        yield (
            f"{_POLICY}.rollout.free_cache_engine=true: {mode} generates all the time, so the engines' memory never goes; leave it out"
        )
    trained = {f"{_POLICY}.actor": policy.actor.resource_pool}
    if needs_reference(config):
        trained[f"{_POLICY}.ref"] = policy.ref.resource_pool
    if config.critic is not None:
        trained["critic"] = config.critic.resource_pool
    collecting = {f"{_POLICY}.rollout": policy.rollout.resource_pool}
    if config.reward_model.enable:
        collecting["reward_model"] = config.reward_model.resource_pool
    for role, pool in collecting.items():
        shared = [other for other, name in trained.items() if name == pool]
        if shared:
            yield (
                f"{role}.resource_pool={pool!r} is also that of {', '.join(shared)}: with {mode} both work at the same time; name "
                "another pool of resource_pools, such as {train: {n_gpus_per_node: 4}, rollout: {n_gpus_per_node: 4}}"
            )
