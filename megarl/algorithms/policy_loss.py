"""The actor's losses on packed tokens: sums with weights, and sums for the metrics.

Guarantees
- Every returned number is a sum over the tokens given: results of micro-batches and ranks that hold different
  tokens are added, never averaged.
- What stands on a masked token (NaN included) changes neither value nor gradient.
- With log_probs equal to old_log_probs every ratio is exactly 1 and the KL exactly 0.

One's own policy loss, in a file that the configuration names in `plugins` (see `loss_inputs.PolicyLoss`):

    @register_policy_loss("mine")
    def mine(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]: ...
"""

from dataclasses import replace

import torch
from torch import Tensor

from megarl.algorithms.kl import FULL_KL, kl_estimate
from megarl.algorithms.loss_inputs import (
    POLICY_LOSSES,
    PolicyLossOptions,
    PolicyTokens,
    Sequences,
    Sums,
    register_policy_loss,
)
from megarl.algorithms.policy_losses import log_ratio

__all__ = [
    "POLICY_LOSSES",
    "PolicyLossOptions",
    "PolicyTokens",
    "Sequences",
    "Sums",
    "actor_loss",
    "policy_loss",
    "register_policy_loss",
]


def actor_loss(
    log_probs: Tensor, entropy: Tensor | None, tokens: PolicyTokens, options: PolicyLossOptions
) -> tuple[Tensor, Sums]:
    """The actor's whole loss: the policy loss, minus the entropy bonus, plus the KL loss.

    Args: log_probs [tokens] and entropy [tokens] (or None: not measured; only with entropy_coef 0) carry the
    gradient. Returns: the loss as a scalar sum, ready for backward(), and the sums for the metrics.
    """
    loss, sums = policy_loss(log_probs, tokens, options)
    if entropy is not None:
        bonus, entropy_sums = entropy_bonus(entropy, tokens.mask, tokens.weights)
        sums |= entropy_sums
        if options.entropy_coef != 0.0:
            loss = loss - options.entropy_coef * bonus
    else:
        assert options.entropy_coef == 0.0, "an entropy bonus needs the entropy"
    if options.kl_kind is not None:
        kl, kl_sums = kl_loss(log_probs, tokens, options.kl_kind)
        sums |= kl_sums
        loss = loss + options.kl_coef * kl
    sums["actor/loss"] = loss.detach().double()
    return loss, sums


def policy_loss(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """The policy loss `options.loss_mode`, summed with the weights (and importance weights, if there are).

    ValueError: an unknown name, or a loss of a plugin that is not one number a token.

    Sums: actor/pg_loss (weighted loss); over live tokens: actor/tokens, actor/ppo_kl (old - new log-prob),
    actor/log_ratio_abs (its absolute value), actor/ratio, and those of the loss itself.
    """
    mask, zero = tokens.mask, log_probs.new_zeros(())
    log_probs = torch.where(mask, log_probs, zero)
    clean = _without_masked(tokens)
    losses, own_sums = POLICY_LOSSES[options.loss_mode](log_probs, clean, options)
    if losses.shape != mask.shape:
        raise ValueError(
            f"{POLICY_LOSSES.key}={options.loss_mode!r} returned losses of shape {list(losses.shape)} for a micro-batch of "
            f"{mask.numel()} tokens; it must be one number a token"
        )
    weights = clean.weights
    if clean.rollout_is_weights is not None:
        weights = weights * clean.rollout_is_weights
    loss = (weights * torch.where(mask, losses, zero)).sum()
    change = log_ratio(log_probs.detach(), clean)
    return loss, {
        "actor/pg_loss": loss.detach().double(),
        "actor/tokens": mask.sum().double(),
        "actor/ppo_kl": _total(-change),
        "actor/log_ratio_abs": _total(change.abs()),
        "actor/ratio": _total(torch.where(mask, change.exp(), zero)),
        **own_sums,
    }


def entropy_bonus(entropy: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """The weighted sum of the policy's entropy (nats), to be SUBTRACTED from the loss times its coefficient.

    Sums: actor/entropy, the plain sum over live tokens.
    """
    zero = entropy.new_zeros(())
    entropy = torch.where(mask, entropy, zero)
    return (torch.where(mask, weights, zero) * entropy).sum(), {"actor/entropy": _total(entropy)}


def kl_loss(log_probs: Tensor, tokens: PolicyTokens, kind: str) -> tuple[Tensor, Sums]:
    """The weighted sum of the KL to the reference, before its coefficient: of `tokens.full_kl` (kind kl.FULL_KL), else of
    its estimate (see kl.kl_estimate).

    Sums: actor/kl_loss, the weighted sum itself.
    """
    mask, weights, zero = tokens.mask, tokens.weights, log_probs.new_zeros(())
    if kind == FULL_KL:
        assert tokens.full_kl is not None, "the exact KL comes with the log-probs"
        estimate = torch.where(mask, tokens.full_kl, zero)
    else:
        assert tokens.ref_log_probs is not None, "a KL loss needs the reference policy's log-probs"
        ref_log_probs = torch.where(mask, tokens.ref_log_probs, zero)
        estimate = kl_estimate(torch.where(mask, log_probs, zero), ref_log_probs, kind)
    loss = (torch.where(mask, weights, zero) * estimate).sum()
    return loss, {"actor/kl_loss": loss.detach().double()}


def _without_masked(tokens: PolicyTokens) -> PolicyTokens:
    """The inputs of the policy loss with 0 on masked tokens: multiplied by 0 a NaN would stay one."""

    def clean(x: Tensor) -> Tensor:
        return torch.where(tokens.mask, x, x.new_zeros(()))

    weights, selected = tokens.rollout_is_weights, tokens.selected
    return replace(
        tokens,
        weights=clean(tokens.weights),
        old_log_probs=clean(tokens.old_log_probs),
        advantages=clean(tokens.advantages),
        rollout_is_weights=None if weights is None else clean(weights),
        selected=None if selected is None else clean(selected),
    )


def _total(x: Tensor) -> Tensor:
    return x.detach().double().sum()
