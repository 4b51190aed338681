"""What is not healthy in a step's metrics: each finding with what was seen and what to do, in keys and values.

Pure functions of the configuration, the controls in force, the metrics and what steps before told. A metric that is not
there, or is NaN, tells nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.algorithms.kl_control import KLController
from megarl.config import ActorConfig, HealthConfig, TrainConfig
from megarl.trainer.controls import Controls

ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be: what was seen, and what to do (keys and values)."""

    kind: str  # of config.FINDINGS
    value: float
    message: str
    advice: str


@dataclass
class History:
    """What steps before told; part of a checkpoint.

    Attributes:
        first_entropy: the first step's that has one; None before it.
        best_score, best_step: of the best validation so far; None before the first.
        validations: those since then.
    """

    first_entropy: float | None = None
    best_score: float | None = None
    best_step: int = 0
    validations: int = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        entropy = metrics.get("actor/entropy", math.nan)
        if self.first_entropy is None and math.isfinite(entropy):  # NaN: float16 has overflowed
            self.first_entropy = entropy
        score = metrics.get("val/score/mean")
        if score is None:
            return
        if self.best_score is None or score > self.best_score:
            self.best_score, self.best_step, self.validations = score, step, 0
        else:
            self.validations += 1


def kl_coefficients(config: TrainConfig, controls: Controls) -> dict[str, KLController]:
    """The controllers of the KL coefficients that are in use, by key."""
    used = {}
    if config.algorithm.use_kl_in_reward:
        used["algorithm.kl_ctrl.kl_coef"] = controls.kl
    if config.actor_rollout_ref.actor.use_kl_loss:
        used[f"{ACTOR}.kl_loss_coef"] = controls.kl_loss
    return used


@dataclass(frozen=True)
class Look:
    """What a check looks at: a step of a run. `history` has this step."""

    config: TrainConfig
    controls: Controls
    metrics: Mapping[str, float]
    history: History

    @property
    def health(self) -> HealthConfig:
        return self.config.health

    @property
    def actor(self) -> ActorConfig:
        return self.config.actor_rollout_ref.actor

    def over(self, name: str, bound: float | None) -> float | None:
        """The metric, if it is there and over its bound."""
        value = self.metrics.get(name)
        return value if bound is not None and value is not None and value > bound else None

    def scale_kl(self, verb: str, factor: float) -> str:
        """Advice: each KL coefficient that is in use, with its present and its new value."""
        return " and ".join(
            f"{verb} {key} from {controller.coef:g} to {controller.coef * factor:g}"
            for key, controller in kl_coefficients(self.config, self.controls).items()
        )

    def more_kl(self) -> str:
        raised = self.scale_kl("raise", 2.0)
        return (
            raised
            or f"add a KL to the reference policy ({ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.001)"
        )


Seen = tuple[float, str, str] | None  # a finding's value, message and advice


def find(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], history: History
) -> list[Finding]:
    """All that is not as `config.health` has it, whether or not it is to be reported; `history` has this step."""
    look = Look(config, controls, metrics, history)
    found = {kind: check(look) for kind, check in CHECKS.items()}
    return [Finding(kind, *seen) for kind, seen in found.items() if seen is not None]


def _ppo_kl_high(look: Look) -> Seen:
    bound = look.health.ppo_kl_high
    value = look.over("actor/ppo_kl", bound)
    return (
        None
        if value is None
        else (
            value,
            f"actor/ppo_kl is {value:.3g} nats, over {bound:g}: the policy moves too far in one step",
            f"Do: {look.more_kl()}; or set {ACTOR}.target_kl={bound:g}, or lower {ACTOR}.optim.lr from "
            f"{look.actor.optim.lr:g}",
        )
    )


def _ppo_kl_low(look: Look) -> Seen:
    bound, actor = look.health.ppo_kl_low, look.actor
    updates = look.config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    # In the first update of a step the policy is still the one that was sampled: with one update it always is 0.
    if bound is None or updates < 2 or not kl_coefficients(look.config, look.controls):
        return None
    value = look.metrics.get("actor/ppo_kl")
    if value is None or not abs(value) < bound:
        return None
    return (
        value,
        f"actor/ppo_kl is {value:.3g} nats, under {bound:g}: the policy hardly moves",
        f"Do: {look.scale_kl('lower', 0.5)}; or raise {ACTOR}.optim.lr from {actor.optim.lr:g}",
    )


def _grad_norm(look: Look) -> Seen:
    bound, optim = look.health.grad_norm, look.actor.optim
    value = look.over("actor/grad_norm", bound)
    clip = "" if optim.clip_grad else f", and clip gradients ({ACTOR}.optim.clip_grad=1.0)"
    return (
        None
        if value is None
        else (
            value,
            f"actor/grad_norm is {value:.3g}, over {bound:g} (healthy: under 10)",
            f"Do: lower {ACTOR}.optim.lr from {optim.lr:g} to {optim.lr / 2:g}{clip}",
        )
    )


