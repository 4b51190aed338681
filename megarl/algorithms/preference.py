"""The loss of a reward model on rankings: pairs of texts of which one is better.

Rankings come one after the other; `offsets` bound the texts of each, as everywhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pairs:
    """Texts that are compared.

    Attributes:
        better, worse: int64 [pairs]; numbers of texts.
        weights: float32 [pairs]; one over the pairs of the ranking.
    """

    better: Tensor
    worse: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> "Pairs":
        return Pairs(self.better.to(device), self.worse.to(device), self.weights.to(device))


def ranking_pairs(scores: Tensor, offsets: Tensor) -> Pairs:
    """All pairs of texts of the same ranking whose scores differ.

    Args:
        scores: [texts]; greater is better.
        offsets: int64 [rankings + 1].
    """
    better, worse, weights = [], [], []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        own = scores[start:end]
        first, second = (own[:, None] > own[None, :]).nonzero(as_tuple=True)
        better.append(start + first)
        worse.append(start + second)
        weights.append(torch.full((len(first),), 1.0 / max(1, len(first))))
    return Pairs(torch.cat(better), torch.cat(worse), torch.cat(weights))


def preference_loss(
    rewards: Tensor, pairs: Pairs, margins: Tensor, num_rankings: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The reward model's loss (InstructGPT, arXiv:2203.02155, eq. 1, with Llama 2's margin, arXiv:2307.09288, eq. 2):

        -1/N sum over rankings of 1/P sum over its P pairs of log sigmoid(r_better - r_worse - margin)

    P is K(K-1)/2 for K texts without ties. Losses are sums: N is that of the whole batch, `rewards` may be a part of it.

    Args:
        rewards: float32 [texts].
        margins: float32 [texts]; of the ranking that each text is of.
        num_rankings: N.

    Returns: the loss; sums over pairs of what is logged: `loss` (as above, times N), and over pairs `pairs`, `accuracy`
    (better ones with the greater reward; equal rewards count half) and `margin` (r_better - r_worse).
    """
    difference = rewards[pairs.better] - rewards[pairs.worse]
    losses = -torch.nn.functional.logsigmoid(difference - margins[pairs.better])
    total = (pairs.weights * losses).sum()
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    sums = {
        "loss": total.double(),
        "pairs": torch.tensor(float(len(difference)), dtype=torch.float64, device=rewards.device),
        "accuracy": right.sum(),
        "margin": difference.double().sum(),
    }
    return total / num_rankings, sums


def preference_metrics(sums: dict[str, float], num_rankings: int) -> dict[str, float]:
    """Means of the sums of `preference_loss`: the loss over rankings, the others over pairs."""
    pairs = sums["pairs"]
    return {
        "loss": sums["loss"] / num_rankings,
        "accuracy": sums["accuracy"] / pairs,
        "margin": sums["margin"] / pairs,
    }
