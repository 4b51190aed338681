"""The policy losses by name: the loss of each token, before weights (see `loss_inputs.PolicyLoss`).

A ratio is new probability / old probability. Log ratios are clamped to +-20, so that one broken token cannot make the
loss infinite; it then passes no gradient.
"""

import torch
from torch import Tensor

from megarl.algorithms.loss_inputs import (
    PolicyLossOptions,
    PolicyTokens,
    Sequences,
    Sums,
    register_policy_loss,
)


def log_ratio(log_probs: Tensor, tokens: PolicyTokens) -> Tensor:
    """log (new / old probability), clamped; [tokens]."""
    return (log_probs - tokens.old_log_probs).clamp(-20.0, 20.0)


@register_policy_loss("vanilla")
def vanilla(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate (arXiv:1707.06347 eq. 7), negated.

    max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); for A < 0 at most -A clip_c (dual clip, Ye et al.
    2020, arXiv:1912.09729). clip_high > clip_low is DAPO's clip-higher (arXiv:2503.14476, section 3.1).

    Sums: actor/pg_clipfrac (the clipped branch was the larger), actor/pg_clipfrac_lower (dual clip held).
    """
    losses, sums = _clipped(log_ratio(log_probs, tokens).exp(), tokens, options)
    dual = torch.zeros_like(tokens.mask)
    if options.clip_c is not None:
        assert options.clip_c > 1.0, f"the dual clip bound {options.clip_c} must be above 1"
        bound = -tokens.advantages * options.clip_c
        dual = (losses > bound) & (tokens.advantages < 0)
        losses = torch.where(dual, bound, losses)
    return losses, {**sums, "actor/pg_clipfrac_lower": dual.sum().double()}


@register_policy_loss("gspo")
def gspo(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """PPO's clip on the trajectory's ratio s_i = (pi / pi_old)^(1 / |y_i|) (GSPO, arXiv:2507.18071 eq. 5, 7).

    In its token form (eq. 13, 14): s_i,t = sg[s_i] pi_t / sg[pi_t] has s_i's value, and the gradient of token t goes
    through its own log-prob. With one advantage a trajectory and seq-mean-token-mean that is eq. 5 exactly.
    """
    sequences = _sequences(tokens, "gspo")
    own = log_ratio(log_probs, tokens)
    mean = sequences.spread(sequences.mean(own.detach(), tokens.mask)).to(own.dtype)
    return _clipped((mean + (own - own.detach())).exp(), tokens, options)


@register_policy_loss("gmpo")
def gmpo(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A times the geometric mean of the trajectory's ratios, each clipped by itself (GMPO, arXiv:2507.20673).

    The clip is on the LOGARITHM: to [-clip_low, clip_high] where that makes the objective smaller. The paper's range
    (e^-0.4, e^0.4) is clip_low = clip_high = 0.4.

    Sums: actor/pg_clipfrac (the token's ratio was clipped).
    """
    sequences = _sequences(tokens, "gmpo")
    own = log_ratio(log_probs, tokens)
    sign = tokens.advantages.sign()
    inside = own.clamp(-options.clip_low, options.clip_high)
    clipped = (sign * inside < sign * own) & tokens.mask
    mean = sequences.mean(torch.where(clipped, inside, own), tokens.mask)
    ratio = sequences.spread(mean.exp()).to(own.dtype)
    return -tokens.advantages * ratio, {"actor/pg_clipfrac": clipped.sum().double()}


@register_policy_loss("cispo")
def cispo(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log pi (CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4, 5).

    No token loses its gradient; its weight is bounded. The paper sets no lower bound: clip_low of 1 or more.

    Sums: actor/pg_clipfrac (the weight was bounded).
    """
    ratio = log_ratio(log_probs, tokens).detach().exp()
    bounded = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    clipped = (bounded != ratio) & tokens.mask
    return -bounded * tokens.advantages * log_probs, {"actor/pg_clipfrac": clipped.sum().double()}


@register_policy_loss("sapo")
def sapo(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A sigmoid(tau (ratio - 1)) 4 / tau (SAPO, arXiv:2511.20347 eq. 5, 6), tau = tau_pos for A > 0, else tau_neg.

    At ratio 1 the gate's slope is 1, as of the ratio itself; away from it the gradient fades instead of stopping.
    """
    ratio = log_ratio(log_probs, tokens).exp()
    positive = tokens.advantages > 0
    tau = torch.where(positive, options.tau_pos, options.tau_neg).to(ratio.dtype)
    return -tokens.advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau), {}


@register_policy_loss("clip_cov")
def clip_cov(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate, 0 on the selected tokens (Clip-Cov, arXiv:2505.22617).

    Sums: actor/pg_clipfrac as in `vanilla`, actor/cov_selected.
    """
    selected = _selected(tokens, "clip_cov")
    losses, sums = _clipped(log_ratio(log_probs, tokens).exp(), tokens, options)
    return torch.where(selected, 0.0, losses), {**sums, "actor/cov_selected": selected.sum().double()}


@register_policy_loss("kl_cov")
def kl_cov(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A ratio, plus ppo_kl_coef |log ratio| on the selected tokens (KL-Cov, arXiv:2505.22617; |.| as in verl).

    Sums: actor/cov_selected.
    """
    selected = _selected(tokens, "kl_cov")
    own = log_ratio(log_probs, tokens)
    penalty = torch.where(selected, options.ppo_kl_coef * own.abs(), 0.0)
    return -tokens.advantages * own.exp() + penalty, {"actor/cov_selected": selected.sum().double()}


@register_policy_loss("gpg")
def gpg(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A log pi: the policy gradient without a ratio (GPG, arXiv:2504.02546)."""
    return -tokens.advantages * log_probs, {}


def _clipped(ratio: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    count = (tokens.mask & (clipped > unclipped)).sum().double()
    return torch.maximum(unclipped, clipped), {"actor/pg_clipfrac": count}


def _sequences(tokens: PolicyTokens, name: str) -> Sequences:
    assert tokens.sequences is not None, f"{name} needs to know which trajectory each token belongs to"
    return tokens.sequences


def _selected(tokens: PolicyTokens, name: str) -> Tensor:
    assert tokens.selected is not None, f"{name} needs the tokens that were selected over the mini-batch"
    return tokens.selected & tokens.mask
