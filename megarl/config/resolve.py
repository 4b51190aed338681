"""Fills in what a configuration leaves to be derived, so that no later code derives it again."""

from dataclasses import replace
from typing import TypeVar, cast

from megarl.config.schema.algorithm import COVARIANCE_LOSSES, SEQUENCE_LOSSES
from megarl.config.schema.commands import (
    POLICY,
    STREAMED,
    ActorConfig,
    CriticConfig,
    EvalConfig,
    MegatronConfig,
    ModelPathConfig,
    OptimConfig,
    PoolConfig,
    RefConfig,
    RolloutConfig,
    TrainConfig,
    TrainerConfig,
)
from megarl.config.schema.rewards import RewardModelConfig
from megarl.config.schema.supervised import DPOConfig, RMConfig, TuningConfig, TuningTrainerConfig

GLOBAL_POOL = "global"
# Of a micro-batch whose size is not given: so many times what it must hold, up to so many tokens.
CHOSEN_MULTIPLE, CHOSEN_TOKENS = 4, 16384

C = TypeVar("C", bound=TrainConfig | TuningConfig | EvalConfig)
M = TypeVar("M", bound=ModelPathConfig)


def resolve(config: C) -> C:
    """The configuration with its derived nulls filled in; one that is filled in comes back equal.

    Filled: tokenizer_path, sequence_parallel, clip ratios, loss aggregation, sizes of micro-batches (`chosen_tokens`), the settings of
    critic, reference and reward model that are the actor's, gen_batch_size, resource pools and the pool of each role, num_engines, nodes_per_engine, run folder and rollout folder,
    max_staleness of the modes that have one.
    Where two keys say one thing (grad_clip and optim.clip_grad, clip_range and clip ratios, data.tokenizer and tokenizer_path,
    enable_gradient_checkpointing and recompute_granularity) the value moves to the second; a size of micro-batches
    that use_dynamic_bsz overrules becomes null.
    Null remain what only a later stage knows: dtypes and what is offloaded (the devices), lr_decay_steps and
    total_training_steps (the data), max_total_tokens (the engine), val_batch_size and max_samples (null means all),
    ray_address.
    Expects what `check_config` accepts, but never fails where it would not.
    """
    if isinstance(config, TrainConfig):
        return cast(C, _resolve_train(config))
    if isinstance(config, TuningConfig):
        trainer = config.trainer
        return replace(
            config,
            model=_with_tokenizer(config.model),
            max_token_len_per_gpu=config.max_token_len_per_gpu or chosen_tokens(least_tokens(config)),
            megatron=_with_recompute(
                _with_sequence_parallel(config.megatron), config.model.enable_gradient_checkpointing
            ),
            trainer=replace(trainer, default_local_dir=trainer.default_local_dir or _run_folder(trainer)),
        )
    assert isinstance(config, EvalConfig), type(config)
    pool = PoolConfig(nnodes=config.trainer.nnodes, n_gpus_per_node=config.trainer.n_gpus_per_node)
    return replace(
        config,
        model=_with_tokenizer(config.model),
        rollout=_with_engines(
            replace(config.rollout, resource_pool=config.rollout.resource_pool or GLOBAL_POOL), pool
        ),
    )


def least_tokens(config: TrainConfig | TuningConfig) -> int:
    """What a micro-batch must hold: the longest sequence that is trained on, or two where texts are compared with each other."""
    if isinstance(config, TuningConfig):
        return config.data.max_length * (2 if isinstance(config, RMConfig | DPOConfig) else 1)
    data = config.data
    longest = data.max_prompt_length + data.max_response_length
    return longest if data.ptx is None else max(longest, data.ptx.max_length)


def chosen_tokens(least: int) -> int:
    """Of a micro-batch whose size is not given; `least`: those that it must hold."""
    return max(least, min(CHOSEN_MULTIPLE * least, CHOSEN_TOKENS))


def lacks_size(config: TrainConfig | TuningConfig) -> bool:
    """Whether a configuration leaves the size of a micro-batch, in what use_dynamic_bsz counts, to be chosen."""
    if isinstance(config, TuningConfig):
        return config.max_token_len_per_gpu is None
    actor = config.actor_rollout_ref.actor
    return _one_size(
        actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    ) == (None, None)


