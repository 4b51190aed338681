"""Advantage estimators on ragged trajectories (flat tensors with offsets, see the package docstring).

Guarantees
- Masked tokens (an environment's words inside a response, say) are no steps: a token's successor is the next
  live token of the same trajectory. They get advantage 0 and return 0.
- Groups are given by ids; the order of the trajectories never matters.
- Everything is computed in float64 and returned in the input's dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.ragged import check_ragged, live_offsets, reverse_scan, segment_ids, segment_sum
from megarl.plugins import Registry


@dataclass(frozen=True)
class AdvantageBatch:
    """What an estimator may look at: all trajectories of a train batch."""

    token_level_rewards: Tensor  # [tokens], 0 on masked tokens
    mask: Tensor  # bool [tokens]
    offsets: Tensor  # int64 [n + 1]
    values: Tensor | None = None  # [tokens], the critic's; for estimators with a critic
    prompt_uids: Sequence[str] | None = None  # [n]; for estimators that compare answers to one prompt


@dataclass(frozen=True)
class AdvantageOptions:
    """The settings of all estimators; each reads its own."""

    gamma: float = 1.0  # gae
    lam: float = 1.0  # gae
    whiten: bool = True  # gae
    norm_by_std: bool = True  # grpo


@dataclass(frozen=True)
class AdvantageResult:
    advantages: Tensor  # [tokens]
    returns: Tensor | None  # [tokens], the critic's targets; None where the estimator has no critic


Estimator = Callable[[AdvantageBatch, AdvantageOptions], AdvantageResult]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator", "algorithm.adv_estimator")
register_advantage = ESTIMATORS.register


def compute_advantages(name: str, batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    """Advantages (and returns) of a train batch by the estimator `name`.

    ValueError: unknown name; an input that the estimator needs is missing; a reward stands on a masked token.
    """
    estimate = ESTIMATORS[name]
    check_ragged(batch.offsets, batch.token_level_rewards, batch.mask)
    lost = int((batch.token_level_rewards[~batch.mask] != 0).sum())
    if lost:
        raise ValueError(
            f"{lost} non-zero token level rewards stand on masked tokens, where no advantage would see them; "
            "put each on the last unmasked token before it"
        )
    return estimate(batch, options)


def gae(
    token_level_rewards: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, arXiv:1506.02438.

    delta_t = r_t + gamma V_{t+1} - V_t (eq. 11) and A_t = sum_l (gamma lam)^l delta_{t+l} (eq. 16), over the live
    tokens of each trajectory; V after the last one is 0, for truncated trajectories too.

    Args: token_level_rewards, values: [tokens]; mask: bool [tokens]; offsets: int64 [n + 1].
    Returns: advantages (not whitened) and returns = advantages + values, both [tokens], 0 on masked tokens.
    """
    check_ragged(offsets, token_level_rewards, values, mask)
    live = mask.nonzero().squeeze(1)
    bounds = live_offsets(mask, offsets)
    rewards, live_values = token_level_rewards[live].double(), values[live].double()

    next_values = torch.cat([live_values[1:], live_values.new_zeros(1)])[: live.numel()]
    next_values[bounds[1:][bounds.diff() > 0] - 1] = 0.0
    deltas = rewards + gamma * next_values - live_values
    live_advantages = reverse_scan(deltas, bounds, gamma * lam)

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[live] = live_advantages.to(values.dtype)
    returns[live] = (live_advantages + live_values).to(values.dtype)
    return advantages, returns


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`x` scaled to variance 1, and with `shift_mean` to mean 0, over ALL live tokens given; 0 on masked ones.

    The variance is the unbiased one (divided by count - 1) and 1e-8 is added to it: the rule of verl and TRL,
    so that runs compare; at thousands of tokens the population variance differs by nothing that shows. Fewer
    than two live tokens have no spread and become 0 (their mean without `shift_mean`).
    Call it on the whole train batch: on a rank's share it would whiten with that share's moments.

    Args: x [tokens], mask bool [tokens]. Returns: [tokens], x's dtype.
    """
    live = x[mask].double()
    out = torch.zeros_like(x)
    if live.numel() == 0:
        return out
    mean = live.mean()
    centred = live - mean
    variance = centred.square().sum() / max(live.numel() - 1, 1)
    whitened = centred * (variance + 1e-8).rsqrt()
    out[mask] = (whitened if shift_mean else whitened + mean).to(x.dtype)
    return out


def grpo(scores: Tensor, group_ids: Sequence[str], norm_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantage of each trajectory, [n].

    (score - mean of its group) / (std of its group + eps): DeepSeekMath, arXiv:2402.03300, section 4.1.2
    (outcome supervision), with the unbiased std as verl and TRL compute it. `norm_by_std=False` leaves the
    division out (Dr. GRPO, arXiv:2503.20783).
    A group of one says nothing about its answer: advantage 0. (verl takes the score itself there, which is
    REINFORCE without a baseline, on another scale than the groups beside it.)

    Args: scores [n]; group_ids: n prompt ids, in any order.
    """
    assert len(group_ids) == scores.numel(), f"{len(group_ids)} group ids for {scores.numel()} scores"
    if scores.numel() == 0:
        return scores.clone()
    _, inverse = np.unique(np.asarray(group_ids), return_inverse=True)
    group = torch.from_numpy(inverse.astype(np.int64)).to(scores.device)
    size = torch.bincount(group).double()

    values = scores.double()
    mean = torch.zeros_like(size).index_add_(0, group, values) / size
    centred = torch.where(size[group] > 1, values - mean[group], 0.0)
    if norm_by_std:
        variance = torch.zeros_like(size).index_add_(0, group, centred.square()) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + eps)
    return centred.to(scores.dtype)


@register_advantage("gae")
def _estimate_gae(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    if batch.values is None:
        raise ValueError("algorithm.adv_estimator='gae' needs the critic's values; the batch has none")
    advantages, returns = gae(
        batch.token_level_rewards, batch.values, batch.mask, batch.offsets, options.gamma, options.lam
    )
    if options.whiten:
        advantages = masked_whiten(advantages, batch.mask)
    return AdvantageResult(advantages, returns)


@register_advantage("grpo")
def _estimate_grpo(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    if batch.prompt_uids is None:
        raise ValueError(
            "algorithm.adv_estimator='grpo' needs the prompt of each trajectory; the batch has none"
        )
    rewards = batch.token_level_rewards
    # The sum, not the score alone: it holds the KL penalty where that is part of the reward.
    scores = segment_sum(rewards.double(), batch.offsets)
    per_trajectory = grpo(scores, batch.prompt_uids, options.norm_by_std).to(rewards.dtype)
    advantages = torch.where(batch.mask, per_trajectory[segment_ids(batch.offsets)], 0.0)
    return AdvantageResult(advantages, None)
