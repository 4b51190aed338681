"""Fills in what a configuration leaves to be derived, so that no later code derives it again."""

from dataclasses import replace
from typing import TypeVar

from megarl.config.schema import (
    ActorConfig,
    CriticConfig,
    EvalConfig,
    MegatronConfig,
    ModelPathConfig,
    PoolConfig,
    RefConfig,
    RolloutConfig,
    SFTConfig,
    SFTTrainerConfig,
    TrainConfig,
    TrainerConfig,
)

GLOBAL_POOL = "global"

C = TypeVar("C", TrainConfig, SFTConfig, EvalConfig)


def resolve(config: C) -> C:
    """The configuration with its derived nulls filled in; one that is filled in comes back equal.

    Filled: tokenizer_path, sequence_parallel, clip ratios, the critic's and the reference's settings that are the
    actor's, resource pools and the pool of each role, num_engines, run folder and rollout folder.
    Null remain what only a later stage knows: dtypes and what is offloaded (the devices), lr_decay_steps and
    total_training_steps (the data), max_total_tokens (the engine), val_batch_size and max_samples (null means all),
    ray_address.
    Expects what `check_config` accepts, but never fails where it would not.
    """
    if isinstance(config, TrainConfig):
        return _resolve_train(config)
    if isinstance(config, SFTConfig):
        trainer = config.trainer
        return replace(
            config,
            model=_with_tokenizer(config.model),
            megatron=_with_sequence_parallel(config.megatron),
            trainer=replace(trainer, default_local_dir=trainer.default_local_dir or _run_folder(trainer)),
        )
    assert isinstance(config, EvalConfig), type(config)
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    return replace(
        config,
        model=_with_tokenizer(config.model),
        rollout=_with_engines(replace(config.rollout, resource_pool=GLOBAL_POOL), devices),
    )


def pool_devices(pools: dict[str, PoolConfig] | None, name: str | None) -> int | None:
    """Devices of the pool `name`; None if there is no such pool."""
    pool = (pools or {}).get(name or "")
    return None if pool is None else pool.nnodes * pool.n_gpus_per_node


def needs_reference(config: TrainConfig) -> bool:
    """Whether the run uses the reference policy's log-probs."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def reference_in_actor(config: TrainConfig) -> bool:
    """Whether the reference (of a resolved configuration) lives in the actor's processes: same layout, same pool."""
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    return ref.megatron == actor.megatron and ref.resource_pool == actor.resource_pool


def _resolve_train(config: TrainConfig) -> TrainConfig:
    trainer, policy = config.trainer, config.actor_rollout_ref
    pools = config.resource_pools
    if pools is None:
        pools = {GLOBAL_POOL: PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)}
    model = _with_tokenizer(policy.model)
    actor = _resolve_actor(policy.actor, pools)
    longest = config.data.max_prompt_length + config.data.max_response_length
    ref = _resolve_ref(policy.ref, actor, longest)
    rollout = replace(policy.rollout, resource_pool=policy.rollout.resource_pool or actor.resource_pool)
    rollout = _with_engines(rollout, pool_devices(pools, rollout.resource_pool))
    critic = config.critic
    folder = trainer.default_local_dir or _run_folder(trainer)
    return replace(
        config,
        resource_pools=pools,
        actor_rollout_ref=replace(policy, model=model, actor=actor, ref=ref, rollout=rollout),
        critic=None if critic is None else _resolve_critic(critic, actor, model.path),
        trainer=replace(
            trainer,
            default_local_dir=folder,
            rollout_data_dir=trainer.rollout_data_dir or f"{folder}/rollouts",
        ),
    )


def _resolve_actor(actor: ActorConfig, pools: dict[str, PoolConfig]) -> ActorConfig:
    pool = actor.resource_pool
    if pool is None:
        pool = GLOBAL_POOL if GLOBAL_POOL in pools else next(iter(pools)) if len(pools) == 1 else None
    return replace(
        actor,
        resource_pool=pool,
        megatron=_with_sequence_parallel(actor.megatron),
        clip_ratio_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
    )


def _resolve_ref(ref: RefConfig, actor: ActorConfig, longest: int) -> RefConfig:
    tokens = ref.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    return replace(
        ref,
        log_prob_max_token_len_per_gpu=tokens or (actor.ppo_micro_batch_size_per_gpu or 1) * longest,
        megatron=actor.megatron if ref.megatron is None else _with_sequence_parallel(ref.megatron),
        resource_pool=ref.resource_pool or actor.resource_pool,
    )


def _resolve_critic(critic: CriticConfig, actor: ActorConfig, actor_model: str) -> CriticConfig:
    tokens, trajectories = critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu
    if tokens is None and trajectories is None:
        tokens, trajectories = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    return replace(
        critic,
        model=replace(critic.model, path=critic.model.path or actor_model),
        megatron=actor.megatron if critic.megatron is None else _with_sequence_parallel(critic.megatron),
        ppo_mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        ppo_max_token_len_per_gpu=tokens,
        ppo_micro_batch_size_per_gpu=trajectories,
        ppo_epochs=critic.ppo_epochs or actor.ppo_epochs,
        resource_pool=critic.resource_pool or actor.resource_pool,
    )


def _with_tokenizer(model: ModelPathConfig) -> ModelPathConfig:
    return replace(model, tokenizer_path=model.tokenizer_path or model.path)


def _with_sequence_parallel(megatron: MegatronConfig) -> MegatronConfig:
    if megatron.sequence_parallel is not None:
        return megatron
    return replace(megatron, sequence_parallel=megatron.tensor_model_parallel_size > 1)


def _with_engines(rollout: RolloutConfig, devices: int | None) -> RolloutConfig:
    # A tensor parallel size of zero or over the devices is refused by `check_config`, with its key.
    if rollout.num_engines is not None or devices is None or rollout.tensor_model_parallel_size < 1:
        return rollout
    return replace(rollout, num_engines=max(1, devices // rollout.tensor_model_parallel_size))


def _run_folder(trainer: TrainerConfig | SFTTrainerConfig) -> str:
    return f"outputs/{trainer.project_name}/{trainer.experiment_name}"
