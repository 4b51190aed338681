"""Weights and masks against the difference of the probabilities that the sampling engine and the trainer give a token.

With r_t = trainer's / engine's probability of token t, from the old log-probs:

- importance weights (truncated importance sampling): the policy loss of a token is multiplied with min(r, threshold);
  r is the token's, or the whole trajectory's (the product of its live tokens' ratios);
- rejection (masked importance sampling): tokens, or whole trajectories, whose r is not in [lower, upper] leave the
  mask, so that nothing afterwards counts them; or as many tokens as the second moment of log r asks for.

Weights and bounds as in verl's `rollout_correction`, see F. Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025), and J. Liu et al., "When Speed Kills Stability" (2025). Log ratios are clamped to +-20. The
second moment's mask is M2PO's (H. Zheng et al., "Prosperity before Collapse", arXiv:2510.01161), its usual bound is from
AReaL's example (examples/math/gsm8k_m2po.yaml).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.ragged import check_ragged, segment_ids, segment_sum

LEVELS = ("token", "sequence", "geometric")
SECOND_MOMENT, SECOND_MOMENT_BOUND = "second_moment", 0.04


@dataclass(frozen=True)
class CorrectionOptions:
    """Levels are of LEVELS (weights: not geometric), of rejection also SECOND_MOMENT, whose bound is `rs_upper` (None: SECOND_MOMENT_BOUND);
    None: no weights, no rejection."""

    is_level: str | None = None
    is_threshold: float = 2.0
    rs_level: str | None = None
    rs_upper: float | None = None  # None: is_threshold, but for SECOND_MOMENT
    rs_lower: float | None = None  # None: 1 / the upper bound


@dataclass(frozen=True)
class Correction:
    mask: Tensor  # bool [tokens], the live tokens that stay
    weights: Tensor | None  # [tokens], no gradient, 1 on tokens that are not live; None: all are 1
    metrics: dict[str, float]


def correct_rollout(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    offsets: Tensor,
    options: CorrectionOptions,
) -> Correction:
    """Weights and the remaining mask of a train batch; flat [tokens] with offsets [n + 1].

    Weights are of the trajectory as it was sampled: rejected tokens count in its ratio.

    Metrics: rollout_corr/is_weight_{mean,min,max} over live tokens before truncation (of "sequence": each as often as
    the trajectory has tokens), rollout_corr/is_truncated (share of live tokens whose weight was cut),
    rollout_corr/is_eff_sample_size (of the weights: (sum w)^2 / (count sum w^2), 1 with equal weights);
    rollout_corr/rs_masked (share of live tokens rejected), rollout_corr/rs_seq_masked (of trajectories with one);
    with SECOND_MOMENT rollout_corr/second_moment, the mean over live tokens of (log r)^2 before rejection.
    """
    check_ragged(offsets, old_log_probs, rollout_log_probs, mask)
    live = int(mask.sum())
    if live == 0 or (options.is_level is None and options.rs_level is None):
        return Correction(mask, None, {})
    log_ratio = torch.where(mask, old_log_probs.double() - rollout_log_probs.double(), 0.0)
    metrics: dict[str, float] = {}
    weights = None
    if options.is_level is not None:  # truncated importance sampling
        ratio = _ratio(log_ratio, mask, offsets, options.is_level)
        weights = ratio.clamp(max=options.is_threshold)
        kept = weights[mask]
        metrics |= {
            "rollout_corr/is_weight_mean": float(ratio[mask].mean()),
            "rollout_corr/is_weight_min": float(ratio[mask].min()),
            "rollout_corr/is_weight_max": float(ratio[mask].max()),
            "rollout_corr/is_truncated": float((ratio[mask] > options.is_threshold).double().mean()),
            "rollout_corr/is_eff_sample_size": float(kept.sum() ** 2 / (live * kept.square().sum())),
        }
        weights = torch.where(mask, weights, 1.0).to(old_log_probs.dtype)
    if options.rs_level is not None:  # masked importance sampling
        if options.rs_level == SECOND_MOMENT:
            bound = SECOND_MOMENT_BOUND if options.rs_upper is None else options.rs_upper
            squares = log_ratio.clamp(-20.0, 20.0).square()
            rejected = _largest(squares, mask, bound)
            metrics["rollout_corr/second_moment"] = float(squares[mask].mean())
        else:
            upper = options.rs_upper if options.rs_upper is not None else options.is_threshold
            lower = options.rs_lower if options.rs_lower is not None else 1.0 / upper
            ratio = _ratio(log_ratio, mask, offsets, options.rs_level)
            rejected = mask & ~((ratio >= lower) & (ratio <= upper))
        touched = segment_sum(rejected, offsets) > 0
        trained = segment_sum(mask, offsets) > 0
        metrics |= {
            "rollout_corr/rs_masked": int(rejected.sum()) / live,
            "rollout_corr/rs_seq_masked": int(touched.sum()) / int(trained.sum()),
        }
        mask = mask & ~rejected
    return Correction(mask, weights, metrics)


def _largest(values: Tensor, mask: Tensor, bound: float) -> Tensor:
    """The fewest live tokens of the largest values without which the mean of the others is at most `bound`; bool [tokens]."""
    ascending, order = values[mask].sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, ascending.numel() + 1)
    stay = int((means <= bound).sum())  # means of more and more values, in ascending order, do not fall
    found = torch.zeros_like(mask)
    found[mask.nonzero().squeeze(1)[order[stay:]]] = True
    return found


def _ratio(log_ratio: Tensor, mask: Tensor, offsets: Tensor, level: str) -> Tensor:
    """The probability ratio at `level`, at each token; [tokens]."""
    assert level in LEVELS, level
    if level != "token":
        total = segment_sum(log_ratio, offsets)
        if level == "geometric":
            total = total / segment_sum(mask, offsets).clamp(min=1)
        log_ratio = total[segment_ids(offsets)]
    return log_ratio.clamp(-20.0, 20.0).exp()
