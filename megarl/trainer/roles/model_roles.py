"""The models of a run: their specs, their worker groups, how each is divided over ranks and its batches into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.cluster import ResourcePool, WorkerGroup, group_kind
from megarl.config import (
    ActorConfig,
    CriticConfig,
    LoraConfig,
    MegatronConfig,
    OptimConfig,
    RefConfig,
    TrainConfig,
    TuningConfig,
    needs_old_log_probs,
    needs_reference,
    reference_in_actor,
    reference_is_actor,
    references,
    trajectories_per_mini_batch,
    updates_of_run,
)
from megarl.costs.flops import model_flops
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.trainer.run.cluster_setup import MODEL_PROCESSES
from megarl.trainer.run.run import Run
from megarl.trainer.workers.dispatch import NAMED, MicroBatching, ModelSpec, indexer_coef, prediction_training


def actor_arguments(config: TrainConfig, num_steps: int | None) -> dict[str, Any]:
    """The keyword arguments of the actor's ranks; with `critic` where the critic shares the actor's model.

    Args:
        num_steps: of the run; None: no model is trained, and there is neither an optimizer nor a reference.
    """
    policy, trains = config.actor_rollout_ref, num_steps is not None
    shared_reference = trains and needs_reference(config) and reference_in_actor(config)
    spec = _spec(
        config,
        policy.model.path,
        "lm",
        policy.actor.megatron,
        optim=policy.actor.optim if trains else None,
        num_updates=updates_of_run(config, policy.actor, num_steps) if trains else 0,
        # The ranks' working directory need not be this one.
        plugins=tuple(str(Path(file).expanduser().resolve()) for file in config.plugins),
        lora=policy.model.lora,
        share_prompts=_share_prompts(config),
        router_replay=_router_replay(config),
        mtp=prediction_training(policy.model) if trains else None,
        indexer_coef=indexer_coef(policy.model) if trains else None,
        tokenizer=policy.model.tokenizer_path,
    )
    arguments: dict[str, Any] = {
        "spec": spec,
        "temperature": policy.rollout.temperature,
        "reference_path": policy.ref.model.path
        if shared_reference and not reference_is_actor(config)
        else None,
    }
    if trains and config.critic is not None and config.critic.model.share_base:
        arguments["critic"] = critic_spec(config, num_steps)
    return arguments


def critic_spec(config: TrainConfig, num_steps: int) -> ModelSpec:
    critic = config.critic
    assert critic is not None
    return _spec(
        config,
        critic.model.path,
        "value",
        critic.megatron,
        optim=critic.optim,
        num_updates=updates_of_run(config, critic, num_steps),
        lora=critic.model.lora,
        share_prompts=_share_prompts(config),
    )


def reference_spec(config: TrainConfig, role: str = "ref") -> ModelSpec:
    """The spec of a reference (one of `references`) with processes of its own. It has no adapters, but, unless it is a teacher, its weights
    are stored as the actor's are (`lora`)."""
    policy, ref, share = config.actor_rollout_ref, references(config)[role], _share_prompts(config)
    lora = LoraConfig() if ref.model.path != policy.model.path else policy.model.lora
    return _spec(config, ref.model.path, "lm", ref.megatron, lora=lora, share_prompts=share)


def supervised_spec(config: TuningConfig, head: str, num_steps: int) -> ModelSpec:
    """The spec of the model of supervised training."""
    model = config.model
    return ModelSpec(
        path=model.path,
        head=head,
        megatron=config.megatron,
        optim=config.optim,
        num_updates=num_steps,
        timeout=config.trainer.collective_timeout,
        lora=model.lora,
        mtp=prediction_training(model),
        indexer_coef=indexer_coef(model),
        tokenizer=model.tokenizer_path,
    )


def reward_model_spec(config: TrainConfig) -> ModelSpec:
    reward = config.reward_model
    return _spec(config, reward.model.path, "value", reward.megatron)


def _spec(
    config: TrainConfig,
    path: str,
    head: str,
    megatron: MegatronConfig,
    optim: OptimConfig | None = None,
    num_updates: int = 0,
    **more: Any,
) -> ModelSpec:
    return ModelSpec(path, head, megatron, optim, num_updates, config.trainer.collective_timeout, **more)


def _router_replay(config: TrainConfig) -> str | None:
    """The choices that routers replay. A step of one update has no earlier pass to record: it would replay its own choices."""
    mode = config.actor_rollout_ref.actor.router_replay
    return None if mode == "trainer" and not needs_old_log_probs(config) else mode


def _share_prompts(config: TrainConfig) -> str | None:
    """The option that enables shared prompts, for error messages; None: it is not set."""
    return "actor_rollout_ref.actor.share_prompts" if config.actor_rollout_ref.actor.share_prompts else None


