"""Findings in a step's metrics that are not healthy, each with its value and a remedy in keys and values.

Pure functions of the configuration, the controls in force, the metrics and the history of earlier steps. A metric that is missing or
NaN gives no finding. A finding of a single step may be noise: see `beyond_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, linear_regression, stdev
from typing import Any

from megarl.algorithms.kl import KLController
from megarl.config import ActorConfig, TrainConfig, trajectories_per_step, updates_per_step
from megarl.trainer.stages.advantages import Controls

ACTOR = "actor_rollout_ref.actor"
NUM_SCORES = 10  # steps whose mean scores are compared with as many others
# This many trajectories in a row with the same score show that other scores are rare: at most 3 / 30 of all, with 95% confidence.
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
        """Whether the last scores are not over the first ones by two standard errors; False before there are `NUM_SCORES` of each."""
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
        spread = (len(scores) ** 3 - len(scores)) / 12  # sum of the steps' squared distances from their mean
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
    def actor(self) -> ActorConfig:
        return self.config.actor_rollout_ref.actor

    @property
    def trajectories(self) -> int:
        """The most trajectories of a step."""
        return trajectories_per_step(self.config)

    def scale_kl(self, verb: str, factor: float) -> str:
        """Advice: each KL coefficient that is in use, with its present and its new value."""
        return " and ".join(
            f"{verb} {key} from {controller.coef:g} to {controller.coef * factor:g}"
            for key, controller in kl_coefficients(self.config, self.controls).items()
        )

    def words(self) -> dict[str, Any]:
        """Values for the messages and the advice of `RULES`."""
        config, actor, optim = self.config, self.actor, self.actor.optim
        coeff, clip, longest = actor.entropy_coeff, self.controls.clip_high, config.data.max_response_length
        add_kl = f"add a KL to the reference policy ({ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.001)"
        older = f"lower {ACTOR}.optim.lr (responses are a step older), or "
        correct = "set algorithm.rollout_correction.rollout_is=token, or "
        return {
            "actor": ACTOR,
            "more_kl": self.scale_kl("raise", 2.0) or add_kl,
            "less_kl": self.scale_kl("lower", 0.5),
            "lower_lr": f"lower {ACTOR}.optim.lr from {optim.lr:g} to {optim.lr / 2:g}",
            "lr": optim.lr,
            "clip_gradients": "" if optim.clip_grad else f", and clip gradients ({ACTOR}.optim.clip_grad=1.0)",
            "fewer_epochs": f", or {ACTOR}.ppo_epochs from {actor.ppo_epochs} to 1" if actor.ppo_epochs > 1 else "",
            "more_entropy": f"{ACTOR}.entropy_coeff from {coeff:g} to {max(2 * coeff, 0.001):g}",
            "more_clip": f"{ACTOR}.clip_ratio_high from {clip:g} to {max(1.4 * clip, 0.28):g}",
            "temperature": config.actor_rollout_ref.rollout.temperature,
            "longest": longest,
            "longer": 2 * longest,
            "correct": "" if config.algorithm.rollout_correction.rollout_is else correct,
            "older": "" if config.trainer.mode == "sync" else older,
            "best_score": self.history.best_score,
            "best_step": self.history.best_step,
        }  # fmt: skip


Measured = tuple[float, float | None, str]
"""A value that is not healthy, its bound (None: there is none), and the bound as `under` in the message."""


def _ppo_kl_low(step: CheckedStep) -> Measured | None:
    bound, actor, metrics = step.config.health.ppo_kl_low, step.actor, step.metrics
    updates = updates_per_step(step.config, actor)
    # In the first update of a step the policy is still the one that was sampled: with one update the KL is always 0.
    if bound is None or updates < 2 or not kl_coefficients(step.config, step.controls):
        return None
    # Between players of a game the rules determine the mean score, however well they learn.
    gateway = step.config.actor_rollout_ref.rollout.gateway
    if gateway.enable and gateway.players:
        return None
    # While the learning rate warms up, or has decayed, small steps are intended.
    if not step.history.is_flat or metrics.get("actor/lr", 0.0) < actor.optim.lr / 2:
        return None
    # On the same tokens the estimate k1, actor/ppo_kl, is mostly noise; k3 (algorithms/kl.py) is not.
    value = metrics.get("actor/ratio_mean", math.nan) - 1.0 + metrics.get("actor/ppo_kl", math.nan)
    return (value, bound, f"{bound:g}") if value < bound else None


def _entropy(step: CheckedStep) -> Measured | None:
    health, value, first = step.config.health, step.metrics.get("actor/entropy"), step.history.first_entropy
    bounds = {f"health.entropy_min={health.entropy_min}": health.entropy_min}
    if first is not None and health.entropy_ratio is not None:
        bounds[f"{health.entropy_ratio:g} of the first step's {first:.3g}"] = health.entropy_ratio * first
    under = [
        (value, bound, text)
        for text, bound in bounds.items()
        if value is not None and bound is not None and value < bound
    ]
    return max(under, key=lambda found: found[1]) if under else None


def _equal_rewards(step: CheckedStep) -> Measured | None:
    least, most = step.metrics.get("critic/score/min"), step.metrics.get("critic/score/max")
    if not step.config.health.equal_rewards or least is None or least != most:
        return None
    if {
        "reward/step_score",
        "reward/model_step_score",
    } & step.metrics.keys():  # rewards of steps are no part of the score
        return None
    return (least, None, "") if step.history.equal * step.trajectories >= NUM_EQUAL else None


def _stagnation(step: CheckedStep) -> Measured | None:
    bound, number = step.config.health.stagnation, len(step.history.since_best)
    if bound is None or "val/score/mean" not in step.metrics or number < bound or step.history.rises:
        return None
    return float(number), None, ""


@dataclass(frozen=True)
class Rule:
    """A check of a step's metrics, and the report of its finding.

    Attributes:
        found: the name of a metric that is to stay under the bound `health.<kind>`, or a function for other checks.
        message, advice: with `value`, `bound`, `under` and `CheckedStep.words` in braces.
        is_share: whether the value is a share of the trajectories, or of their tokens.
    """

    found: str | Callable[[CheckedStep], Measured | None]
    message: str
    advice: str
    is_share: bool = False

    def check(self, kind: str, step: CheckedStep) -> Finding | None:
        """The finding of a step; None: the metric is healthy, missing or NaN, or there is no bound."""
        if isinstance(self.found, str):
            value, bound = step.metrics.get(self.found), getattr(step.config.health, kind)
            measured = (value, bound, "") if None not in (value, bound) and value > bound else None
        else:
            measured = self.found(step)
        if measured is None:
            return None
        value, bound, under = measured
        words = {**step.words(), "value": value, "bound": bound, "under": under}
        excess = error = 0.0
        if bound:
            quotient = value / bound
            excess = min(abs(math.log(quotient)), _LARGEST_EXCESS) if quotient > 0 else _LARGEST_EXCESS
        if self.is_share:  # the logarithm's error; the tokens of a trajectory are not independent
            error = math.sqrt((1 - value) / value / step.trajectories)
        message, advice = self.message.format_map(words), self.advice.format_map(words)
        return Finding(kind, value, message, f"Do: {advice}", excess, error)


def find(
    config: TrainConfig, controls: Controls, metrics: Mapping[str, float], history: History
) -> list[Finding]:
    """All metrics outside the bounds of `config.health`, whether or not they are to be reported; `history` includes this step."""
    step = CheckedStep(config, controls, metrics, history)
    found = [rule.check(kind, step) for kind, rule in RULES.items()]
    return [finding for finding in found if finding is not None]


RULES = {
    "ppo_kl_high": Rule(
        "actor/ppo_kl",
        "actor/ppo_kl is {value:.3g} nats, over {bound:g}: the policy moves too far in one step",
        "{more_kl}; or set {actor}.target_kl={bound:g}, or lower {actor}.optim.lr from {lr:g}",
    ),
    "ppo_kl_low": Rule(
        _ppo_kl_low,
        "the policy moves by {value:.3g} nats a token in a step (actor/ratio_mean - 1 + actor/ppo_kl), under {under}, and "
        "critic/score/mean has not risen since the first steps: the policy hardly moves",
        "{less_kl}; or raise {actor}.optim.lr from {lr:g}",
    ),
    "grad_norm": Rule(
        "actor/grad_norm",
        "actor/grad_norm is {value:.3g}, over {bound:g} (healthy: under 10)",
        "{lower_lr}{clip_gradients}",
    ),
    "entropy": Rule(
        _entropy,
        "actor/entropy is {value:.3g} nats, under {under}: the policy stops exploring",
        "raise {more_entropy}, or {more_clip}; or {more_kl}",
    ),
    "clip_fraction": Rule(
        "actor/pg_clipfrac",
        "actor/pg_clipfrac is {value:.0%}, over {bound:.0%}: most of what is learnt is clipped away",
        "{lower_lr}{fewer_epochs}",
        is_share=True,
    ),
    "duplicate_responses": Rule(
        "health/duplicate_responses",
        "{value:.0%} of the responses to a prompt repeat another one, over {bound:.0%}",
        "{more_kl}, and {actor}.clip_ratio=0.1; or raise actor_rollout_ref.rollout.temperature from {temperature:g}; "
        "where they are right, take harder prompts",
        is_share=True,
    ),
    "ngram_repetition": Rule(
        "health/ngram_repetition",
        "{value:.0%} of the runs of 4 tokens occurred in their response before, over {bound:.0%}: responses go round in "
        "circles",
        "{more_kl}, and {actor}.clip_ratio=0.1; look at the trajectories in the run folder",
        is_share=True,
    ),
    "equal_rewards": Rule(
        _equal_rewards,
        "all trajectories of the step have the score {value:g}: there is nothing to prefer",
        "look at the trajectories in the run folder: the reward may not read the answers' format, or the prompts are all "
        "too hard or too easy",
    ),
    "long_responses": Rule(
        "response_length/clip_ratio",
        "{value:.0%} of the responses were cut at data.max_response_length={longest}, over {bound:.0%}",
        "raise data.max_response_length to {longer}, or penalise length (reward_model.overlong_buffer.enable=true)",
        is_share=True,
    ),
    "mismatch": Rule(
        "training/rollout_log_prob_diff_mean",
        "engine and trainer differ by {value:.3g} nats a token, over {bound:g}",
        "{correct}{older}give both the same dtype (actor_rollout_ref.rollout.dtype, {actor}.megatron.dtype)",
    ),
    "stagnation": Rule(
        _stagnation,
        "val/score/mean has not risen above {best_score:.4g} (step {best_step}) in {value:.0f} validations",
        "stop the run (health.early_stop=[stagnation] does), or raise {actor}.entropy_coeff to 0.01 or "
        "{actor}.ppo_epochs to 4",
    ),
}
