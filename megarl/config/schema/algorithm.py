"""Section `algorithm`, the actor's `policy_loss`, and the names of estimators, losses and KL estimators."""

# Every default here is made by dataclasses.field, by `option` and `section`.
# ruff: noqa: RUF009

from dataclasses import dataclass
from typing import Any

from megarl.config.schema import option, section

ADV_ESTIMATORS = (
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "spiral",
)
# Estimators that compare the responses to one prompt.
GROUP_ESTIMATORS = (
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
)
POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "clip_cov",
    "kl_cov",
    "gpg",
    "topr",
    "dppo_tv",
    "dppo_kl",
)
# By loss: what its paper takes the mean of, where that is not all tokens.
OWN_AGGREGATION = {
    "gspo": "seq-mean-token-mean",
    "gmpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "topr": "seq-mean-token-sum",
}
COVARIANCE_LOSSES = ("clip_cov", "kl_cov")  # they choose tokens before the update
# kl is k1, mse is k2, low_var_kl is k3; a + takes the gradient of k2; full is no estimate.
KL_KINDS = ("kl", "k1", "k1+", "abs", "mse", "k2", "low_var_kl", "k3", "k3+", "full")
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """The coefficient of the KL in the reward."""

    type: str = option(
        "Constant, steered towards target_kl, or on a straight line from kl_coef to end_kl_coef.",
        "fixed",
        choices=("fixed", "adaptive", "linear"),
    )
    kl_coef: float = option("The coefficient (adaptive, linear: the first one).", 0.001, ge=0)
    target_kl: float = option("adaptive: the KL to reach, nats a token.", 0.1, gt=0)
    horizon: float = option(
        "adaptive: trajectories over which it adapts.",
        10000.0,
        gt=0,
        formula="coef <- coef (1 + clip(KL / target_kl - 1, -0.2, 0.2) trajectories / horizon)",
    )
    end_kl_coef: float | None = option("linear: the last coefficient, which then stays.", None, ge=0)
    schedule_steps: int | None = option(
        "linear: steps from the first to the last; null: the run.", None, ge=1
    )


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """The actor's objective."""

    loss_mode: str = option(
        "vanilla: PPO's clipped ratio. gspo, gmpo: ratios of whole trajectories (gmpo: clip_ratio_low and _high bound "
        "the logarithm of each token's ratio). cispo: clipped weights on the log-probs. sapo: a smooth gate in place "
        "of the clip. clip_cov, kl_cov: PPO, held back on the tokens whose log-prob and advantage go together most. "
        "gpg: advantage times log-prob. topr: the same, where the advantage is negative times the trajectory's ratio, at most 1. "
        "dppo_tv, dppo_kl: the ratio, without the tokens whose probability moved by more than clip_ratio_low or _high (dppo_kl: whose "
        "KL is more), the ratio at most clip_ratio_c. Or one of `plugins`.",
        "vanilla",
    )
    clip_cov_ratio: float = option(
        "clip_cov: share of a mini-batch's tokens that pass no gradient.", 0.0002, ge=0, le=1
    )
    clip_cov_lb: float = option(
        "clip_cov: they are drawn from the tokens whose covariance is above this.", 1.0
    )
    clip_cov_ub: float = option("clip_cov: and below this one.", 5.0)
    kl_cov_ratio: float = option(
        "kl_cov: share of a mini-batch's tokens, those of largest covariance, that pay a KL.",
        0.0002,
        ge=0,
        le=1,
    )
    ppo_kl_coef: float = option("kl_cov: weight of that KL to the policy before the step.", 1.0, ge=0)


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """Corrections for the difference between the engine's log-probs and the trainer's."""

    rollout_is: str | None = option(
        "Weigh the policy loss with the probability ratio trainer / engine (truncated importance sampling) of each "
        "token, or of the whole trajectory; null: no weights.",
        None,
        choices=("token", "sequence"),
    )
    rollout_is_threshold: float = option("rollout_is: no weight is larger.", 2.0, gt=0)
    rollout_rs: str | None = option(
        "Leave out tokens, or whole trajectories (sequence: by the product of their ratios, geometric: by its mean a "
        "token), whose ratio is out of bounds; second_moment: as few tokens as possible, those of the largest (log ratio)^2 of the "
        "batch, until its mean over the others is at most the threshold (M2PO, arXiv:2510.01161). null: none.",
        None,
        choices=("token", "sequence", "geometric", "second_moment"),
        refused={
            verl: f"write {ours}; verl bounds the engine's probabilities over the trainer's, megarl the trainer's over the engine's: of "
            "its bounds l_u give rollout_rs_threshold=1/l and rollout_rs_threshold_lower=1/u"
            for verl, ours in (
                ("token_k1", "token"),
                ("seq_sum_k1", "sequence"),
                ("seq_mean_k1", "geometric"),
            )
        },
    )
    rollout_rs_threshold: float | None = option(
        "rollout_rs: the largest ratio that stays; null: rollout_is_threshold. Of second_moment the bound of the mean; null: 0.04.",
        None,
        gt=0,
    )
    rollout_rs_threshold_lower: float | None = option(
        "rollout_rs: the smallest, but with second_moment; null: 1 / the largest.", None, ge=0
    )
    bypass_mode: bool = option(
        "Take the engine's log-probs as the old ones: no forward pass before the update. What is logged of their difference "
        "to the trainer's is then that of each step's first mini-batch.",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): groups that teach nothing are replaced."""

    enable: bool = option(
        "Leave out prompts whose responses all have the same metric, and generate for more prompts until "
        "data.train_batch_size are there. A run has as many steps as without, and goes through the data more often.",
        False,
    )
    metric: str = option(
        "score: what the reward gave; seq_reward: that with the overlong penalty; acc, or any other number that the "
        "reward gives by this name (acc: the score where it gives none).",
        "score",
    )
    max_num_gen_batches: int = option(
        "Most generations (of data.gen_batch_size prompts) for a step; 0: no limit.", 10, ge=0
    )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages and the KL in the reward."""

    adv_estimator: str = option(
        "gae has a critic; gdpo, gpg, grpo, grpo_passk, maxrl, opo, reinforce_plus_plus_baseline and rloo compare the responses to "
        "a prompt; gigpo also the turns that began in the same state; remax compares with the greedy response; reinforce_plus_plus with the whole step; spiral with the scores of the same player of the same data "
        "source in earlier games; or one of "
        "`plugins`.",
        "gae",
        formula="gae: A_t = sum_l (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}); grpo: (R - mean) / (std + 1e-6); "
        "grpo_passk: best R - second best, others 0; rloo: R - mean of the others; opo: R - sum(length R) / sum(length); "
        "gigpo: grpo of R and, weighted, of sum_k gamma^k r_{t+k} of turns t; gpg: alpha (R - mean); maxrl: (R - mean) / mean; gdpo: sum_k weight_k (R_k - mean) / (std + 1e-6), normalised over the step; "
        "reinforce_plus_plus_baseline: R - mean; remax: R - R(greedy); "
        "reinforce_plus_plus: A_t = r_t + gamma A_{t+1}; spiral: b <- decay b + (1 - decay) R, R - b",
    )
    gamma: float = option(
        "gae, reinforce_plus_plus: discount of a later reward, a token; gigpo: a turn (the paper: 0.95).",
        1.0,
        ge=0,
        le=1,
    )
    lam: float = option("gae: 1: returns as they came, 0: the critic alone.", 1.0, ge=0, le=1)
    whiten_advantages: bool = option(
        "gae, reinforce_plus_plus, reinforce_plus_plus_baseline: mean 0 and variance 1 over the step's tokens.",
        True,
    )
    reward_weights: dict[str, Any] | None = option(
        "gdpo: the rewards that are compared, each by itself, with their weights: numbers that the reward function gives to every response "
        "beside its score, by their names; score is the score itself.",
        None,
    )
    step_advantage_weight: float = option(
        "gigpo: weight of the comparison of turns beside that of whole trajectories.", 1.0, ge=0
    )
    baseline_decay: float = option(
        "spiral: what a player's baseline keeps with each game (the paper's alpha).", 0.95, ge=0, le=1
    )
    norm_adv_by_std_in_grpo: bool = option(
        "grpo, grpo_passk, gigpo: divide by the group's standard deviation (false: Dr. GRPO).", True
    )
    use_kl_in_reward: bool = option(
        "Take the KL to the reference policy off the reward.",
        False,
        formula="r_t = score at the last token - kl_coef KL_t",
    )
    kl_penalty: str = option(
        "Its estimator.",
        "kl",
        choices=KL_KINDS,
        formula="x = log p - log p_ref; kl, k1: x; abs: abs(x); mse, k2: x^2 / 2; low_var_kl, k3: exp(-x) - 1 + x, at most 10; "
        "k1+, k3+: their value, k2's gradient; full: sum over the vocabulary of p x",
    )
    kl_ctrl: KLControlConfig = section("Its coefficient.", KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = section(
        "Engine and trainer differ in their log-probs.", RolloutCorrectionConfig
    )
    filter_groups: FilterGroupsConfig = section("Dynamic sampling.", FilterGroupsConfig)