ACTOR = "megarl.trainer.workers.actor:ActorWorker"
ACTOR_CRITIC = "megarl.trainer.workers.scalar_heads:ActorCriticWorker"
CRITIC = "megarl.trainer.workers.scalar_heads:CriticWorker"
REWARD_MODEL = "megarl.trainer.workers.scalar_heads:RewardModelWorker"


@dataclass(frozen=True)
class Role:
    """A model's ranks, their layout, and how its batches are divided into micro-batches."""

    group: WorkerGroup
    layout: ParallelLayout
    batching: MicroBatching


def start_actor(config: TrainConfig, run: Run, num_steps: int | None) -> Role:
    """The actor's processes, with the critic in them where it shares the actor's model.

    Args:
        num_steps: of the run; None: no model is trained, and there is neither an optimizer nor a reference.
    """
    actor = config.actor_rollout_ref.actor
    kwargs = actor_arguments(config, num_steps)
    worker = ACTOR_CRITIC if "critic" in kwargs else ACTOR
    return start_model(run, "actor", worker, actor.resource_pool, kwargs, _batching(config, actor))


def start_critic(config: TrainConfig, run: Run, actor: Role, num_steps: int) -> Role:
    """The critic: in processes of its own, or in the actor's where it shares the actor's model."""
    critic, batching = config.critic, _batching(config, config.critic)
    if critic.model.share_base:
        return Role(actor.group, actor.layout, replace(batching, pair_share=actor.batching.pair_share))
    kwargs = {"spec": critic_spec(config, num_steps)}
    return start_model(run, "critic", CRITIC, critic.resource_pool, kwargs, batching)


def start_references(config: TrainConfig, run: Run, actor: Role) -> dict[str, Role]:
    """The run's references by their roles: in the actor's processes, or in processes of their own."""
    return {
        role: _start_reference(config, run, actor, role, section)
        for role, section in references(config).items()
    }


def _start_reference(config: TrainConfig, run: Run, actor: Role, role: str, ref: RefConfig) -> Role:
    policy = config.actor_rollout_ref
    batching = MicroBatching(
        0,
        ref.log_prob_max_token_len_per_gpu,
        ref.log_prob_micro_batch_size_per_gpu,
        share_prompts=policy.actor.share_prompts,
    )
    if reference_in_actor(config):
        pair_share = model_flops(read_model_config(ref.model.path), "lm").pair_share
        return Role(actor.group, actor.layout, replace(batching, pair_share=pair_share))
    kwargs = {"spec": reference_spec(config, role), "temperature": policy.rollout.temperature}
    return start_model(run, role, ACTOR, ref.resource_pool, kwargs, batching)


def start_reward_model(config: TrainConfig, run: Run) -> Role:
    """The reward model's processes."""
    reward = config.reward_model
    batching = MicroBatching(0, reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu)
    kwargs = {"spec": reward_model_spec(config)}
    return start_model(run, "reward_model", REWARD_MODEL, reward.resource_pool, kwargs, batching)


def start_model(
    run: Run,
    name: str,
    worker_class: str,
    pool_name: str,
    kwargs: dict[str, Any],
    batching: MicroBatching,
) -> Role:
    """Start a model's ranks. `kwargs`: arguments of the ranks' class, `spec` among them."""
    spec = kwargs["spec"]
    pool, model = run.pools[pool_name], read_model_config(spec.path)
    # With many ranks calls go through relays; where there is a fork server, ranks are forked with their imports done.
    group = group_kind(len(pool), run.relays_from)(
        name,
        worker_class,
        pool,
        len(pool),
        kwargs,
        run.log_dir,
        watched_groups=run.groups,
        watch=run.watch,
        around=NAMED,
        fork_server=run.fork_servers.get(MODEL_PROCESSES),
    )
    run.profiled.append(group)
    batching = replace(
        batching,
        pair_share=model_flops(model, spec.head).pair_share,
        token_multiple=spec.megatron.token_multiple,
    )
    return Role(run.start(group), ParallelLayout.from_config(spec.megatron, len(pool)), batching)


def _batching(config: TrainConfig, section: ActorConfig | CriticConfig) -> MicroBatching:
    return MicroBatching(
        mini_batch_size=trajectories_per_mini_batch(config, section),
        max_tokens=section.ppo_max_token_len_per_gpu,
        micro_batch_size=section.ppo_micro_batch_size_per_gpu,
        epochs=section.ppo_epochs,
        shuffle=config.actor_rollout_ref.actor.shuffle,
        share_prompts=config.actor_rollout_ref.actor.share_prompts,
    )


def say_layers(run: Run, group: WorkerGroup, pool: ResourcePool) -> None:
    """On GPUs, print the layer implementations of the models, which depend on the installed packages and decide the speed."""
    if pool.use_gpu:
        (found,) = run.wait([group.call_rank(0, "layers_used")])
        run.say(f"layers: {found}")
