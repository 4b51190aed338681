"""Findings in a step's metrics that are not healthy, each with its value and a remedy in keys and values.

Pure functions of the configuration, the controls in force, the metrics and the history of earlier steps. A metric that is missing or
NaN gives no finding. A finding of a single step may be noise: see `beyond_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, linear_regression, stdev

from megarl.algorithms.kl import KLController
from megarl.config import ActorConfig, HealthConfig, TrainConfig, trajectories_per_step, updates_per_step
from megarl.trainer.stages.advantages import Controls

ACTOR = "actor_rollout_ref.actor"
NUM_SCORES = 10  # steps whose mean scores are compared with as many others
# Trajectories in a row with one score, from which on others are rare: at most 3 / 30 of them, with 95% confidence.
NUM_EQUAL = 30
_LARGEST_EXCESS = math.log(1000)


@dataclass(frozen=True)
class Finding:
    """A metric that is not healthy, and a remedy in keys and values.

    Attributes:
        excess: how far the value is beyond its bound, as the logarithm of their quotient; 0: there is no bound.
        error: the standard error of `excess` that follows from how many trajectories were counted; 0: not known.
    """

    kind: str  # of config.FINDINGS
    value: float
    message: str
    advice: str
    excess: float = 0.0
    error: float = 0.0


@dataclass
class History:
    """The history of earlier steps; part of a checkpoint.

    Attributes:
        first_entropy: the first entropy of the run; None before it.
        best_score, best_step: the best validation so far; None before the first.
        since_best: the scores of the validations since then.
        first_scores, last_scores: the mean scores of the first and of the last `NUM_SCORES` steps.
        num_scores: steps that had one.
        equal: steps in a row whose trajectories all had the same score.
    """

    first_entropy: float | None = None
    best_score: float | None = None
    best_step: int = 0
    since_best: list[float] = field(default_factory=list)
    first_scores: list[float] = field(default_factory=list)
    last_scores: list[float] = field(default_factory=list)
    num_scores: int = 0
    equal: int = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        entropy = metrics.get("actor/entropy", math.nan)
        if self.first_entropy is None and math.isfinite(entropy):  # NaN: float16 has overflowed
            self.first_entropy = entropy
        score = metrics.get("critic/score/mean", math.nan)
        if math.isfinite(score):
            self.first_scores = [*self.first_scores, score][:NUM_SCORES]
            self.last_scores = [*self.last_scores, score][-NUM_SCORES:]
            self.num_scores += 1
            least, most = metrics.get("critic/score/min"), metrics.get("critic/score/max")
            self.equal = self.equal + 1 if least is not None and least == most else 0
        score = metrics.get("val/score/mean")
        if score is None:
            return
        if self.best_score is None or score > self.best_score:
            self.best_score, self.best_step, self.since_best = score, step, []
        else:
            self.since_best = [*self.since_best, score]

    @property
    def is_flat(self) -> bool:
        """Whether the last scores are not over the first ones by two standard errors; False before there are as many of each."""
        if self.num_scores < 2 * NUM_SCORES:
            return False
        first, last = self.first_scores, self.last_scores
        error = math.hypot(stdev(first), stdev(last)) / math.sqrt(NUM_SCORES)
        return fmean(last) - fmean(first) <= 2 * error

    @property
    def rises(self) -> bool:
        """Whether the validations since the best one rise: their slope by least squares is over two of its standard errors."""
        scores = self.since_best
        if len(scores) < 3:
            return False
        slope, start = linear_regression(range(len(scores)), scores)
        left = sum((score - start - slope * at) ** 2 for at, score in enumerate(scores))
        spread = (len(scores) ** 3 - len(scores)) / 12  # the squares of the steps' distances from their mean
        return slope > 2 * math.sqrt(left / (len(scores) - 2) / spread)


def beyond_noise(findings: Sequence[Finding]) -> bool:
    """Whether findings of consecutive steps are more than noise: their mean excess is over two standard errors.

    The error is the larger one of two estimates: from the differences of the steps, and from the counts of trajectories. Logarithms
    are compared, as gradient norms and KLs may differ by orders of magnitude from step to step.
    """
    excesses = [finding.excess for finding in findings]
    if not any(excesses):
        return True
    by_steps = stdev(excesses) if len(excesses) > 1 else 0.0
    by_counts = max(finding.error for finding in findings)
    return fmean(excesses) > 2 * max(by_steps, by_counts) / math.sqrt(len(excesses))


def kl_coefficients(config: TrainConfig, controls: Controls) -> dict[str, KLController]:
    """The controllers of the KL coefficients that are in use, by key."""
    used = {}
    if config.algorithm.use_kl_in_reward:
        used["algorithm.kl_ctrl.kl_coef"] = controls.kl
    if config.actor_rollout_ref.actor.use_kl_loss:
        used[f"{ACTOR}.kl_loss_coef"] = controls.kl_loss
    return used


@dataclass(frozen=True)
class CheckedStep:
    """The inputs of a check: a step of a run. `history` includes this step."""

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

    @property
    def trajectories(self) -> int:
        """The most trajectories of a step."""
        return trajectories_per_step(self.config)

    def over(self, name: str, bound: float | None) -> tuple[float, float] | None:
        """The metric and its bound, if both exist and the metric exceeds it."""
        value = self.metrics.get(name)
        return (value, bound) if bound is not None and value is not None and value > bound else None

    def share_error(self, share: float) -> float:
        """The standard error of the logarithm of a share of the trajectories, or of their tokens, as the tokens of a trajectory are not independent."""
        return math.sqrt((1 - share) / share / self.trajectories)

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


@dataclass(frozen=True)
class UnnamedFinding:
    """A finding before its kind is attached; `bound` None: there is none. `error`: as `Finding.error`."""

    value: float
    bound: float | None
    message: str
    advice: str
    error: float = 0.0

    def named(self, kind: str) -> Finding:
        excess = 0.0
        if self.bound:
            quotient = self.value / self.bound
            excess = min(abs(math.log(quotient)), _LARGEST_EXCESS) if quotient > 0 else _LARGEST_EXCESS
        return Finding(kind, self.value, self.message, self.advice, excess, self.error)


def find(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], history: History
) -> list[Finding]:
    """All metrics outside the bounds of `config.health`, whether or not they are to be reported; `history` includes this step."""
    step = CheckedStep(config, controls, metrics, history)
    found = {kind: check(step) for kind, check in CHECKS.items()}
    return [finding.named(kind) for kind, finding in found.items() if finding is not None]


def _ppo_kl_high(step: CheckedStep) -> UnnamedFinding | None:
    found = step.over("actor/ppo_kl", step.health.ppo_kl_high)
    if found is None:
        return None
    value, bound = found
    return UnnamedFinding(
        *found,
        f"actor/ppo_kl is {value:.3g} nats, over {bound:g}: the policy moves too far in one step",
        f"Do: {step.more_kl()}; or set {ACTOR}.target_kl={bound:g}, or lower {ACTOR}.optim.lr from "
        f"{step.actor.optim.lr:g}",
    )


def _ppo_kl_low(step: CheckedStep) -> UnnamedFinding | None:
    bound, actor, metrics = step.health.ppo_kl_low, step.actor, step.metrics
    updates = updates_per_step(step.config, actor)
    # In the first update of a step the policy is still the one that was sampled: with one update it always is 0.
    if bound is None or updates < 2 or not kl_coefficients(step.config, step.controls):
        return None
    # While the learning rate warms up, or has decayed, small steps are intended.
    if not step.history.is_flat or metrics.get("actor/lr", 0.0) < actor.optim.lr / 2:
        return None
    # Of the same tokens the estimate k1, actor/ppo_kl, is mostly noise; k3 (algorithms/kl.py) is not.
    value = metrics.get("actor/ratio_mean", math.nan) - 1.0 + metrics.get("actor/ppo_kl", math.nan)
    if not value < bound:
        return None
    return UnnamedFinding(
        value,
        bound,
        f"the policy moves by {value:.3g} nats a token in a step (actor/ratio_mean - 1 + actor/ppo_kl), under {bound:g}, and "
        "critic/score/mean has not risen since the first steps: the policy hardly moves",
        f"Do: {step.scale_kl('lower', 0.5)}; or raise {ACTOR}.optim.lr from {actor.optim.lr:g}",
    )


def _grad_norm(step: CheckedStep) -> UnnamedFinding | None:
    found, optim = step.over("actor/grad_norm", step.health.grad_norm), step.actor.optim
    if found is None:
        return None
    value, bound = found
    clip = "" if optim.clip_grad else f", and clip gradients ({ACTOR}.optim.clip_grad=1.0)"
    return UnnamedFinding(
        *found,
        f"actor/grad_norm is {value:.3g}, over {bound:g} (healthy: under 10)",
        f"Do: lower {ACTOR}.optim.lr from {optim.lr:g} to {optim.lr / 2:g}{clip}",
    )


def _entropy(step: CheckedStep) -> UnnamedFinding | None:
    health, coeff, clip = step.health, step.actor.entropy_coeff, step.controls.clip_high
    value, first = step.metrics.get("actor/entropy"), step.history.first_entropy
    if value is None:
        return None
    bounds = {f"health.entropy_min={health.entropy_min}": health.entropy_min}
    if first is not None and health.entropy_ratio is not None:
        bounds[f"{health.entropy_ratio:g} of the first step's {first:.3g}"] = health.entropy_ratio * first
    under = {text: bound for text, bound in bounds.items() if bound is not None and value < bound}
    if not under:
        return None
    text, bound = max(under.items(), key=lambda item: item[1])
    return UnnamedFinding(
        value,
        bound,
        f"actor/entropy is {value:.3g} nats, under {text}: the policy stops exploring",
        f"Do: raise {ACTOR}.entropy_coeff from {coeff:g} to {max(2 * coeff, 0.001):g}, or {ACTOR}.clip_ratio_high "
        f"from {clip:g} to {max(1.4 * clip, 0.28):g}; or {step.more_kl()}",
    )


def _clip_fraction(step: CheckedStep) -> UnnamedFinding | None:
    found, actor = step.over("actor/pg_clipfrac", step.health.clip_fraction), step.actor
    if found is None:
        return None
    value, bound = found
    epochs = f", or {ACTOR}.ppo_epochs from {actor.ppo_epochs} to 1" if actor.ppo_epochs > 1 else ""
    return UnnamedFinding(
        *found,
        f"actor/pg_clipfrac is {value:.0%}, over {bound:.0%}: most of what is learnt is clipped away",
        f"Do: lower {ACTOR}.optim.lr from {actor.optim.lr:g} to {actor.optim.lr / 2:g}{epochs}",
        step.share_error(value),
    )


def _duplicate_responses(step: CheckedStep) -> UnnamedFinding | None:
    found = step.over("health/duplicate_responses", step.health.duplicate_responses)
    if found is None:
        return None
    value, bound = found
    temperature = step.config.actor_rollout_ref.rollout.temperature
    return UnnamedFinding(
        *found,
        f"{value:.0%} of the responses to a prompt repeat another one, over {bound:.0%}",
        f"Do: {step.more_kl()}, and {ACTOR}.clip_ratio=0.1; or raise actor_rollout_ref.rollout.temperature from "
        f"{temperature:g}; where they are right, take harder prompts",
        step.share_error(value),
    )


def _ngram_repetition(step: CheckedStep) -> UnnamedFinding | None:
    found = step.over("health/ngram_repetition", step.health.ngram_repetition)
    if found is None:
        return None
    value, bound = found
    return UnnamedFinding(
        *found,
        f"{value:.0%} of the runs of 4 tokens occurred in their response before, over {bound:.0%}: responses go round "
        "in circles",
        f"Do: {step.more_kl()}, and {ACTOR}.clip_ratio=0.1; look at the trajectories in the run folder",
        step.share_error(value),
    )


def _equal_rewards(step: CheckedStep) -> UnnamedFinding | None:
    least, most = step.metrics.get("critic/score/min"), step.metrics.get("critic/score/max")
    if not step.health.equal_rewards or least is None or least != most:
        return None
    if step.history.equal * step.trajectories < NUM_EQUAL:
        return None
    return UnnamedFinding(
        least,
        None,
        f"all trajectories of the step have the score {least:g}: there is nothing to prefer",
        "Do: look at the trajectories in the run folder: the reward may not read the answers' format, or the prompts are "
        "all too hard or too easy",
    )


def _long_responses(step: CheckedStep) -> UnnamedFinding | None:
    found = step.over("response_length/clip_ratio", step.health.long_responses)
    if found is None:
        return None
    (value, bound), longest = found, step.config.data.max_response_length
    return UnnamedFinding(
        *found,
        f"{value:.0%} of the responses were cut at data.max_response_length={longest}, over {bound:.0%}",
        f"Do: raise data.max_response_length to {2 * longest}, or penalise length "
        "(reward_model.overlong_buffer.enable=true)",
        step.share_error(value),
    )


def _mismatch(step: CheckedStep) -> UnnamedFinding | None:
    found = step.over("training/rollout_log_prob_diff_mean", step.health.mismatch)
    if found is None:
        return None
    value, bound = found
    weigh = (
        ""
        if step.config.algorithm.rollout_correction.rollout_is
        else "set algorithm.rollout_correction.rollout_is=token, or "
    )
    older = (
        ""
        if step.config.trainer.mode == "sync"
        else f"lower {ACTOR}.optim.lr (responses are a step older), or "
    )
    return UnnamedFinding(
        *found,
        f"engine and trainer differ by {value:.3g} nats a token, over {bound:g}",
        f"Do: {weigh}{older}give both the same dtype (actor_rollout_ref.rollout.dtype, {ACTOR}.megatron.dtype)",
    )


def _stagnation(step: CheckedStep) -> UnnamedFinding | None:
    bound, history = step.health.stagnation, step.history
    number = len(history.since_best)
    if bound is None or "val/score/mean" not in step.metrics or number < bound or history.rises:
        return None
    return UnnamedFinding(
        float(number),
        None,
        f"val/score/mean has not risen above {history.best_score:.4g} (step {history.best_step}) in {number} validations",
        f"Do: stop the run (health.early_stop=[stagnation] does), or raise {ACTOR}.entropy_coeff to 0.01 or "
        f"{ACTOR}.ppo_epochs to 4",
    )


CHECKS: dict[str, Callable[[CheckedStep], UnnamedFinding | None]] = {
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
