import math

import pytest
import torch

from megarl.algorithms.dpo import dpo_loss, dpo_metrics
from megarl.algorithms.preference import ranking_pairs


def by_hand(kind: str, smoothing: float = 0.0):
    """A pair with h = 1.5 and a ranking of three with h = 1, 3, 2; beta 0.5."""
    ratios = torch.tensor([1.0, -0.5, -1.0, 2.0, 1.0], requires_grad=True)
    pairs = ranking_pairs(torch.tensor([1.0, 0.0, 1.0, 3.0, 2.0]), torch.tensor([0, 2, 5]))
    return ratios, *dpo_loss(ratios, pairs, 2, 0.5, smoothing, kind)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_sigmoid_loss_of_pairs_and_rankings(smoothing: float) -> None:
    def loss(h: float) -> float:
        return (1 - smoothing) * softplus(-0.5 * h) + smoothing * softplus(0.5 * h)

    ratios, found, sums = by_hand("sigmoid", smoothing)
    assert found.item() == pytest.approx((loss(1.5) + (loss(1.0) + loss(3.0) + loss(2.0)) / 3) / 2)
    found.backward()
    # of the pair alone: d loss / d h over 2 rankings
    step = -0.5 * ((1 - smoothing) / (1 + math.exp(0.75)) - smoothing / (1 + math.exp(-0.75)))
    assert ratios.grad[:2].tolist() == pytest.approx([step / 2, -step / 2])
    metrics = dpo_metrics({name: value.item() for name, value in sums.items()}, 2)
    assert metrics == pytest.approx(
        {
            "loss": found.item(),
            "accuracy": 1.0,
            "margin": 0.5 * (1.5 + 1 + 3 + 2) / 4,
            "reward_better": 0.5 * (1.0 + 2.0 + 2.0 + 1.0) / 4,
            "reward_worse": 0.5 * (-0.5 + 1.0 - 1.0 - 1.0) / 4,
        }
    )


def test_ipo_wants_a_difference_of_one_over_two_beta() -> None:
    _, found, _ = by_hand("ipo")
    assert found.item() == pytest.approx((0.25 + (0.0 + 4.0 + 1.0) / 3) / 2)


def test_equal_chats_count_half() -> None:
    pairs = ranking_pairs(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 2, 4]))
    _, sums = dpo_loss(torch.tensor([1.0, 1.0, 0.0, 2.0]), pairs, 2, 0.1, 0.0, "sigmoid")
    assert sums["accuracy"].item() == 0.5
