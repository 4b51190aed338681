"""KL to the reference policy: per-token estimators, and the penalty in the reward."""

import torch
from torch import Tensor

from megarl.algorithms.ragged import check_ragged, live_offsets, segment_sum

KL_KINDS = ("kl", "k1", "k1+", "abs", "mse", "k2", "low_var_kl", "k3", "k3+")
FULL_KL = "full"  # no estimate: KL(policy || reference) over the whole vocabulary, which the models compute
_SAME = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy || reference) in nats at each token, from tokens that the policy sampled; any shape.

    With r = log_probs - ref_log_probs (J. Schulman, "Approximating KL divergence", 2020):
    "kl" or "k1": r, unbiased, may be negative; "abs": |r|; "mse" or "k2": r^2 / 2, biased, low variance;
    "low_var_kl" or "k3": exp(-r) - 1 + r, unbiased and >= 0 (DeepSeekMath eq. 4).
    k3 is clamped where verl clamps it: r to +-20 before the exponential, the estimate to at most 10; a clamped
    token passes no gradient.
    As a LOSS on the policy's own samples the kinds differ by their expected gradients: k1's is zero (it pulls
    nowhere), k2's is that of KL(policy || reference), k3's that of KL(reference || policy). "k1+" and "k3+" have the
    value of k1 and k3 with the gradient of k2.
    """
    kind = _SAME.get(kind, kind)
    if kind in ("k1+", "k3+"):
        value = kl_estimate(log_probs, ref_log_probs, kind[:2])
        steered = kl_estimate(log_probs, ref_log_probs, "mse")
        return value.detach() + (steered - steered.detach())
    log_ratio = log_probs - ref_log_probs
    if kind == "kl":
        return log_ratio
    if kind == "abs":
        return log_ratio.abs()
    if kind == "mse":
        return 0.5 * log_ratio.square()
    if kind == "low_var_kl":
        # Without the inner clamp exp() overflows to inf, and the outer clamp's gradient 0 * inf is NaN.
        bounded = log_ratio.clamp(-20.0, 20.0)
        return (torch.exp(-bounded) - 1.0 + bounded).clamp(max=10.0)
    raise ValueError(f"KL estimator {kind!r} is unknown; known: {', '.join(KL_KINDS)}")


def place_scores(scores: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Token level rewards [tokens]: each trajectory's score on its last live token, 0 elsewhere.

    A trajectory without a live token has no place for its score: it takes no part in training.
    Args: scores [n], mask bool [tokens], offsets int64 [n + 1]. Returns scores' dtype.
    """
    check_ragged(offsets, mask)
    assert scores.numel() == offsets.numel() - 1, (
        f"{scores.numel()} scores, {offsets.numel() - 1} trajectories"
    )
    live = mask.nonzero().squeeze(1)
    bounds = live_offsets(mask, offsets)
    trained = bounds.diff() > 0
    rewards = torch.zeros(mask.numel(), dtype=scores.dtype, device=scores.device)
    rewards[live[bounds[1:][trained] - 1]] = scores[trained]
    return rewards


def apply_kl_penalty(
    scores: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    offsets: Tensor,
    coef: float,
    kind: str,
    full_kl: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Rewards with the KL to the reference taken off at every live token (Ziegler et al. 2019, section 2.2).

    Args: scores [n]; log-probs [tokens]; mask bool [tokens]; offsets int64 [n + 1]; coef: the controller's; full_kl
    [tokens]: the exact KL, needed for the kind FULL_KL.
    Returns: token level rewards [tokens] (score on the last live token, minus coef * KL), and the KL for the
    controller and the log: nats a token, mean over live tokens of each trajectory, then over trajectories with
    a live token (verl's definition, so `target_kl` means the same).
    """
    check_ragged(offsets, old_log_probs, ref_log_probs, mask)
    if kind == FULL_KL:
        assert full_kl is not None, "the exact KL comes with the log-probs"
        each = full_kl
    else:
        each = kl_estimate(old_log_probs, ref_log_probs, kind)
    kl = torch.where(mask, each, 0.0)
    rewards = place_scores(scores, mask, offsets) - coef * kl
    lengths = segment_sum(mask, offsets)
    trained = lengths > 0
    if not bool(trained.any()):
        return rewards, 0.0
    mean_kl = (segment_sum(kl.double(), offsets)[trained] / lengths[trained]).mean()
    return rewards, float(mean_kl)
