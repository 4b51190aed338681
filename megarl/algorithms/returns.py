"""From token level rewards to returns and advantages, token by token: GAE, rewards to go, whitening."""

import torch
from torch import Tensor

from megarl.algorithms.ragged import check_ragged, live_offsets, reverse_scan


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


def reward_to_go(token_level_rewards: Tensor, mask: Tensor, offsets: Tensor, gamma: float) -> Tensor:
    """What each live token earns from itself on: G_t = r_t + gamma G_{t+1} over its trajectory's live tokens.

    Args: token_level_rewards [tokens]; mask: bool [tokens]; offsets: int64 [n + 1].
    Returns: [tokens], the rewards' dtype, 0 on masked tokens.
    """
    check_ragged(offsets, token_level_rewards, mask)
    live = mask.nonzero().squeeze(1)
    sums = reverse_scan(token_level_rewards[live].double(), live_offsets(mask, offsets), gamma)
    out = torch.zeros_like(token_level_rewards)
    out[live] = sums.to(out.dtype)
    return out
