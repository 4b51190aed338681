"""The actor's losses on packed tokens: sums with weights, and sums for the metrics.

Guarantees
- Every returned number is a sum over the tokens given: results of micro-batches and ranks that hold different
  tokens are added, never averaged.
- What stands on a masked token (NaN included) changes neither value nor gradient.
- With log_probs equal to old_log_probs every ratio is exactly 1 and the KL exactly 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.kl import kl_estimate

Sums = dict[str, Tensor]  # metric name -> float64 scalar without gradient; see megarl/algorithms/metrics.py


@dataclass(frozen=True)
class PolicyTokens:
    """One micro-batch's inputs on a rank, each [tokens] and aligned with the log-probs."""

    mask: Tensor  # bool; True where a response token is predicted and trained
    weights: Tensor  # float32, from aggregate.token_weights
    old_log_probs: Tensor
    advantages: Tensor
    ref_log_probs: Tensor | None = None  # needed for the KL loss


@dataclass(frozen=True)
class PolicyLossOptions:
    clip_low: float  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float
    clip_c: float | None  # dual clip bound for negative advantages, > 1; None: no such bound
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str | None = None  # one of kl.KL_KINDS; None: no KL loss


def actor_loss(
    log_probs: Tensor, entropy: Tensor | None, tokens: PolicyTokens, options: PolicyLossOptions
) -> tuple[Tensor, Sums]:
    """The actor's whole loss: PPO, minus the entropy bonus, plus the KL loss.

    Args: log_probs [tokens] and entropy [tokens] (or None: not measured; only with entropy_coef 0) carry the
    gradient. Returns: the loss as a scalar sum, ready for backward(), and the sums for the metrics.
    """
    loss, sums = ppo_loss(
        log_probs,
        tokens.old_log_probs,
        tokens.advantages,
        tokens.mask,
        tokens.weights,
        options.clip_low,
        options.clip_high,
        options.clip_c,
    )
    if entropy is not None:
        bonus, entropy_sums = entropy_bonus(entropy, tokens.mask, tokens.weights)
        sums |= entropy_sums
        if options.entropy_coef != 0.0:
            loss = loss - options.entropy_coef * bonus
    else:
        assert options.entropy_coef == 0.0, "an entropy bonus needs the entropy"
    if options.kl_kind is not None:
        assert tokens.ref_log_probs is not None, "a KL loss needs the reference policy's log-probs"
        kl, kl_sums = kl_loss(log_probs, tokens.ref_log_probs, tokens.mask, tokens.weights, options.kl_kind)
        sums |= kl_sums
        loss = loss + options.kl_coef * kl
    sums["actor/loss"] = loss.detach().double()
    return loss, sums


def ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347 eq. 7), negated, summed with `weights`.

    A token's loss is max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); for A < 0 at most -A clip_c
    (dual clip, Ye et al. 2020, arXiv:1912.09729). log ratio is clamped to +-20 so that one broken token cannot
    make the loss infinite (it then passes no gradient).

    Sums: actor/pg_loss (weighted loss); over live tokens: actor/tokens, actor/ppo_kl (old - new log-prob),
    actor/ratio, actor/pg_clipfrac (the clipped branch was the larger), actor/pg_clipfrac_lower (dual clip held).
    """
    assert clip_c is None or clip_c > 1.0, f"the dual clip bound {clip_c} must be above 1"
    zero = log_probs.new_zeros(())
    # `where` before the arithmetic, not a product after it: 0 * NaN would be NaN.
    log_ratio = torch.where(mask, log_probs - old_log_probs, zero).clamp(-20.0, 20.0)
    advantages = torch.where(mask, advantages, zero)
    weights = torch.where(mask, weights, zero)

    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    dual = torch.zeros_like(mask)
    if clip_c is not None:
        bound = -advantages * clip_c
        dual = (losses > bound) & (advantages < 0)
        losses = torch.where(dual, bound, losses)
    loss = (weights * losses).sum()

    sums = {
        "actor/pg_loss": loss.detach().double(),
        "actor/tokens": mask.sum().double(),
        "actor/ppo_kl": _total(-log_ratio),
        "actor/ratio": _total(torch.where(mask, ratio, zero)),
        "actor/pg_clipfrac": (mask & (clipped > unclipped)).sum().double(),
        "actor/pg_clipfrac_lower": dual.sum().double(),
    }
    return loss, sums


def entropy_bonus(entropy: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """The weighted sum of the policy's entropy (nats), to be SUBTRACTED from the loss times its coefficient.

    Sums: actor/entropy, the plain sum over live tokens.
    """
    zero = entropy.new_zeros(())
    entropy = torch.where(mask, entropy, zero)
    return (torch.where(mask, weights, zero) * entropy).sum(), {"actor/entropy": _total(entropy)}


def kl_loss(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, weights: Tensor, kind: str
) -> tuple[Tensor, Sums]:
    """The weighted sum of the KL estimate to the reference (see kl.kl_estimate), before its coefficient.

    Sums: actor/kl_loss, the weighted sum itself.
    """
    zero = log_probs.new_zeros(())
    estimate = kl_estimate(torch.where(mask, log_probs, zero), torch.where(mask, ref_log_probs, zero), kind)
    loss = (torch.where(mask, weights, zero) * estimate).sum()
    return loss, {"actor/kl_loss": loss.detach().double()}


def _total(x: Tensor) -> Tensor:
    return x.detach().double().sum()
