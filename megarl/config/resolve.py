"""Fills in the values that a configuration leaves to be derived, so that no later code derives them again."""

from dataclasses import dataclass, fields, replace
from typing import TypeVar, cast

from megarl.config.schema.algorithm import COVARIANCE_LOSSES, OWN_AGGREGATION
from megarl.config.schema.commands import (
    CONCURRENT,
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
from megarl.config.schema.rollout import TeacherEngineConfig
from megarl.config.schema.supervised import TuningConfig, TuningTrainerConfig, learns_rankings

GLOBAL_POOL, EVAL_POOL = "global", "eval"
# A micro-batch whose size is not given holds CHOSEN_MULTIPLE times the tokens that it must hold, up to CHOSEN_TOKENS.
CHOSEN_MULTIPLE, CHOSEN_TOKENS = 4, 16384

# Of a micro-batch, at most: tokens, trajectories.
Size = tuple[int | None, int | None]
C = TypeVar("C", bound=TrainConfig | TuningConfig | EvalConfig)
M = TypeVar("M", bound=ModelPathConfig)
R = TypeVar("R", bound=RefConfig)
E = TypeVar("E", RolloutConfig, TeacherEngineConfig)


def resolve(config: C) -> C:
    """The configuration with its derived nulls filled in; a resolved one comes back equal.

    Filled: tokenizer_path, sequence_parallel, clip ratios, loss aggregation, sizes of micro-batches (`chosen_tokens`), gen_batch_size,
    resource pools, num_engines, nodes_per_engine, run folder and rollout folder, max_staleness of the modes that have one; and the settings
    of critic, reference, reward model and engines that are null because they are the actor's.
    Where two keys say one thing (grad_clip and optim.clip_grad, clip_range and clip ratios, data.tokenizer and tokenizer_path,
    enable_gradient_checkpointing and recompute_granularity) the value moves to the second; a size of micro-batches
    that use_dynamic_bsz overrules becomes null.
    Null remain dtypes and offloading (the devices decide), lr_decay_steps and total_training_steps (the data), max_total_tokens (the
    engine), val_batch_size and max_samples (null means all), ray_address.
    A configuration that `check_config` would refuse is resolved, too, so that all its problems can be told.
    """
    if isinstance(config, TrainConfig):
        return cast(C, _resolve_train(config))
    if isinstance(config, TuningConfig):
        trainer = config.trainer
        return replace(
            config,
            model=_with_tokenizer(config.model),
            max_token_len_per_gpu=config.max_token_len_per_gpu or chosen_tokens(least_tokens(config)),
            megatron=_layout(config.megatron, config.model.enable_gradient_checkpointing),
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
    """Tokens that a micro-batch must hold: the longest sequence that is trained on, or two where texts are compared with each other."""
    if isinstance(config, TuningConfig):
        return config.data.max_length * (2 if learns_rankings(config) else 1)
    longest = _longest(config)
    return longest if config.data.ptx is None else max(longest, config.data.ptx.max_length)


def _longest(config: TrainConfig) -> int:
    """Tokens of the longest trajectory."""
    return config.data.max_prompt_length + config.data.max_response_length


def chosen_tokens(least: int) -> int:
    """Tokens of a micro-batch whose size is not given, where it must hold `least` tokens."""
    return max(least, min(CHOSEN_MULTIPLE * least, CHOSEN_TOKENS))


def lacks_size(config: TrainConfig | TuningConfig) -> bool:
    """Whether a configuration leaves the size of a micro-batch, in what use_dynamic_bsz counts, to be chosen."""
    if isinstance(config, TuningConfig):
        return config.max_token_len_per_gpu is None
    actor = config.actor_rollout_ref.actor
    return _counted(actor.use_dynamic_bsz, micro_batch_size(actor)) == (None, None)


MegatronSection = ActorConfig | RefConfig | CriticConfig | RewardModelConfig


def megatron_sections(config: TrainConfig) -> dict[str, MegatronSection]:
    """The sections of a run's Megatron models by their dotted key: actor, reference or teachers (where the run uses any), critic, reward model."""
    policy = config.actor_rollout_ref
    sections: dict[str, MegatronSection] = {f"{POLICY}.actor": policy.actor}
    sections |= {reference_key(role): section for role, section in references(config).items()}
    if config.critic is not None:
        sections["critic"] = config.critic
    if config.reward_model.enable:
        sections["reward_model"] = config.reward_model
    return sections


def pool_devices(pools: dict[str, PoolConfig] | None, name: str | None) -> int | None:
    """Devices of the pool `name`; None if there is no such pool."""
    pool = (pools or {}).get(name or "")
    return None if pool is None else pool.num_devices


def needs_reference(config: TrainConfig) -> bool:
    """Whether the run uses the reference policy's log-probs."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


# SGLang (0.5.21) computes inputs that are at least this many tokens shorter than its context and its cache.
ENGINE_ROOM = 7
TEACHER = "teacher_"  # begins the role of one of several teachers


def drafted_room(algorithm: str | None, num_draft_tokens: int) -> int:
    """Tokens that SGLang (0.5.21, `compute_num_reserved_tokens`) keeps free in its context for a request's drafts by a model (mtp, eagle3)."""
    return num_draft_tokens + 1 if algorithm in ("mtp", "eagle3") else 0


def served_context(length: int, most: int, drafted: int) -> int:
    """SGLang's limit of tokens for an engine whose prompts and responses have `length` tokens: these, and the tokens that SGLang (0.5.21)
    keeps free, as far as the model's own context reaches.

    SGLang refuses an input that reaches the last tokens of its limit, as an interrupted response may, and ends a response two tokens before it.

    Args:
        most: the model's own context.
        drafted: `drafted_room`.
    """
    return max(length, min(length + ENGINE_ROOM + drafted, most))


def all_references(config: TrainConfig) -> dict[str, RefConfig]:
    """The sections of a run's references by their roles: "ref", or TEACHER and a name for each of several teachers; {}: the run uses none."""
    policy = config.actor_rollout_ref
    if not needs_reference(config):
        return {}
    if policy.teachers is None:
        return {"ref": policy.ref}
    return {f"{TEACHER}{name}": teacher for name, teacher in policy.teachers.items()}


def references(config: TrainConfig) -> dict[str, RefConfig]:
    """The references that are Megatron models, by role."""
    return {role: section for role, section in all_references(config).items() if section.engine is None}


def served_references(config: TrainConfig) -> dict[str, RolloutConfig]:
    """The references that engines serve (of a resolved configuration), by role: their engines, as sections `rollout`."""
    return {
        role: engines_of(section)
        for role, section in all_references(config).items()
        if section.engine is not None
    }


def engines_of(section: RefConfig) -> RolloutConfig:
    """The engines of a reference as a section `rollout`, all of whose other keys have no meaning for them."""
    assert section.engine is not None, section
    own = {member.name: getattr(section.engine, member.name) for member in fields(section.engine)}
    return RolloutConfig(**own, resource_pool=section.resource_pool)


def reference_key(role: str) -> str:
    """The dotted key of the section of a reference's role."""
    return f"{POLICY}.ref" if role == "ref" else f"{POLICY}.teachers.{role.removeprefix(TEACHER)}"


def taught_references(config: TrainConfig) -> dict[str, RefConfig]:
    """The references of a resolved run that are other models than the policy."""
    own = config.actor_rollout_ref.model.path
    return {role: section for role, section in all_references(config).items() if section.model.path != own}


def teacher_of_sources(config: TrainConfig) -> dict[str, str]:
    """The name of the teacher of each value of data.teacher_key; {}: there are not several teachers."""
    teachers = config.actor_rollout_ref.teachers or {}
    return {source: name for name, teacher in teachers.items() for source in teacher.sources or (name,)}


def needs_old_log_probs(config: TrainConfig) -> bool:
    """Whether the actor computes log-probs before the update. Otherwise the engine's take their place, or, where a step is one update,
    the log-probs that the update computes anyway."""
    return not config.algorithm.rollout_correction.bypass_mode and not is_single_update(config)


def is_single_update(config: TrainConfig) -> bool:
    """Whether a step is one update of the policy, and nothing else needs old log-probs: the policy that is updated is then the policy
    before the step, whose log-probs are those of the update's own forward pass, bit for bit."""
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


def top_k_in_loss(config: TrainConfig) -> bool:
    """Whether the actor's loss compares the policy with the reference's most likely tokens."""
    actor = config.actor_rollout_ref.actor
    return actor.use_kl_loss and actor.kl_loss_type == "top_k"


def leaves_tokens_out(rollout: RolloutConfig) -> bool:
    """Whether training rollouts sample from a part of the vocabulary at each token."""
    return rollout.top_p < 1.0 or rollout.top_k != -1 or rollout.min_p > 0.0


def needs_ref_log_probs(config: TrainConfig) -> bool:
    """Whether the reference is run by itself before the updates, for its log-probs of the responses."""
    in_loss = config.actor_rollout_ref.actor.use_kl_loss and not full_kl_in_loss(config)
    return not full_kl_in_reward(config) and (config.algorithm.use_kl_in_reward or in_loss)


def evaluates(config: TrainConfig) -> bool:
    """Whether a step computes log-probs, of policy or reference, or values before its updates."""
    return not is_single_update(config) or needs_ref_log_probs(config) or config.critic is not None


def reference_in_actor(config: TrainConfig) -> bool:
    """Whether the reference (of a resolved configuration) lives in the actor's processes: same layout, same pool."""
    policy = config.actor_rollout_ref
    actor, ref = policy.actor, policy.ref
    shares = ref.megatron == actor.megatron and ref.resource_pool == actor.resource_pool
    return shares and policy.teachers is None and ref.engine is None


def has_teacher(config: TrainConfig) -> bool:
    """Whether the reference (of a resolved configuration) is another model than the policy."""
    return config.actor_rollout_ref.ref.model.path != config.actor_rollout_ref.model.path


def reference_is_actor(config: TrainConfig) -> bool:
    """Whether the reference is the actor itself, its adapters switched off."""
    adapted = config.actor_rollout_ref.model.lora.rank > 0
    return adapted and reference_in_actor(config) and not has_teacher(config)


def plays_turns(rollout: RolloutConfig) -> bool:
    """Whether a trajectory may have several turns, with an environment or of an agent."""
    return rollout.multi_turn.enable or rollout.gateway.enable


def validates_concurrently(config: TrainConfig) -> bool:
    """Whether validations have engines of their own, and training goes on while they last."""
    return config.trainer.eval_mode == CONCURRENT


def eval_rollout(config: TrainConfig) -> RolloutConfig:
    """The section `rollout` of concurrent validation's engines (of a resolved configuration): the rollouts' own, but on a pool where
    nothing else needs memory, and with as many engines as it holds."""
    assert config.resource_pools is not None and config.trainer.eval_resource_pool is not None, "resolved"
    pool = config.trainer.eval_resource_pool
    alone = replace(
        config.actor_rollout_ref.rollout,
        resource_pool=pool,
        num_engines=None,
        nodes_per_engine=None,
        free_cache_engine=False,
    )
    return _with_engines(alone, config.resource_pools.get(pool))


def needs_rules(config: TrainConfig | EvalConfig) -> bool:
    """Whether scores are made by rules or the user's reward function, alone or together with a reward model's."""
    return not (
        isinstance(config, TrainConfig) and config.reward_model.enable and not config.reward_model.rule_weight
    )


def _resolve_train(config: TrainConfig) -> TrainConfig:
    trainer, policy, critic, longest = (
        config.trainer,
        config.actor_rollout_ref,
        config.critic,
        _longest(config),
    )
    pools = config.resource_pools
    if pools is None:
        pools = {GLOBAL_POOL: PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)}
    model = replace(policy.model, tokenizer_path=policy.model.tokenizer_path or config.data.tokenizer)
    # The other roles inherit from the actor, so it comes first.
    actor = _resolve_actor(config, pools)
    rollout = replace(policy.rollout, resource_pool=policy.rollout.resource_pool or actor.resource_pool)
    folder = trainer.default_local_dir or _run_folder(trainer)
    staleness = 1 if trainer.mode in STREAMED else None
    concurrent, pool_of_eval = validates_concurrently(config), trainer.eval_resource_pool
    return replace(
        config,
        data=replace(
            config.data,
            gen_batch_size=config.data.gen_batch_size or config.data.train_batch_size,
            tokenizer=None,
            return_raw_input_ids=config.data.return_raw_input_ids or policy.rollout.gateway.enable,
        ),
        resource_pools=pools,
        actor_rollout_ref=replace(
            policy,
            model=_with_tokenizer(model),
            actor=actor,
            ref=_resolve_ref(policy.ref, actor, model.path, longest, pools),
            teachers=None
            if policy.teachers is None
            else {
                name: _resolve_ref(teacher, actor, model.path, longest, pools)
                for name, teacher in policy.teachers.items()
            },
            rollout=_with_engines(rollout, pools.get(rollout.resource_pool or "")),
        ),
        critic=None if critic is None else _resolve_critic(critic, actor, model.path, longest),
        reward_model=_resolve_reward_model(config.reward_model, actor, longest),
        trainer=replace(
            trainer,
            default_local_dir=folder,
            rollout_data_dir=trainer.rollout_data_dir or f"{folder}/rollouts",
            max_staleness=staleness if trainer.max_staleness is None else trainer.max_staleness,
            eval_resource_pool=EVAL_POOL if pool_of_eval is None and concurrent else pool_of_eval,
        ),
    )


def _resolve_actor(config: TrainConfig, pools: dict[str, PoolConfig]) -> ActorConfig:
    policy = config.actor_rollout_ref
    actor, pool = policy.actor, policy.actor.resource_pool
    if pool is None:
        pool = GLOBAL_POOL if GLOBAL_POOL in pools else next(iter(pools)) if len(pools) == 1 else None
    low, high = actor.clip_range or (actor.clip_ratio_low, actor.clip_ratio_high)
    mode, scale = actor.loss_agg_mode, actor.loss_scale_factor
    if mode is None:
        mode = OWN_AGGREGATION.get(actor.policy_loss.loss_mode, "token-mean")
    if mode == "seq-mean-token-sum-norm" and scale is None:
        scale = float(config.data.max_response_length)
    tokens, trajectories = _chosen(actor.use_dynamic_bsz, micro_batch_size(actor), least_tokens(config))
    return replace(
        actor,
        resource_pool=pool,
        optim=_with_clip(actor.optim, actor.grad_clip),
        grad_clip=None,
        megatron=_layout(actor.megatron, policy.model.enable_gradient_checkpointing),
        clip_range=None,
        clip_ratio_low=actor.clip_ratio if low is None else low,
        clip_ratio_high=actor.clip_ratio if high is None else high,
        loss_agg_mode=mode,
        loss_scale_factor=scale,
        ppo_max_token_len_per_gpu=tokens,
        ppo_micro_batch_size_per_gpu=trajectories,
    )


def _resolve_ref(
    ref: R, actor: ActorConfig, actor_model: str, longest: int, pools: dict[str, PoolConfig]
) -> R:
    named = replace(ref.model, path=ref.model.path or actor_model)
    if ref.engine is not None:  # Megatron's keys stay null, and the pool is its own
        return replace(ref, model=named, engine=_with_engines(ref.engine, pools.get(ref.resource_pool or "")))
    dynamic = actor.use_dynamic_bsz if ref.log_prob_use_dynamic_bsz is None else ref.log_prob_use_dynamic_bsz
    tokens, trajectories = ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu
    if dynamic is False:
        trajectories = trajectories or actor.ppo_micro_batch_size_per_gpu
    elif dynamic or trajectories is None:
        tokens = tokens or actor.ppo_max_token_len_per_gpu
        tokens = tokens or (actor.ppo_micro_batch_size_per_gpu or 1) * longest
    tokens, trajectories = _chosen(dynamic, (tokens, trajectories), longest)
    return replace(
        ref,
        model=named,
        log_prob_use_dynamic_bsz=dynamic,
        log_prob_max_token_len_per_gpu=tokens,
        log_prob_micro_batch_size_per_gpu=trajectories,
        megatron=_layout(ref.megatron or actor.megatron),
        resource_pool=ref.resource_pool or actor.resource_pool,
    )


def _resolve_critic(critic: CriticConfig, actor: ActorConfig, actor_model: str, longest: int) -> CriticConfig:
    dynamic = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    size = _counted(dynamic, (critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu))
    if size == (None, None):
        size = _chosen(dynamic, micro_batch_size(actor), longest)
    megatron, checkpointing = critic.megatron or actor.megatron, critic.model.enable_gradient_checkpointing
    if critic.megatron is None and checkpointing is not None:
        # The critic's own, not the actor's.
        megatron = replace(megatron, recompute_granularity=None, recompute_modules=None)
    return replace(
        critic,
        model=replace(critic.model, path=critic.model.path or actor_model),
        megatron=_layout(megatron, checkpointing),
        use_dynamic_bsz=dynamic,
        optim=_with_clip(critic.optim, critic.grad_clip),
        grad_clip=None,
        ppo_mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        ppo_max_token_len_per_gpu=size[0],
        ppo_micro_batch_size_per_gpu=size[1],
        ppo_epochs=critic.ppo_epochs or actor.ppo_epochs,
        resource_pool=critic.resource_pool or actor.resource_pool,
    )


def _resolve_reward_model(reward: RewardModelConfig, actor: ActorConfig, longest: int) -> RewardModelConfig:
    if not reward.enable:
        return reward
    tokens, trajectories = reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu
    if tokens is None and trajectories is None:
        tokens, trajectories = micro_batch_size(actor)
        if tokens is not None and trajectories is None:
            # The actor's size holds its own longest sequence, perhaps not the reward model's.
            tokens = max(tokens, reward.max_length or longest)
    return replace(
        reward,
        max_length=reward.max_length or longest,
        megatron=_layout(reward.megatron or actor.megatron),
        max_token_len_per_gpu=tokens,
        micro_batch_size_per_gpu=trajectories,
        resource_pool=reward.resource_pool or actor.resource_pool,
    )


def micro_batch_size(role: ActorConfig | CriticConfig) -> Size:
    return role.ppo_max_token_len_per_gpu, role.ppo_micro_batch_size_per_gpu


def _counted(dynamic: bool | None, size: Size) -> Size:
    """A size of micro-batches without the number that `dynamic` (use_dynamic_bsz) overrules."""
    tokens, trajectories = size
    return (tokens if dynamic is not False else None), (None if dynamic else trajectories)


def _chosen(dynamic: bool | None, size: Size, longest: int) -> Size:
    """`_counted`, or a chosen size where neither number is given."""
    size = _counted(dynamic, size)
    if size != (None, None):
        return size
    tokens = chosen_tokens(longest)
    return (None, max(1, tokens // max(1, longest))) if dynamic is False else (tokens, None)


def _with_clip(optim: OptimConfig, grad_clip: float | None) -> OptimConfig:
    return optim if grad_clip is None else replace(optim, clip_grad=grad_clip)


def _with_tokenizer(model: M) -> M:
    return replace(model, tokenizer_path=model.tokenizer_path or model.path)


def _layout(megatron: MegatronConfig, checkpointing: bool | None = None) -> MegatronConfig:
    """`checkpointing`: the model's enable_gradient_checkpointing. A granularity that was given stays, even one that contradicts it, which
    `check_config` refuses."""
    parallel, granularity = megatron.sequence_parallel, megatron.recompute_granularity
    return replace(
        megatron,
        sequence_parallel=megatron.tensor_model_parallel_size > 1 if parallel is None else parallel,
        recompute_granularity="full" if checkpointing and granularity is None else granularity,
    )


@dataclass(frozen=True)
class Overlaps:
    """What happens while a pass runs: the reduction of gradients, the gathering of updated weights."""

    gradients: bool
    parameters: bool


def overlaps(megatron: MegatronConfig, replicas: int, *, on_gpus: bool, adapted: bool) -> Overlaps:
    """`overlap_grad_reduce` and `overlap_param_gather`, with null filled in.

    Args:
        replicas: ranks that share the states of a dense weight, over data and context parallelism.
        adapted: whether adapters are trained in place of the weights: gathering these takes no time worth hiding.
    """
    fast = on_gpus and replicas > 1 and megatron.use_distributed_optimizer
    gradients = fast if megatron.overlap_grad_reduce is None else megatron.overlap_grad_reduce
    gathers = fast and gradients and not adapted
    return Overlaps(
        gradients, gathers if megatron.overlap_param_gather is None else megatron.overlap_param_gather
    )


def _with_engines(rollout: E, pool: PoolConfig | None) -> E:
    # A tensor parallel size of zero or over the devices is refused by `check_config`, with its key.
    tp = rollout.tensor_model_parallel_size
    if pool is None or min(tp, pool.n_gpus_per_node) < 1:
        return rollout
    return replace(
        rollout,
        nodes_per_engine=rollout.nodes_per_engine or -(-tp // pool.n_gpus_per_node),
        num_engines=rollout.num_engines or max(1, pool.num_devices // tp),
    )


def _run_folder(trainer: TrainerConfig | TuningTrainerConfig) -> str:
    return f"outputs/{trainer.project_name}/{trainer.experiment_name}"
