import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.rollout_correction import CorrectionOptions, correct_rollout
from tests.algorithms.ragged_examples import brief, normal, offsets_of, ragged_masks, rows

# Ratios trainer / engine of two trajectories: 4, 0.5, (masked) and 1, 1.25; products 2 and 1.25, geometric means
# sqrt(2) and sqrt(1.25).
RATIOS = torch.tensor([4.0, 0.5, 1.0, 1.0, 1.25], dtype=torch.float64)
MASK = torch.tensor([True, True, False, True, True])
OFFSETS = offsets_of([3, 2])


def correct(**options):
    engine = torch.tensor([-1.0, -2.0, math.nan, -0.5, -1.5], dtype=torch.float64)
    return correct_rollout(engine + RATIOS.log(), engine, MASK, OFFSETS, CorrectionOptions(**options))


def test_token_weights_by_hand():
    found = correct(is_level="token", is_threshold=2.0)
    torch.testing.assert_close(found.weights, torch.tensor([2.0, 0.5, 1, 1, 1.25], dtype=torch.float64))
    assert torch.equal(found.mask, MASK)
    # before truncation (4 + 0.5 + 1 + 1.25) / 4; after: (4.75)^2 / (4 * (4 + 0.25 + 1 + 1.5625))
    assert found.metrics == pytest.approx(
        {
            "rollout_corr/is_weight_mean": 6.75 / 4,
            "rollout_corr/is_weight_min": 0.5,
            "rollout_corr/is_weight_max": 4.0,
            "rollout_corr/is_truncated": 0.25,
            "rollout_corr/is_eff_sample_size": 4.75**2 / (4 * 6.8125),
        }
    )


def test_sequence_weights_by_hand():
    found = correct(is_level="sequence", is_threshold=1.5)
    torch.testing.assert_close(found.weights, torch.tensor([1.5, 1.5, 1, 1.25, 1.25], dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        ({"rs_level": "token", "rs_upper": 2.5}, [False, True, False, True, True]),
        ({"rs_level": "token", "rs_upper": 5.0, "rs_lower": 1.1}, [True, False, False, False, True]),
        ({"rs_level": "sequence", "rs_upper": 1.5}, [False, False, False, True, True]),
        ({"rs_level": "geometric", "rs_upper": 1.5, "rs_lower": 1.2}, [True, True, False, False, False]),
        # without an upper bound of its own it has that of the weights; lower is its reciprocal
        ({"rs_level": "sequence", "is_threshold": 1.3}, [False, False, False, True, True]),
    ],
)
def test_rejection_by_hand(options, stays):
    found = correct(**options)
    assert found.mask.tolist() == stays
    assert found.weights is None
    gone = MASK & ~found.mask
    assert found.metrics["rollout_corr/rs_masked"] == int(gone.sum()) / 4
    touched = sum(bool(gone[row].any()) for row in rows(OFFSETS))
    assert found.metrics["rollout_corr/rs_seq_masked"] == touched / 2


def test_icepop_by_hand():
    """arXiv:2510.18855: a token's weight is its ratio if that is from 0.5 to 5, and otherwise the token is left out."""
    ratios, engine = torch.tensor([5.5, 0.4, 4.9, 0.6], dtype=torch.float64), torch.full((4,), -7.0).double()
    options = CorrectionOptions("token", 5.0, "token", rs_lower=0.5)
    found = correct_rollout(engine + ratios.log(), engine, torch.ones(4).bool(), offsets_of([3, 1]), options)
    expected = torch.tensor([0, 0, 4.9, 0.6], dtype=torch.float64)
    torch.testing.assert_close(found.weights * found.mask, expected)


def test_a_bound_of_the_second_moment_by_hand():
    """Squares of the log ratios: 1.9218, 0.4805, 0, 0.0498. M2PO's mask removes the largest ones until the mean of the rest is within the bound."""
    squares = RATIOS[MASK].log().square().tolist()
    stays = {0.7: [True, True, False, True, True], 0.2: [False, True, False, True, True]}
    stays |= {0.1: [False, False, False, True, True], 0.02: [False, False, False, True, False]}
    for bound, kept in stays.items():
        found = correct(rs_level="second_moment", rs_upper=bound)
        assert found.mask.tolist() == kept, bound
        assert found.metrics["rollout_corr/second_moment"] == pytest.approx(sum(squares) / 4)
        assert found.metrics["rollout_corr/rs_masked"] == 1 - sum(kept) / 4
    # Without a bound in the configuration AReaL's bound counts, 0.04.
    assert correct(rs_level="second_moment").mask.tolist() == stays[0.1]
    assert correct(rs_level="second_moment", is_threshold=9.0).mask.tolist() == stays[0.1]


@brief
@given(ragged_masks(), st.sampled_from([0.0, 0.04, 0.5, 3.0]), st.integers(0, 2**31))
def test_tokens_leave_one_by_one_until_the_second_moment_is_within_its_bound(ragged, bound, seed):
    mask, offsets = ragged
    old, engine = normal(mask.numel(), seed), normal(mask.numel(), seed + 1)
    options = CorrectionOptions(rs_level="second_moment", rs_upper=bound)
    found = correct_rollout(old, torch.where(mask, engine, math.nan), mask, offsets, options)
    squares = {token: float(old[token] - engine[token]) ** 2 for token in mask.nonzero().flatten().tolist()}
    while squares and sum(squares.values()) / len(squares) > bound:
        del squares[max(squares, key=squares.get)]
    assert found.mask.nonzero().flatten().tolist() == list(squares)


def test_equal_log_probs_change_nothing():
    same = torch.tensor([-1.0, -2.0])
    options = CorrectionOptions(is_level="sequence", rs_level="token")
    found = correct_rollout(same, same, torch.ones(2, dtype=torch.bool), offsets_of([2]), options)
    assert found.weights.tolist() == [1.0, 1.0]
    assert found.mask.all()


@brief
@given(
    ragged_masks(),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.integers(0, 2**31),
    st.randoms(),
)
def test_trajectories_are_corrected_by_themselves_in_any_order(ragged, weigh, reject, seed, rng):
    mask, offsets = ragged
    count = mask.numel()
    old, engine = normal(count, seed), normal(count, seed + 1)
    options = CorrectionOptions(is_level=weigh, rs_level=reject, rs_upper=3.0)
    poisoned = torch.where(mask, engine, math.nan)
    whole = correct_rollout(old, poisoned, mask, offsets, options)
    assert not (whole.mask & ~mask).any()
    order = list(range(offsets.numel() - 1))
    rng.shuffle(order)
    for row in order:
        part = rows(offsets)[row]
        own = correct_rollout(
            old[part], engine[part], mask[part], offsets_of([part.stop - part.start]), options
        )
        assert torch.equal(own.mask, whole.mask[part])
        if mask[part].any():
            torch.testing.assert_close(own.weights, whole.weights[part])
            assert (own.weights <= 2.0).all() and (own.weights > 0).all()