def _entropy(look: Look) -> Seen:
    health, coeff, clip = look.health, look.actor.entropy_coeff, look.controls.clip_high
    value, first = look.metrics.get("actor/entropy"), look.history.first_entropy
    if value is None:
        return None
    bounds = {f"health.entropy_min={health.entropy_min}": health.entropy_min}
    if first is not None and health.entropy_ratio is not None:
        bounds[f"{health.entropy_ratio:g} of the first step's {first:.3g}"] = health.entropy_ratio * first
    text = next((text for text, bound in bounds.items() if bound is not None and value < bound), None)
    if text is None:
        return None
    return (
        value,
        f"actor/entropy is {value:.3g} nats, under {text}: the policy stops exploring",
        f"Do: raise {ACTOR}.entropy_coeff from {coeff:g} to {max(2 * coeff, 0.001):g}, or {ACTOR}.clip_ratio_high "
        f"from {clip:g} to {max(1.4 * clip, 0.28):g}; or {look.more_kl()}",
    )


def _clip_fraction(look: Look) -> Seen:
    bound, actor = look.health.clip_fraction, look.actor
    value = look.over("actor/pg_clipfrac", bound)
    epochs = f", or {ACTOR}.ppo_epochs from {actor.ppo_epochs} to 1" if actor.ppo_epochs > 1 else ""
    return (
        None
        if value is None
        else (
            value,
            f"actor/pg_clipfrac is {value:.0%}, over {bound:.0%}: most of what is learnt is clipped away",
            f"Do: lower {ACTOR}.optim.lr from {actor.optim.lr:g} to {actor.optim.lr / 2:g}{epochs}",
        )
    )


def _duplicate_responses(look: Look) -> Seen:
    bound, rollout = look.health.duplicate_responses, look.config.actor_rollout_ref.rollout
    value = look.over("health/duplicate_responses", bound)
    return (
        None
        if value is None
        else (
            value,
            f"{value:.0%} of the responses to a prompt repeat another one, over {bound:.0%}",
            f"Do: {look.more_kl()}, and {ACTOR}.clip_ratio=0.1; or raise actor_rollout_ref.rollout.temperature from "
            f"{rollout.temperature:g}; where they are right, take harder prompts",
        )
    )


def _ngram_repetition(look: Look) -> Seen:
    bound = look.health.ngram_repetition
    value = look.over("health/ngram_repetition", bound)
    return (
        None
        if value is None
        else (
            value,
            f"{value:.0%} of the runs of 4 tokens occurred in their response before, over {bound:.0%}: responses go round "
            "in circles",
            f"Do: {look.more_kl()}, and {ACTOR}.clip_ratio=0.1; look at the trajectories in the run folder",
        )
    )


def _equal_rewards(look: Look) -> Seen:
    least, most = look.metrics.get("critic/score/min"), look.metrics.get("critic/score/max")
    if not look.health.equal_rewards or least is None or least != most:
        return None
    return (
        least,
        f"all trajectories of the step have the score {least:g}: there is nothing to prefer",
        "Do: look at the trajectories in the run folder: the reward may not read the answers' format, or the prompts are "
        "all too hard or too easy",
    )


def _long_responses(look: Look) -> Seen:
    bound, longest = look.health.long_responses, look.config.data.max_response_length
    value = look.over("response_length/clip_ratio", bound)
    return (
        None
        if value is None
        else (
            value,
            f"{value:.0%} of the responses were cut at data.max_response_length={longest}, over {bound:.0%}",
            f"Do: raise data.max_response_length to {2 * longest}, or penalise length "
            "(reward_model.overlong_buffer.enable=true)",
        )
    )


def _mismatch(look: Look) -> Seen:
    bound, level = look.health.mismatch, look.config.algorithm.rollout_correction.rollout_is
    value = look.over("training/rollout_log_prob_diff_mean", bound)
    weigh = "" if level else "set algorithm.rollout_correction.rollout_is=token, or "
    older = (
        ""
        if look.config.trainer.mode == "sync"
        else f"lower {ACTOR}.optim.lr (responses are a step older), or "
    )
    return (
        None
        if value is None
        else (
            value,
            f"engine and trainer differ by {value:.3g} nats a token, over {bound:g}",
            f"Do: {weigh}{older}give both the same dtype (actor_rollout_ref.rollout.dtype, {ACTOR}.megatron.dtype)",
        )
    )


def _stagnation(look: Look) -> Seen:
    bound, history = look.health.stagnation, look.history
    if bound is None or "val/score/mean" not in look.metrics or history.validations < bound:
        return None
    return (
        float(history.validations),
        f"val/score/mean has not risen above {history.best_score:.4g} (step {history.best_step}) in "
        f"{history.validations} validations",
        f"Do: stop the run (health.early_stop=[stagnation] does), or raise {ACTOR}.entropy_coeff to 0.01 or "
        f"{ACTOR}.ppo_epochs to 4",
    )


CHECKS: dict[str, Callable[[Look], Seen]] = {
    "ppo_kl_high": _ppo_kl_high,
    "ppo_kl_low": _ppo_kl_low,
    "grad_norm": _grad_norm,
    "entropy": _entropy,
    "clip_fraction": _clip_fraction,
    "duplicate_responses": _duplicate_responses,
    "ngram_repetition": _ngram_repetition,
    "equal_rewards": _equal_rewards,
    "long_responses": _long_responses,
    "mismatch": _mismatch,
    "stagnation": _stagnation,
}
