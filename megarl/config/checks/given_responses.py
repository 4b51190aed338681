"""Checks of responses that are given in the data (`data.given_response_key`): which losses and modes they go with."""

from collections.abc import Iterator

from megarl.config.checks.values import given_keys
from megarl.config.resolve import full_kl_in_loss, top_k_in_loss
from megarl.config.schema.commands import POLICY, STREAMED, TrainConfig


def given_response_problems(config: TrainConfig) -> Iterator[str]:
    data = config.data
    if data.given_response_key is None:
        for name in given_keys(data, ("on_policy_share",)):
            yield f"data.{name}={getattr(data, name):g} needs data.given_response_key beside it; nothing reads it otherwise"
        return
    given, policy = f"data.given_response_key={data.given_response_key}", config.actor_rollout_ref
    yield from loss_problems(config, given)
    if config.trainer.mode in STREAMED:
        yield (
            f"{given} goes with trainer.mode=sync and one_step_off, in which a step has all of its prompts at once; {config.trainer.mode} takes "
            "the prompts that are answered first"
        )
    for name in ("multi_turn", "gateway"):
        if getattr(policy.rollout, name).enable:
            yield (
                f"{given}: a given response has one turn, and no environment or agent takes part in it; leave {POLICY}.rollout.{name}.enable=true "
                "out"
            )
    if config.algorithm.filter_groups.enable:
        yield (
            f"{given}: algorithm.filter_groups.enable=true drops prompts by their scores, and given responses have none; leave one out"
        )


def loss_problems(config: TrainConfig, given: str) -> Iterator[str]:
    """Losses and models that given responses, which `given` names, cannot be learnt with."""
    policy = config.actor_rollout_ref
    if not (full_kl_in_loss(config) or top_k_in_loss(config)):
        yield (
            f"{given}: a given response is learnt from by the divergence of whole distributions alone, since an estimate by sampled tokens is "
            f"right for the policy's own; set {POLICY}.actor.use_kl_loss=true with kl_loss_type=full or top_k"
        )
    if config.critic is not None:
        yield f"{given}: a given response has no reward that a critic could learn; leave the section critic out (critic=null), with an estimator such as grpo"
    if policy.actor.router_replay == "rollout":
        yield (
            f"{given}: no engine has chosen experts for a given response, which {POLICY}.actor.router_replay=rollout replays; choose trainer"
        )
