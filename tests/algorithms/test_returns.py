import statistics
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.returns import gae, masked_whiten, reward_to_go
from tests.algorithms.ragged_examples import normal, offsets_of, ragged_masks, repeatable, rows


def test_gae_by_hand():
    # gamma 0.9, lam 0.5, so gamma lam = 0.45.
    # First:  delta_3 = 1 - 0.7 = 0.3; delta_2 = 0.9*0.7 - 0.6 = 0.03; delta_1 = 0.9*0.6 - 0.5 = 0.04
    #         A_3 = 0.3; A_2 = 0.03 + 0.45*0.3 = 0.165; A_1 = 0.04 + 0.45*0.165 = 0.11425
    # Second: delta_2 = -1 - 0.2 = -1.2; delta_1 = 0.5 + 0.9*0.2 - 0.1 = 0.58; A_1 = 0.58 + 0.45*-1.2 = 0.04
    advantages, returns = gae(
        torch.tensor([0.0, 0.0, 1.0, 0.5, -1.0]),
        torch.tensor([0.5, 0.6, 0.7, 0.1, 0.2]),
        torch.ones(5, dtype=torch.bool),
        offsets_of([3, 2]),
        gamma=0.9,
        lam=0.5,
    )
    torch.testing.assert_close(advantages, torch.tensor([0.11425, 0.165, 0.3, 0.04, -1.2]))
    torch.testing.assert_close(returns, torch.tensor([0.61425, 0.765, 1.0, 0.14, -1.0]))


def test_masked_tokens_are_no_steps():
    # The first trajectory of test_gae_by_hand with masked tokens before, between and after its three.
    mask = torch.tensor([False, True, False, False, True, True, False])
    values = torch.tensor([9.0, 0.5, float("nan"), 9.0, 0.6, 0.7, 9.0])
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    advantages, returns = gae(rewards, values, mask, offsets_of([7]), gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([0.0, 0.11425, 0.0, 0.0, 0.165, 0.3, 0.0]))
    torch.testing.assert_close(returns, torch.tensor([0.0, 0.61425, 0.0, 0.0, 0.765, 1.0, 0.0]))


def gae_from_k_step_returns(rewards, values, gamma, lam):
    """The definition (arXiv:1506.02438, eq. 14 and 16's first line): the exponentially weighted mean of k-step
    advantages; those that look past the end are all equal, so the last carries the rest of the weight."""
    n = len(rewards)
    advantages = []
    for t in range(n):
        k_step = []
        for k in range(1, n - t + 1):
            rest = gamma**k * values[t + k] if t + k < n else 0.0
            k_step.append(sum(gamma**i * rewards[t + i] for i in range(k)) + rest - values[t])
        weights = [(1 - lam) * lam**i for i in range(len(k_step))]
        weights[-1] = lam ** (len(k_step) - 1)
        advantages.append(sum(w * a for w, a in zip(weights, k_step, strict=True)))
    return advantages


@repeatable
@given(ragged_masks(), st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_definition(ragged, seed, gamma, lam):
    mask, offsets = ragged
    rewards = normal(mask.numel(), seed) * mask
    values = normal(mask.numel(), seed + 1)
    advantages, returns = gae(rewards, values, mask, offsets, gamma, lam)
    expected = torch.zeros_like(values)
    for row in rows(offsets):
        live = mask[row]
        numbers = gae_from_k_step_returns(rewards[row][live].tolist(), values[row][live].tolist(), gamma, lam)
        expected[row][live] = torch.tensor(numbers, dtype=torch.float64)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values * mask)


def test_gae_handles_1024_trajectories_of_1024_tokens_in_a_second():
    offsets = offsets_of([1024] * 1024)
    tokens = int(offsets[-1])
    rewards, values = torch.randn(tokens), torch.randn(tokens)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        gae(rewards, values, torch.ones(tokens, dtype=torch.bool), offsets, 0.99, 0.95)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1.0  # measured: 0.1 s on one core


def test_whitening_by_hand():
    # Live: 0, 2, 4: mean 2, unbiased variance (4 + 0 + 4) / 2 = 4, std 2.
    x = torch.tensor([0.0, float("nan"), 2.0, 4.0, 77.0])
    mask = torch.tensor([True, False, True, True, False])
    torch.testing.assert_close(masked_whiten(x, mask), torch.tensor([-1.0, 0.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(
        masked_whiten(x, mask, shift_mean=False), torch.tensor([1.0, 0.0, 2.0, 3.0, 0.0])
    )


@repeatable
@given(st.lists(st.tuples(st.floats(-100, 100), st.booleans()), min_size=2))
def test_whitened_live_tokens_have_mean_0_and_variance_1(pairs):
    x = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    mask = torch.tensor([flag for _, flag in pairs])
    live = x[mask].tolist()
    whitened = masked_whiten(x, mask)
    assert (whitened[~mask] == 0).all()
    if len(live) >= 2 and statistics.variance(live) > 1e-2:
        out = whitened[mask].tolist()
        assert statistics.mean(out) == pytest.approx(0, abs=1e-9)
        assert statistics.variance(out) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("live", [0, 1, 11])
def test_whitening_without_spread_gives_zeros(live):
    x = torch.full((11,), 0.1)  # in float32 the mean of these is not 0.1, and the rest would be blown up
    mask = torch.arange(11) < live
    assert torch.equal(masked_whiten(x, mask), torch.zeros(11))


def test_reward_to_go_by_hand():
    # gamma 0.5. First: 4; 2 + 0.5*4 = 4; (masked); 1 + 0.5*4 = 3. Second: -2.
    rewards = torch.tensor([1.0, 0.0, 2.0, 4.0, -2.0])
    mask = torch.tensor([True, False, True, True, True])
    to_go = reward_to_go(rewards, mask, offsets_of([4, 1]), gamma=0.5)
    torch.testing.assert_close(to_go, torch.tensor([3.0, 0.0, 4.0, 4.0, -2.0]))


@repeatable
@given(ragged_masks(), st.integers(0, 2**31), st.floats(0, 1))
def test_reward_to_go_is_gae_without_a_critic_and_with_lam_1(ragged, seed, gamma):
    mask, offsets = ragged
    rewards = normal(mask.numel(), seed) * mask
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, offsets, gamma, lam=1.0)
    torch.testing.assert_close(reward_to_go(rewards, mask, offsets, gamma), advantages)
