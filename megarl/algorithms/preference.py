"""Losses on rankings, as pairs of a better and a worse response: of reward models, and of direct preference optimization. And KTO, whose
responses are each desirable or not.

Rankings come one after the other; `offsets` bound the texts of each. DPO takes the policy's own log-probabilities as
rewards of a Bradley-Terry model.
"""

from dataclasses import dataclass
from typing import Literal

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

    P is K(K-1)/2 for K texts without ties. Losses are sums: N counts the whole batch, `rewards` may be a part of it.

    Args:
        rewards: float32 [texts].
        margins: float32 [texts]; the margin of each text's ranking.
        num_rankings: N.

    Returns: the loss; sums for the metrics: `loss` (as above, times N), and over pairs `pairs` (their number), `accuracy`
    (better ones with the greater reward; equal rewards count half) and `margin` (r_better - r_worse).
    """
    difference = rewards[pairs.better] - rewards[pairs.worse]
    losses = -torch.nn.functional.logsigmoid(difference - margins[pairs.better])
    total = (pairs.weights * losses).sum()
    sums = {"loss": total.double(), **_counts(difference), "margin": difference.double().sum()}
    return total / num_rankings, sums


def _counts(difference: Tensor) -> dict[str, Tensor]:
    """The number of pairs, and how many of them are in the right order; equal ones count half."""
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    number = torch.tensor(float(len(difference)), dtype=torch.float64, device=difference.device)
    return {"pairs": number, "accuracy": right.sum()}


LossType = Literal["sigmoid", "ipo", "simpo", "orpo"]
# Losses whose responses' log-probs are means over tokens, compared with nothing.
WITHOUT_REFERENCE = ("simpo", "orpo")


@dataclass(frozen=True)
class DPOOptions:
    """The settings of `dpo_loss`. `gamma`: simpo's margin."""

    beta: float
    label_smoothing: float = 0.0
    loss_type: LossType = "sigmoid"
    gamma: float = 0.0


