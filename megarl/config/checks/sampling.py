"""Checks of how responses are sampled, and of the environments that take part."""

from collections.abc import Iterator
from dataclasses import fields

from megarl.config.checks.algorithm import registered_problems
from megarl.config.schema.commands import EvalConfig, RolloutConfig, TrainConfig
from megarl.config.schema.multi_turn import ENVIRONMENTS, MultiTurnConfig

_TRAINING = "actor_rollout_ref.rollout"
# Those that change the distribution that is sampled from, and the values with which they do not.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
_CUTS = ("top_p", "top_k", "min_p")


def training_sampling_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Of training rollouts: what is sampled from must be what the trainer's log-probs are of."""
    for name, allowed in NEUTRAL_SAMPLING.items():
        value = getattr(rollout, name)
        if value == allowed:
            continue
        if name in _CUTS:
            reason = (
                f"training rollouts must sample from all tokens ({name}={allowed:g}), because the trainer's log-probs "
                "are those of the whole distribution, not of the cut one"
            )
        else:
            reason = (
                f"training rollouts must sample from the policy as it is ({name}={allowed:g}), because the trainer's "
                "log-probs know of no penalty"
            )
        yield f"{_TRAINING}.{name}={value}: {reason} (rollout.val_kwargs.{name} may be set)"


def evaluation_sampling_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Of evaluation, which samples as val_kwargs says."""
    for name in ("n", "temperature", *NEUTRAL_SAMPLING):
        value = getattr(rollout, name)
        if value != getattr(RolloutConfig(), name):
            yield f"rollout.{name}={value} is of training rollouts; evaluation reads rollout.val_kwargs.{name}"


def multi_turn_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Of the section multi_turn, and of tokens that end a turn."""
    training = isinstance(config, TrainConfig)
    rollout = config.actor_rollout_ref.rollout if isinstance(config, TrainConfig) else config.rollout
    prefix = _TRAINING if training else "rollout"
    multi_turn = rollout.multi_turn
    if any(token < 0 for token in rollout.stop_token_ids):
        yield f"{prefix}.stop_token_ids={list(rollout.stop_token_ids)}: token ids are not negative"
    if not multi_turn.enable:
        given = [
            member.name
            for member in fields(MultiTurnConfig)
            if getattr(multi_turn, member.name) != member.default
        ]
        if given:
            names = ", ".join(f"{prefix}.multi_turn.{name}" for name in given)
            yield f"{names}: without {prefix}.multi_turn.enable=true there are no further turns"
        return
    if multi_turn.step_timeout >= rollout.request_timeout:
        yield (
            f"{prefix}.multi_turn.step_timeout={multi_turn.step_timeout:g} must be less than {prefix}.request_timeout="
            f"{rollout.request_timeout:g}, after which an engine that answers nothing counts as broken"
        )
    if multi_turn.environment is None:
        yield (
            f"{prefix}.multi_turn.environment is required with {prefix}.multi_turn.enable=true; megarl has "
            f"{', '.join(ENVIRONMENTS)}"
        )
    else:
        key = f"{prefix}.multi_turn.environment"
        yield from registered_problems(config, key, multi_turn.environment, ENVIRONMENTS)