MegatronSection = ActorConfig | RefConfig | CriticConfig | RewardModelConfig


def megatron_sections(config: TrainConfig) -> dict[str, MegatronSection]:
    """The sections of a run's Megatron models by their dotted key: actor, reference (where the run uses one), critic, reward model."""
    policy = config.actor_rollout_ref
    sections: dict[str, MegatronSection] = {f"{POLICY}.actor": policy.actor}
    if needs_reference(config):
        sections[f"{POLICY}.ref"] = policy.ref
    if config.critic is not None:
        sections["critic"] = config.critic
    if config.reward_model.enable:
        sections["reward_model"] = config.reward_model
    return sections


def pool_devices(pools: dict[str, PoolConfig] | None, name: str | None) -> int | None:
    """Devices of the pool `name`; None if there is no such pool."""
    pool = (pools or {}).get(name or "")
    return None if pool is None else pool.nnodes * pool.n_gpus_per_node


def needs_reference(config: TrainConfig) -> bool:
    """Whether the run uses the reference policy's log-probs."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def needs_old_log_probs(config: TrainConfig) -> bool:
    """Whether the actor computes the log-probs before the update; else the engine's stand for them, or, where a step is one update,
    those that the update makes anyway."""
    return not config.algorithm.rollout_correction.bypass_mode and not is_single_update(config)


def is_single_update(config: TrainConfig) -> bool:
    """Whether a step is one update of the policy, of which nothing else needs the log-probs: the policy that is updated is the one
    from before the step, so its old log-probs are those of its own forward pass, bit for bit."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.rollout_correction
    single = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    before = (
        algorithm.use_kl_in_reward,
        correction.bypass_mode,
        correction.rollout_is is not None,
        correction.rollout_rs is not None,
        actor.policy_loss.loss_mode in COVARIANCE_LOSSES,
    )
    return single and not any(before)


def full_kl_in_reward(config: TrainConfig) -> bool:
    """Whether rewards have the exact KL to the reference, which then comes with the policy's log-probs."""
    return config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"


def full_kl_in_loss(config: TrainConfig) -> bool:
    """Whether the actor's loss has the exact KL to the reference, whose weights updates then need."""
    actor = config.actor_rollout_ref.actor
    return actor.use_kl_loss and actor.kl_loss_type == "full"


def needs_ref_log_probs(config: TrainConfig) -> bool:
    """Whether the reference is run by itself before the updates, for its log-probs of the responses."""
    in_loss = config.actor_rollout_ref.actor.use_kl_loss and not full_kl_in_loss(config)
    return not full_kl_in_reward(config) and (config.algorithm.use_kl_in_reward or in_loss)


def evaluates(config: TrainConfig) -> bool:
    """Whether a step has log-probs, of policy or reference, or values computed before its updates."""
    return not is_single_update(config) or needs_ref_log_probs(config) or config.critic is not None


def reference_in_actor(config: TrainConfig) -> bool:
    """Whether the reference (of a resolved configuration) lives in the actor's processes: same layout, same pool."""
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    return ref.megatron == actor.megatron and ref.resource_pool == actor.resource_pool


def needs_rules(config: TrainConfig | EvalConfig) -> bool:
    """Whether scores are made by rules or the user's reward function, alone or beside a reward model's."""
    return not (
        isinstance(config, TrainConfig) and config.reward_model.enable and not config.reward_model.rule_weight
    )


