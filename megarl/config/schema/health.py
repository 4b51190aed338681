"""Section `health`: when a run is warned about, stopped or steered."""

from dataclasses import dataclass

from megarl.config.schema.options import option

FINDINGS = (
    "ppo_kl_high",
    "ppo_kl_low",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "duplicate_responses",
    "ngram_repetition",
    "equal_rewards",
    "long_responses",
    "mismatch",
    "stagnation",
)


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """What a healthy run looks like; what is not, is reported with what to do. null: not looked at."""

    enable: bool = option(
        "Look at each step's metrics and trajectories: findings are printed, and written to <run folder>/health.jsonl.",
        True,
    )
    every: int = option("Steps for which a kind of finding is not reported again.", 10, ge=1)
    patience: int = option(
        "Steps in a row in which it must be so; on average over them, it must be beyond its threshold by two standard errors.",
        5,
        ge=1,
    )
    ppo_kl_high: float | None = option(
        "ppo_kl_high: KL from the policy before the step, nats a token, over this (healthy: 0.01 to 0.03).",
        0.05,
        gt=0,
    )
    ppo_kl_low: float | None = option(
        "ppo_kl_low: the KL from the policy before the step, by the estimator k3, under this, with a KL to the reference, "
        "several updates a step and at least half of optim.lr, while the scores of the last 10 steps are not over those of the first 10.",
        1e-5,
        ge=0,
    )
    grad_norm: float | None = option(
        "grad_norm: the actor's gradient, before clipping, over this (healthy: under 10).", 100.0, gt=0
    )
    entropy_ratio: float | None = option("entropy: under this share of the first step's.", 0.1, ge=0, le=1)
    entropy_min: float | None = option("entropy: under this, nats a token.", 0.01, ge=0)
    clip_fraction: float | None = option(
        "clip_fraction: share of tokens whose ratio is clipped, over this.", 0.4, gt=0, le=1
    )
    duplicate_responses: float | None = option(
        "duplicate_responses: share of the responses to a prompt that repeat another one, over this.",
        0.9,
        gt=0,
        le=1,
    )
    ngram_repetition: float | None = option(
        "ngram_repetition: share of a response's runs of 4 tokens that occurred in it before, over this.",
        0.5,
        gt=0,
        le=1,
    )
    equal_rewards: bool = option(
        "equal_rewards: all trajectories of the step have the same score, and these are 30 in a row or more.",
        True,
    )
    long_responses: float | None = option(
        "long_responses: share of responses that were cut at their longest length, over this.",
        0.5,
        gt=0,
        le=1,
    )
    mismatch: float | None = option(
        "mismatch: mean difference of engine's and trainer's log-probs, nats, over this.", 0.1, gt=0
    )
    stagnation: int | None = option(
        "stagnation: validations in a row in which val/score/mean did not rise above its best, and which do not rise by their trend.",
        5,
        ge=1,
    )
    early_stop: tuple[str, ...] = option(
        "Findings that end the run, after its step; the model is exported.", (), choices=FINDINGS
    )
    auto_action: bool = option(
        "At ppo_kl_high, duplicate_responses and ngram_repetition: raise the KL coefficients in use, lower the clip ratios.",
        False,
    )
    kl_coef_factor: float = option(
        "auto_action: what the KL coefficients (algorithm.kl_ctrl, actor.kl_loss_coef) are multiplied with.",
        2.0,
        gt=1,
    )
    kl_coef_max: float = option("auto_action: no coefficient is raised over this.", 1.0, gt=0)
    clip_ratio: float = option("auto_action: what clip ratios over it are lowered to.", 0.1, gt=0)
