"""The tokens whose log-prob and advantage go together most: they drive the policy's entropy down.

"The Entropy Mechanism of Reinforcement Learning", arXiv:2505.22617: the entropy falls with the covariance of a token's
log-prob and its advantage, most of which a few tokens make.

Here a mini-batch's tokens are chosen before it is cut into micro-batches, from the OLD log-probs (the paper's are those
of the policy at each update, the same in a step's first update). Chosen per micro-batch, as verl does, the choice
would depend on how the mini-batch is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClipCov:
    """`share` of the live tokens (one at least, as in verl), drawn among those with low < covariance < high."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class KLCov:
    """`share` of the live tokens (one at least, as in verl), those of largest covariance."""

    share: float


def select_tokens(
    rule: ClipCov | KLCov, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, seed: int
) -> Tensor:
    """The chosen tokens of a whole mini-batch; everything flat [tokens], the result bool.

    Args:
        seed: of what `ClipCov` draws.
    """
    covariance = token_covariance(old_log_probs, advantages, mask)
    live = mask.nonzero().squeeze(1)
    wanted = max(int(rule.share * live.numel()), 1)
    if isinstance(rule, KLCov):
        ranked = live[covariance[live].argsort(descending=True, stable=True)]
    else:
        candidates = live[(covariance[live] > rule.low) & (covariance[live] < rule.high)]
        generator = torch.Generator().manual_seed(seed)
        ranked = candidates[torch.randperm(candidates.numel(), generator=generator)]
    chosen = torch.zeros_like(mask)
    chosen[ranked[:wanted]] = True
    return chosen


def token_covariance(old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log-prob - its mean) (advantage - its mean), means over all live tokens; float64 [tokens], 0 on masked ones."""
    out = torch.zeros(mask.numel(), dtype=torch.float64)
    log_probs, live = old_log_probs[mask].double(), advantages[mask].double()
    if live.numel() > 0:
        out[mask] = (log_probs - log_probs.mean()) * (live - live.mean())
    return out
