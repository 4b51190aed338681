"""The specs of a run's models, as its configuration (resolved) has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config import ActorConfig, CriticConfig, TrainConfig, needs_reference, reference_in_actor
from megarl.trainer.workers.specs import ModelSpec


def actor_arguments(config: TrainConfig, num_steps: int | None) -> dict[str, Any]:
    """The keyword arguments of the actor's ranks; with `critic` where the critic shares the actor's model.

    Args:
        num_steps: of the run; None: nothing is trained, and there is neither an optimizer nor a reference.
    """
    policy, trains = config.actor_rollout_ref, num_steps is not None
    shared_reference = trains and needs_reference(config) and reference_in_actor(config)
    spec = ModelSpec(
        path=policy.model.path,
        head="lm",
        megatron=policy.actor.megatron,
        optim=policy.actor.optim if trains else None,
        num_updates=num_steps * _updates_per_step(config, policy.actor) if trains else 0,
        timeout=config.trainer.collective_timeout,
        # The ranks' working directory need not be this one.
        plugins=tuple(str(Path(file).expanduser().resolve()) for file in config.plugins),
        lora=policy.model.lora,
        share_prompts=_share_prompts(config),
    )
    arguments: dict[str, Any] = {
        "spec": spec,
        "temperature": policy.rollout.temperature,
        "reference_path": policy.model.path if shared_reference and not spec.adapted else None,
    }
    if trains and config.critic is not None and config.critic.model.share_base:
        arguments["critic"] = critic_spec(config, num_steps)
    return arguments


def critic_spec(config: TrainConfig, num_steps: int) -> ModelSpec:
    critic = config.critic
    assert critic is not None
    return ModelSpec(
        path=critic.model.path,
        head="value",
        megatron=critic.megatron,
        optim=critic.optim,
        num_updates=num_steps * _updates_per_step(config, critic),
        timeout=config.trainer.collective_timeout,
        lora=critic.model.lora,
        share_prompts=_share_prompts(config),
    )


def reference_spec(config: TrainConfig) -> ModelSpec:
    """Of a reference that has processes of its own."""
    policy = config.actor_rollout_ref
    return ModelSpec(
        path=policy.model.path,
        head="lm",
        megatron=policy.ref.megatron,
        optim=None,
        num_updates=0,
        timeout=config.trainer.collective_timeout,
        lora=policy.model.lora,  # not that it had adapters: its weights are held as the actor's are
        share_prompts=_share_prompts(config),
    )


def reward_model_spec(config: TrainConfig) -> ModelSpec:
    reward = config.reward_model
    return ModelSpec(
        path=reward.model.path,
        head="value",
        megatron=reward.megatron,
        optim=None,
        num_updates=0,
        timeout=config.trainer.collective_timeout,
    )


def _share_prompts(config: TrainConfig) -> str | None:
    """The option that says so, for errors; None: it is not set."""
    return "actor_rollout_ref.actor.share_prompts" if config.actor_rollout_ref.actor.share_prompts else None


def _updates_per_step(config: TrainConfig, section: ActorConfig | CriticConfig) -> int:
    return config.data.train_batch_size // section.ppo_mini_batch_size * section.ppo_epochs