def _resolve_train(config: TrainConfig) -> TrainConfig:
    trainer, policy = config.trainer, config.actor_rollout_ref
    pools = config.resource_pools
    if pools is None:
        pools = {GLOBAL_POOL: PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)}
    model = replace(policy.model, tokenizer_path=policy.model.tokenizer_path or config.data.tokenizer)
    model = _with_tokenizer(model)
    actor = _with_aggregation(
        _resolve_actor(policy.actor, pools, model.enable_gradient_checkpointing, least_tokens(config)),
        config.data.max_response_length,
    )
    longest = config.data.max_prompt_length + config.data.max_response_length
    ref = _resolve_ref(policy.ref, actor, longest)
    rollout = replace(policy.rollout, resource_pool=policy.rollout.resource_pool or actor.resource_pool)
    rollout = _with_engines(rollout, pools.get(rollout.resource_pool or ""))
    critic = config.critic
    folder = trainer.default_local_dir or _run_folder(trainer)
    return replace(
        config,
        data=replace(
            config.data,
            gen_batch_size=config.data.gen_batch_size or config.data.train_batch_size,
            tokenizer=None,
        ),
        resource_pools=pools,
        actor_rollout_ref=replace(policy, model=model, actor=actor, ref=ref, rollout=rollout),
        critic=None if critic is None else _resolve_critic(critic, actor, model.path, longest),
        reward_model=_resolve_reward_model(config.reward_model, actor, longest),
        trainer=replace(
            trainer,
            default_local_dir=folder,
            rollout_data_dir=trainer.rollout_data_dir or f"{folder}/rollouts",
            max_staleness=1
            if trainer.max_staleness is None and trainer.mode in STREAMED
            else trainer.max_staleness,
        ),
    )


def _resolve_actor(
    actor: ActorConfig, pools: dict[str, PoolConfig], checkpointing: bool | None, longest: int
) -> ActorConfig:
    pool = actor.resource_pool
    if pool is None:
        pool = GLOBAL_POOL if GLOBAL_POOL in pools else next(iter(pools)) if len(pools) == 1 else None
    low, high = actor.clip_range or (actor.clip_ratio_low, actor.clip_ratio_high)
    tokens, trajectories = _some_size(
        actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu, longest
    )
    return replace(
        actor,
        resource_pool=pool,
        optim=_with_clip(actor.optim, actor.grad_clip),
        grad_clip=None,
        megatron=_with_recompute(_with_sequence_parallel(actor.megatron), checkpointing),
        clip_range=None,
        clip_ratio_low=actor.clip_ratio if low is None else low,
        clip_ratio_high=actor.clip_ratio if high is None else high,
        ppo_max_token_len_per_gpu=tokens,
        ppo_micro_batch_size_per_gpu=trajectories,
    )


def _one_size(
    dynamic: bool | None, tokens: int | None, trajectories: int | None
) -> tuple[int | None, int | None]:
    """Sizes of a micro-batch in tokens and in trajectories, without the one that `dynamic` overrules."""
    if dynamic is None:
        return tokens, trajectories
    return (tokens, None) if dynamic else (None, trajectories)


