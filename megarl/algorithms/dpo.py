"""Direct preference optimization: the policy's own log-probabilities as rewards of a Bradley-Terry model."""

from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.preference import Pairs

LossType = Literal["sigmoid", "ipo"]


def dpo_loss(
    log_ratios: Tensor,
    pairs: Pairs,
    num_rankings: int,
    beta: float,
    label_smoothing: float,
    loss_type: LossType,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over rankings of the mean over their pairs of, with h = log_ratio[better] - log_ratio[worse],

        sigmoid   -log sigmoid(beta h)                       (DPO, arXiv:2305.18290, equation 7)
                  -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)   with label smoothing e: a part e of the labels
                                                             is taken for wrong (conservative DPO)
        ipo       (h - 1 / (2 beta))^2                       (IPO, arXiv:2310.12036, equation 17)

    Losses are sums: `num_rankings` is that of the whole batch, of which `log_ratios` may be a part.

    Args:
        log_ratios: float [texts]; log pi(response) - log pi_ref(response), in nats, sums over tokens.

    Returns: the loss []; sums: `loss` (as above, times num_rankings), and over pairs `pairs` (their number), `accuracy`
        (h > 0; equal ones count half), `margin` (beta h), `reward_better` and `reward_worse` (the implicit rewards
        beta log_ratio).
    """
    difference = log_ratios[pairs.better] - log_ratios[pairs.worse]
    if loss_type == "ipo":
        losses = (difference - 1 / (2 * beta)).square()
    else:
        log_sigmoid = torch.nn.functional.logsigmoid
        losses = -(1 - label_smoothing) * log_sigmoid(beta * difference)
        losses = losses - label_smoothing * log_sigmoid(-beta * difference)
    total = (pairs.weights * losses).sum()
    rewards = beta * log_ratios.detach().double()
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    sums = {
        "loss": total.detach().double(),
        "pairs": torch.tensor(float(len(difference)), dtype=torch.float64, device=log_ratios.device),
        "accuracy": right.sum(),
        "margin": (rewards[pairs.better] - rewards[pairs.worse]).sum(),
        "reward_better": rewards[pairs.better].sum(),
        "reward_worse": rewards[pairs.worse].sum(),
    }
    return total / num_rankings, sums


def dpo_metrics(sums: dict[str, float], num_rankings: int) -> dict[str, float]:
    """Means of the sums of `dpo_loss`: the loss over rankings, the others over pairs."""
    means = {name: value / sums["pairs"] for name, value in sums.items() if name not in ("loss", "pairs")}
    return {"loss": sums["loss"] / num_rankings, **means}
