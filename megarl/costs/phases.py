"""The parts of a run on the devices in each phase of a step, by its configuration.

Where a model and the rollout engines share devices, each phase of a step has its own data there and nothing else:

    sync              the actor's weights, the engines' weights
    generate          the engines' weights and KV cache
    score_model       the reward model's weights, and still the engines' (more may be generated after their scores)
    evaluate_models   the weights of actor, reference (or all teachers) and critic
    update            weights, gradients and optimizer states of actor and critic, one after the other where they
                      share devices; of the reference too, where the loss has the exact KL to it
    eval_sync         the actor's weights (the engines of concurrent validation have devices of their own)
    save_<role>       the weights and optimizer states of a role, which a checkpoint takes from there

Adapters go with the weights that they are on, a shared critic's with the actor's weights.

So the engines' KV cache comes only after their weights are synced, and is never there together with other weights;
where both copies of the weights are, there is neither a cache nor an optimizer. Data leaves before other data arrives.
Roles that share no devices keep their data there; on a CPU so do roles whose data nobody asked to move.
"""

from __future__ import annotations

from collections.abc import Collection

from megarl.config import MegatronConfig, TrainConfig, full_kl_in_loss, references

ALL_OF = {
    role: tuple(f"{role}_{part}" for part in ("weights", "adapters", "gradients", "optimizer"))
    for role in ("actor", "critic")
}
NEEDS: dict[str, tuple[str, ...]] = {
    "sync": ("actor_weights", "actor_adapters", "rollout_weights"),
    "generate": ("rollout_weights", "rollout_kv_cache"),
    "score_model": ("rollout_weights", "reward_model_weights"),
    "evaluate_models": (
        "actor_weights",
        "actor_adapters",
        "ref_weights",
        "critic_weights",
        "critic_adapters",
    ),
    "update": ALL_OF["critic"] + ALL_OF["actor"],
    "update_critic": ALL_OF["critic"],
    "update_actor": ALL_OF["actor"],
    "save_actor": tuple(name for name in ALL_OF["actor"] if name != "actor_gradients"),
    "save_critic": tuple(name for name in ALL_OF["critic"] if name != "critic_gradients"),
    "eval_sync": ("actor_weights", "actor_adapters"),
    "export": ("actor_weights", "actor_adapters"),
}


def phase_needs(config: TrainConfig) -> dict[str, tuple[str, ...]]:
    """The parts that each phase uses: NEEDS; with several teachers all their weights at once; with the exact KL in the actor's loss also the
    reference; with a critic that shares the actor's model also this model."""
    needs = dict(NEEDS)
    needs["evaluate_models"] += tuple(f"{role}_weights" for role in references(config) if role != "ref")
    if full_kl_in_loss(config):
        for phase in ("update", "update_actor"):
            needs[phase] += ("ref_weights",)
    if config.critic is not None and config.critic.model.share_base:
        needs["update_critic"] += ("actor_weights",)
    return needs


def frees_engines(config: TrainConfig, gpus: Collection[str]) -> bool:
    """Whether the engines' memory is released while models are trained.

    Args:
        gpus: names of the resource pools whose devices are GPUs.
    """
    policy = config.actor_rollout_ref
    if policy.rollout.free_cache_engine is not None:
        return policy.rollout.free_cache_engine
    pools: list[str | None] = [policy.actor.resource_pool, policy.ref.resource_pool]
    pools += [teacher.resource_pool for teacher in (policy.teachers or {}).values()]
    if config.critic is not None:
        pools.append(config.critic.resource_pool)
    if config.reward_model.enable:
        pools.append(config.reward_model.resource_pool)
    return any(_with_engines(config, pool, gpus) for pool in pools)


def leaves(config: TrainConfig, switch: bool | None, pool: str, gpus: Collection[str]) -> bool:
    """Whether a pool's data leaves its devices in phases that do not use it.

    Args:
        switch: the value of the key for it; null: it leaves where the devices are GPUs that the engines use, too.
        gpus: as in `frees_engines`.
    """
    return _with_engines(config, pool, gpus) if switch is None else switch


def trained_parts(megatron: MegatronConfig) -> dict[str, bool | None]:
    """The parts of a role that is trained, each with the switch that `leaves` takes."""
    return {
        "weights": megatron.param_offload,
        "adapters": megatron.param_offload,
        "gradients": megatron.grad_offload,
        "optimizer": megatron.optimizer_offload,
    }


def _with_engines(config: TrainConfig, pool: str | None, gpus: Collection[str]) -> bool:
    return pool in gpus and pool == config.actor_rollout_ref.rollout.resource_pool
