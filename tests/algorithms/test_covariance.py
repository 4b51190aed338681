import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.covariance import ClipCov, KLCov, select_tokens, token_covariance
from tests.algorithms.ragged_examples import normal, repeatable

# Live: log-probs -1, -2, -3, -2 (mean -2), advantages 2, 0, -4, 2 (mean 0): covariances 1*2, 0*0, -1*-4, 0*2.
OLD = torch.tensor([-1.0, math.nan, -2.0, -3.0, -2.0])
ADVANTAGES = torch.tensor([2.0, math.nan, 0.0, -4.0, 2.0])
MASK = torch.tensor([True, False, True, True, True])


def test_covariance_by_hand():
    assert token_covariance(OLD, ADVANTAGES, MASK).tolist() == [2.0, 0.0, 0.0, 4.0, 0.0]


def test_the_largest_share_pays_a_kl():
    assert select_tokens(KLCov(0.5), OLD, ADVANTAGES, MASK, 0).tolist() == [True, False, False, True, False]
    # a quarter, and one at least
    for share in (0.25, 0.0002):
        found = select_tokens(KLCov(share), OLD, ADVANTAGES, MASK, 0)
        assert found.tolist() == [False, False, False, True, False]


def test_tokens_between_the_bounds_are_drawn():
    # covariances over 1 and under 5: tokens 0 and 3; a quarter of 4 is one of them, all of both are two
    drawn = {
        tuple(select_tokens(ClipCov(0.25, 1, 5), OLD, ADVANTAGES, MASK, seed).tolist()) for seed in range(20)
    }
    assert drawn == {(True, False, False, False, False), (False, False, False, True, False)}
    both = select_tokens(ClipCov(1.0, 1, 5), OLD, ADVANTAGES, MASK, 0)
    assert both.tolist() == [True, False, False, True, False]
    assert not select_tokens(ClipCov(1.0, 4, 5), OLD, ADVANTAGES, MASK, 0).any()


@repeatable
@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(0, 2**31),
    st.sampled_from([ClipCov(0.3, -0.5, 0.5), KLCov(0.3)]),
)
def test_no_more_than_the_share_and_none_that_is_masked(flags, seed, rule):
    mask = torch.tensor(flags)
    chosen = select_tokens(rule, normal(len(flags), seed), normal(len(flags), seed + 1), mask, seed)
    assert not (chosen & ~mask).any()
    assert int(chosen.sum()) <= max(int(0.3 * int(mask.sum())), 1)
    again = select_tokens(rule, normal(len(flags), seed), normal(len(flags), seed + 1), mask, seed)
    assert torch.equal(chosen, again)


def test_a_mini_batch_without_live_tokens():
    none = torch.zeros(3, dtype=torch.bool)
    for rule in (ClipCov(1.0, -9, 9), KLCov(1.0)):
        assert not select_tokens(rule, torch.ones(3), torch.ones(3), none, 0).any()
    assert pytest.approx(0) == float(token_covariance(torch.ones(3), torch.ones(3), none).sum())
