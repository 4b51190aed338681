"""Section `algorithm`: advantages and the KL in the reward; names of what the algorithms offer."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.
# ruff: noqa: RUF009

from dataclasses import dataclass

from megarl.config.options import option, section

ADV_ESTIMATORS = ("gae", "grpo")
KL_KINDS = ("kl", "abs", "mse", "low_var_kl")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


@dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """The coefficient of the KL in the reward."""

    type: str = option("Constant, or steered towards target_kl.", "fixed", choices=("fixed", "adaptive"))
    kl_coef: float = option("The coefficient (adaptive: the first one).", 0.001, ge=0)
    target_kl: float = option("adaptive: the KL to reach, nats a token.", 0.1, gt=0)
    horizon: float = option("adaptive: trajectories over which it adapts.", 10000.0, gt=0)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages and the KL in the reward."""

    adv_estimator: str = option("gae has a critic, grpo compares responses; or one of `plugins`.", "gae")
    gamma: float = option("gae: discount of a later reward, a token.", 1.0, ge=0, le=1)
    lam: float = option("gae: 1: returns as they came, 0: the critic alone.", 1.0, ge=0, le=1)
    whiten_advantages: bool = option("gae: mean 0 and variance 1 over the step.", True)
    norm_adv_by_std_in_grpo: bool = option("grpo: divide by the group's standard deviation.", True)
    use_kl_in_reward: bool = option("Take the KL to the reference policy off the reward.", False)
    kl_penalty: str = option("Its estimator.", "kl", choices=KL_KINDS)
    kl_ctrl: KLControlConfig = section("Its coefficient.", KLControlConfig)