def _some_size(
    dynamic: bool | None, tokens: int | None, trajectories: int | None, longest: int
) -> tuple[int | None, int | None]:
    """The same, chosen where neither is given."""
    tokens, trajectories = _one_size(dynamic, tokens, trajectories)
    if tokens is not None or trajectories is not None:
        return tokens, trajectories
    chosen = chosen_tokens(longest)
    return (None, max(1, chosen // max(1, longest))) if dynamic is False else (chosen, None)


def _with_clip(optim: OptimConfig, grad_clip: float | None) -> OptimConfig:
    return optim if grad_clip is None else replace(optim, clip_grad=grad_clip)


def _with_aggregation(actor: ActorConfig, max_response_length: int) -> ActorConfig:
    mode = actor.loss_agg_mode
    if mode is None:
        mode = "seq-mean-token-mean" if actor.policy_loss.loss_mode in SEQUENCE_LOSSES else "token-mean"
    scale = actor.loss_scale_factor
    if mode == "seq-mean-token-sum-norm" and scale is None:
        scale = float(max_response_length)
    return replace(actor, loss_agg_mode=mode, loss_scale_factor=scale)


def _resolve_ref(ref: RefConfig, actor: ActorConfig, longest: int) -> RefConfig:
    dynamic = actor.use_dynamic_bsz if ref.log_prob_use_dynamic_bsz is None else ref.log_prob_use_dynamic_bsz
    tokens, trajectories = ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu
    if dynamic is False:
        trajectories = trajectories or actor.ppo_micro_batch_size_per_gpu
    elif dynamic or trajectories is None:
        tokens = tokens or actor.ppo_max_token_len_per_gpu
        tokens = tokens or (actor.ppo_micro_batch_size_per_gpu or 1) * longest
    tokens, trajectories = _some_size(dynamic, tokens, trajectories, longest)
    return replace(
        ref,
        log_prob_use_dynamic_bsz=dynamic,
        log_prob_max_token_len_per_gpu=tokens,
        log_prob_micro_batch_size_per_gpu=trajectories,
        megatron=actor.megatron if ref.megatron is None else _with_sequence_parallel(ref.megatron),
        resource_pool=ref.resource_pool or actor.resource_pool,
    )


def _resolve_critic(critic: CriticConfig, actor: ActorConfig, actor_model: str, longest: int) -> CriticConfig:
    dynamic = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    tokens, trajectories = _one_size(
        dynamic, critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu
    )
    if tokens is None and trajectories is None:
        sizes = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
        tokens, trajectories = _some_size(dynamic, *sizes, longest)
    megatron, checkpointing = critic.megatron or actor.megatron, critic.model.enable_gradient_checkpointing
    if critic.megatron is None and checkpointing is not None:
        megatron = replace(megatron, recompute_granularity=None)  # the critic's own, not the actor's
    return replace(
        critic,
        model=replace(critic.model, path=critic.model.path or actor_model),
        megatron=_with_recompute(_with_sequence_parallel(megatron), checkpointing),
        use_dynamic_bsz=dynamic,
        optim=_with_clip(critic.optim, critic.grad_clip),
        grad_clip=None,
        ppo_mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        ppo_max_token_len_per_gpu=tokens,
        ppo_micro_batch_size_per_gpu=trajectories,
        ppo_epochs=critic.ppo_epochs or actor.ppo_epochs,
        resource_pool=critic.resource_pool or actor.resource_pool,
    )


def _resolve_reward_model(reward: RewardModelConfig, actor: ActorConfig, longest: int) -> RewardModelConfig:
    if not reward.enable:
        return reward
    tokens, trajectories = reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu
    if tokens is None and trajectories is None:
        tokens, trajectories = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
        if (
            tokens is not None and trajectories is None
        ):  # the actor's holds its own longest sequence, perhaps not the reward model's
            tokens = max(tokens, reward.max_length or longest)
    return replace(
        reward,
        max_length=reward.max_length or longest,
        megatron=actor.megatron if reward.megatron is None else _with_sequence_parallel(reward.megatron),
        max_token_len_per_gpu=tokens,
        micro_batch_size_per_gpu=trajectories,
        resource_pool=reward.resource_pool or actor.resource_pool,
    )


def _with_tokenizer(model: M) -> M:
    return replace(model, tokenizer_path=model.tokenizer_path or model.path)


def _with_sequence_parallel(megatron: MegatronConfig) -> MegatronConfig:
    if megatron.sequence_parallel is not None:
        return megatron
    return replace(megatron, sequence_parallel=megatron.tensor_model_parallel_size > 1)


def _with_recompute(megatron: MegatronConfig, checkpointing: bool | None) -> MegatronConfig:
    """`checkpointing`: the model's enable_gradient_checkpointing. A granularity that was given stays, also one that contradicts it, which
    `check_config` refuses."""
    if not checkpointing or megatron.recompute_granularity is not None:
        return megatron
    return replace(megatron, recompute_granularity="full")


def _with_engines(rollout: RolloutConfig, pool: PoolConfig | None) -> RolloutConfig:
    # A tensor parallel size of zero or over the devices is refused by `check_config`, with its key.
    tp = rollout.tensor_model_parallel_size
    if pool is None or min(tp, pool.n_gpus_per_node) < 1:
        return rollout
    return replace(
        rollout,
        nodes_per_engine=rollout.nodes_per_engine or -(-tp // pool.n_gpus_per_node),
        num_engines=rollout.num_engines or max(1, pool.nnodes * pool.n_gpus_per_node // tp),
    )


def _run_folder(trainer: TrainerConfig | TuningTrainerConfig) -> str:
    return f"outputs/{trainer.project_name}/{trainer.experiment_name}"