def dpo_loss(
    log_ratios: Tensor, lengths: Tensor, pairs: Pairs, num_rankings: int, options: DPOOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over rankings of the mean over their pairs of, with h = log_ratio[better] - log_ratio[worse],

        sigmoid   -log sigmoid(beta h)                       (DPO, arXiv:2305.18290, equation 7)
                  -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)   with label smoothing e: a part e of the labels
                                                             is taken for wrong (conservative DPO)
        ipo       (h - 1 / (2 beta))^2                       (IPO, arXiv:2310.12036, equation 17)

    and without a reference, with m = log pi(response) / its tokens,

        simpo     -log sigmoid(beta (m[better] - m[worse]) - gamma)       (SimPO, arXiv:2405.14734)
        orpo      -m[better] - beta log sigmoid(o[better] - o[worse]), o = m - log(1 - exp m), the log of the odds
                                                             (ORPO, arXiv:2403.07691, equations 4 and 7 as TRL's ORPOTrainer has them)

    Losses are sums: `num_rankings` counts the whole batch, `log_ratios` may be a part of it.

    Args:
        log_ratios: float [texts]; log pi(response) - log pi_ref(response), in nats, sums over tokens; without a reference log pi(response).
        lengths: [texts]; trained tokens of each.

    Returns: the loss []; sums: `loss` (as above, times num_rankings), and over pairs `pairs` (their number), `accuracy`
        (h > 0, or m's difference; equal ones count half), `margin` (beta times that), `reward_better` and `reward_worse` (the implicit
        rewards beta log_ratio, or beta m).
    """
    beta, smoothing, log_sigmoid = options.beta, options.label_smoothing, torch.nn.functional.logsigmoid
    each = log_ratios / lengths if options.loss_type in WITHOUT_REFERENCE else log_ratios
    difference = each[pairs.better] - each[pairs.worse]
    # The losses of the pairs; below they are weighted, so that rankings count alike.
    if options.loss_type == "ipo":
        losses = (difference - 1 / (2 * beta)).square()
    elif options.loss_type == "simpo":
        losses = -log_sigmoid(beta * difference - options.gamma)
    elif options.loss_type == "orpo":
        odds = each - torch.log(-torch.expm1(each.clamp(max=-1e-6)))
        losses = -each[pairs.better] - beta * log_sigmoid(odds[pairs.better] - odds[pairs.worse])
    else:
        losses = -(1 - smoothing) * log_sigmoid(beta * difference)
        losses = losses - smoothing * log_sigmoid(-beta * difference)
    total = (pairs.weights * losses).sum()
    rewards = beta * each.detach().double()
    sums = {
        "loss": total.detach().double(),
        **_counts(difference),
        "margin": (rewards[pairs.better] - rewards[pairs.worse]).sum(),
        "reward_better": rewards[pairs.better].sum(),
        "reward_worse": rewards[pairs.worse].sum(),
    }
    return total / num_rankings, sums


def ranking_metrics(sums: dict[str, float], num_rankings: int) -> dict[str, float]:
    """Means of the sums of `preference_loss` or `dpo_loss`: the loss over rankings, the others over pairs."""
    means = {name: value / sums["pairs"] for name, value in sums.items() if name not in ("loss", "pairs")}
    return {"loss": sums["loss"] / num_rankings, **means}


@dataclass(frozen=True)
class KTOOptions:
    """The settings of `kto_loss`. `beta`: as DPO's; the weights are of the losses of desirable and of undesirable responses."""

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


def kto_loss(
    log_ratios: Tensor, desirable: Tensor, baseline: float, num_examples: int, options: KTOOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """KTO (arXiv:2402.01306, equation 7, as TRL's KTOTrainer has it): the mean over examples of

        desirable_weight (1 - sigmoid(beta (log_ratio - baseline)))       of a desirable response
        undesirable_weight (1 - sigmoid(beta (baseline - log_ratio)))     of an undesirable one

    The loss is a sum: `num_examples` counts the whole batch, `log_ratios` may be a part of it.

    Args:
        log_ratios: float [texts]; log pi(response) - log pi_ref(response), in nats, sums over tokens.
        desirable: bool [texts].
        baseline: of the whole batch, in nats: `kto_baseline`.

    Returns: the loss []; sums: `loss` (as above, times num_examples), the numbers of `desirable` and `undesirable` responses, and over these
        `reward_desirable` and `reward_undesirable` (beta log_ratio).
    """
    lead = torch.where(desirable, log_ratios - baseline, baseline - log_ratios)
    weights = torch.where(desirable, options.desirable_weight, options.undesirable_weight)
    total = (weights * (1 - torch.sigmoid(options.beta * lead))).sum()
    rewards, good = options.beta * log_ratios.detach().double(), desirable.double()
    sums = {
        "loss": total.detach().double(),
        "desirable": good.sum(),
        "undesirable": (1 - good).sum(),
        "reward_desirable": (good * rewards).sum(),
        "reward_undesirable": ((1 - good) * rewards).sum(),
    }
    return total / num_examples, sums


def kto_baseline(log_ratios: Tensor) -> float:
    """How far the policy is from the reference, in nats: the mean of log pi(y'|x) - log pi_ref(y'|x), or 0 where that is negative.

    It estimates KL(pi || pi_ref) by responses y' to other prompts (arXiv:2402.01306). No gradient goes through it.

    Args:
        log_ratios: float [texts].
    """
    return max(0.0, log_ratios.double().mean().item())


def labelled_metrics(sums: dict[str, float], num_examples: int, baseline: float) -> dict[str, float]:
    """Means of the sums of `kto_loss`; the reward of a label that no example has is left out, and so is `margin`, the difference of rewards."""
    rewards = {
        f"reward_{label}": sums[f"reward_{label}"] / sums[label]
        for label in ("desirable", "undesirable")
        if sums[label] > 0
    }
    found = {"loss": sums["loss"] / num_examples, "kl_baseline": baseline, **rewards}
    if len(rewards) == 2:
        found["margin"] = rewards["reward_desirable"] - rewards["reward_undesirable"]
    return found
