"""The exact KL as a loss and in the reward, where the models have computed it."""

import math

import pytest
import torch

from megarl.algorithms.kl import FULL_KL, apply_kl_penalty
from megarl.algorithms.policy_loss import PolicyLossOptions, PolicyTokens, actor_loss

MASK = torch.tensor([True, True, False, True])
WEIGHTS = torch.tensor([0.5, 0.25, 9.0, 0.25])
KL = torch.tensor([0.1, 0.2, math.nan, 0.4])


def test_the_loss_is_the_weighted_sum_and_its_gradient_the_weights() -> None:
    full_kl, log_probs = KL.clone().requires_grad_(), torch.full((4,), -1.0, requires_grad=True)
    tokens = PolicyTokens(
        mask=MASK,
        weights=WEIGHTS,
        old_log_probs=log_probs.detach(),
        advantages=torch.zeros(4),
        full_kl=full_kl,
    )
    options = PolicyLossOptions(clip_low=0.2, clip_high=0.2, clip_c=3.0, kl_coef=0.1, kl_kind=FULL_KL)
    loss, sums = actor_loss(log_probs, None, tokens, options)
    loss.backward()
    # 0.5 * 0.1 + 0.25 * 0.2 + 0.25 * 0.4, without the masked token.
    assert sums["actor/kl_loss"].item() == pytest.approx(0.2)
    assert loss.item() == pytest.approx(0.1 * 0.2)
    torch.testing.assert_close(full_kl.grad, 0.1 * torch.where(MASK, WEIGHTS, 0.0))


def test_rewards_pay_it_at_every_live_token() -> None:
    """Two trajectories of two tokens; the second one's first token is masked."""
    rewards, mean = apply_kl_penalty(
        torch.tensor([1.0, 2.0]),
        torch.zeros(4),
        torch.zeros(4),
        MASK,
        torch.tensor([0, 2, 4]),
        0.5,
        FULL_KL,
        KL,
    )
    torch.testing.assert_close(rewards, torch.tensor([-0.05, 1.0 - 0.1, 0.0, 2.0 - 0.2]))
    assert mean == pytest.approx(((0.1 + 0.2) / 2 + 0.4) / 2)
