"""What is not healthy in a step's metrics: each finding with what was seen and what to do, in keys and values.

Pure functions of the configuration, the controls in force, the metrics and what steps before told. A metric that is not
there, or is NaN, tells nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.algorithms.kl_control import KLController
from megarl.config import TrainConfig
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


def find(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], history: History
) -> list[Finding]:
    """All that is not as `config.health` has it, whether or not it is to be reported; `history` has this step."""
    checks: tuple[Callable[..., Finding | None], ...] = (
        _ppo_kl_high,
        _ppo_kl_low,
        _grad_norm,
        _entropy,
        _clip_fraction,
        _duplicate_responses,
        _ngram_repetition,
        _equal_rewards,
        _long_responses,
        _mismatch,
        _stagnation,
    )
    found = (check(config, controls, metrics, history) for check in checks)
    return [finding for finding in found if finding is not None]


def _over(metrics: Mapping[str, float], name: str, bound: float | None) -> bool:
    return bound is not None and name in metrics and metrics[name] > bound


def kl_coefficients(config: TrainConfig, controls: Controls) -> dict[str, KLController]:
    """The controllers of the KL coefficients that are in use, by key."""
    used = {}
    if config.algorithm.use_kl_in_reward:
        used["algorithm.kl_ctrl.kl_coef"] = controls.kl
    if config.actor_rollout_ref.actor.use_kl_loss:
        used[f"{ACTOR}.kl_loss_coef"] = controls.kl_loss
    return used


def _scale_kl(config: TrainConfig, controls: Controls, verb: str, factor: float) -> str:
    """Advice: each KL coefficient that is in use, with its present and its new value."""
    return " and ".join(
        f"{verb} {key} from {controller.coef:g} to {controller.coef * factor:g}"
        for key, controller in kl_coefficients(config, controls).items()
    )


def _more_kl(config: TrainConfig, controls: Controls) -> str:
    raised = _scale_kl(config, controls, "raise", 2.0)
    return raised or f"add a KL to the reference policy ({ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.001)"


def _ppo_kl_high(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], _: History
) -> Finding | None:
    bound = config.health.ppo_kl_high
    if not _over(metrics, "actor/ppo_kl", bound):
        return None
    value, advice = metrics["actor/ppo_kl"], _more_kl(config, controls)
    return Finding(
        "ppo_kl_high",
        value,
        f"actor/ppo_kl is {value:.3g} nats, over {bound:g}: the policy moves too far in one step",
        f"Do: {advice}; or set {ACTOR}.target_kl={bound:g}, or lower {ACTOR}.optim.lr from "
        f"{config.actor_rollout_ref.actor.optim.lr:g}",
    )


def _ppo_kl_low(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], _: History
) -> Finding | None:
    bound, actor = config.health.ppo_kl_low, config.actor_rollout_ref.actor
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    # In the first update of a step the policy is still the one that was sampled: with one update it always is 0.
    if bound is None or updates < 2 or not kl_coefficients(config, controls):
        return None
    value = metrics.get("actor/ppo_kl")
    if value is None or not abs(value) < bound:
        return None
    return Finding(
        "ppo_kl_low",
        value,
        f"actor/ppo_kl is {value:.3g} nats, under {bound:g}: the policy hardly moves",
        f"Do: {_scale_kl(config, controls, 'lower', 0.5)}; or raise {ACTOR}.optim.lr from {actor.optim.lr:g}",
    )


def _grad_norm(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], _: History
) -> Finding | None:
    bound, optim = config.health.grad_norm, config.actor_rollout_ref.actor.optim
    if not _over(metrics, "actor/grad_norm", bound):
        return None
    value = metrics["actor/grad_norm"]
    clip = "" if optim.clip_grad else f", and clip gradients ({ACTOR}.optim.clip_grad=1.0)"
    return Finding(
        "grad_norm",
        value,
        f"actor/grad_norm is {value:.3g}, over {bound:g} (healthy: under 10)",
        f"Do: lower {ACTOR}.optim.lr from {optim.lr:g} to {optim.lr / 2:g}{clip}",
    )


def _entropy(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], history: History
) -> Finding | None:
    health, coeff = config.health, config.actor_rollout_ref.actor.entropy_coeff
    value, first = metrics.get("actor/entropy"), history.first_entropy
    if value is None:
        return None
    bounds = {f"health.entropy_min={health.entropy_min}": health.entropy_min}
    if first is not None and health.entropy_ratio is not None:
        bounds[f"{health.entropy_ratio:g} of the first step's {first:.3g}"] = health.entropy_ratio * first
    text = next((text for text, bound in bounds.items() if bound is not None and value < bound), None)
    if text is None:
        return None
    return Finding(
        "entropy",
        value,
        f"actor/entropy is {value:.3g} nats, under {text}: the policy stops exploring",
        f"Do: raise {ACTOR}.entropy_coeff from {coeff:g} to {max(2 * coeff, 0.001):g}, or {ACTOR}.clip_ratio_high "
        f"from {controls.clip_high:g} to {max(1.4 * controls.clip_high, 0.28):g}; or {_more_kl(config, controls)}",
    )


def _clip_fraction(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], _: History
) -> Finding | None:
    bound, actor = config.health.clip_fraction, config.actor_rollout_ref.actor
    if not _over(metrics, "actor/pg_clipfrac", bound):
        return None
    value = metrics["actor/pg_clipfrac"]
    epochs = f", or {ACTOR}.ppo_epochs from {actor.ppo_epochs} to 1" if actor.ppo_epochs > 1 else ""
    return Finding(
        "clip_fraction",
        value,
        f"actor/pg_clipfrac is {value:.0%}, over {bound:.0%}: most of what is learnt is clipped away",
        f"Do: lower {ACTOR}.optim.lr from {actor.optim.lr:g} to {actor.optim.lr / 2:g}{epochs}",
    )


def _duplicate_responses(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], _: History
) -> Finding | None:
    bound, name = config.health.duplicate_responses, "health/duplicate_responses"
    if not _over(metrics, name, bound):
        return None
    return Finding(
        "duplicate_responses",
        metrics[name],
        f"{metrics[name]:.0%} of the responses to a prompt repeat another one, over {bound:.0%}",
        f"Do: {_more_kl(config, controls)}, and {ACTOR}.clip_ratio=0.1; or raise "
        f"actor_rollout_ref.rollout.temperature from {config.actor_rollout_ref.rollout.temperature:g}; where they are "
        "right, take harder prompts",
    )


def _ngram_repetition(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], _: History
) -> Finding | None:
    bound, name = config.health.ngram_repetition, "health/ngram_repetition"
    if not _over(metrics, name, bound):
        return None
    return Finding(
        "ngram_repetition",
        metrics[name],
        f"{metrics[name]:.0%} of the runs of 4 tokens occurred in their response before, over {bound:.0%}: responses go "
        "round in circles",
        f"Do: {_more_kl(config, controls)}, and {ACTOR}.clip_ratio=0.1; look at the trajectories in the run folder",
    )


def _equal_rewards(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], _: History
) -> Finding | None:
    least, most = metrics.get("critic/score/min"), metrics.get("critic/score/max")
    if not config.health.equal_rewards or least is None or least != most:
        return None
    return Finding(
        "equal_rewards",
        least,
        f"all trajectories of the step have the score {least:g}: there is nothing to prefer",
        "Do: look at the trajectories in the run folder: the reward may not read the answers' format, or the prompts are "
        "all too hard or too easy",
    )


def _long_responses(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], _: History
) -> Finding | None:
    bound, name, longest = (
        config.health.long_responses,
        "response_length/clip_ratio",
        config.data.max_response_length,
    )
    if not _over(metrics, name, bound):
        return None
    return Finding(
        "long_responses",
        metrics[name],
        f"{metrics[name]:.0%} of the responses were cut at data.max_response_length={longest}, over {bound:.0%}",
        f"Do: raise data.max_response_length to {2 * longest}, or penalise length "
        "(reward_model.overlong_buffer.enable=true)",
    )


def _mismatch(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], _: History
) -> Finding | None:
    bound, name = config.health.mismatch, "training/rollout_log_prob_diff_mean"
    if not _over(metrics, name, bound):
        return None
    correction = "algorithm.rollout_correction.rollout_is"
    weigh = "" if config.algorithm.rollout_correction.rollout_is else f"set {correction}=token, or "
    return Finding(
        "mismatch",
        metrics[name],
        f"engine and trainer differ by {metrics[name]:.3g} nats a token, over {bound:g}",
        f"Do: {weigh}give both the same dtype (actor_rollout_ref.rollout.dtype, {ACTOR}.megatron.dtype)",
    )


def _stagnation(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], history: History
) -> Finding | None:
    bound = config.health.stagnation
    if bound is None or "val/score/mean" not in metrics or history.validations < bound:
        return None
    return Finding(
        "stagnation",
        float(history.validations),
        f"val/score/mean has not risen above {history.best_score:.4g} (step {history.best_step}) in "
        f"{history.validations} validations",
        f"Do: stop the run (health.early_stop=[stagnation] does), or raise {ACTOR}.entropy_coeff to 0.01 or "
        f"{ACTOR}.ppo_epochs to 4",
    )
