import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.metrics import add_sums, reduce_metrics
from megarl.algorithms.value_loss import value_loss
from tests.algorithms.ragged_examples import normal, repeatable

# clip 0.2
#   v    v_old   R    (v - R)^2   clipped v   (clipped v - R)^2
#   1.0  0.5     2    1           0.7         1.69   clipped
#   2.0  1.9     1    1           2.0         1
#   0.0  0.4    -1    1           0.2         1.44   clipped


def hand_example():
    values = torch.tensor([1.0, 2.0, 0.0, math.nan], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.5, 1.9, 0.4, math.nan], dtype=torch.float64)
    returns = torch.tensor([2.0, 1.0, -1.0, math.inf], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    weights = torch.full((4,), 1 / 3, dtype=torch.float64)
    return values, old, returns, mask, weights


def test_value_loss_by_hand():
    values, *rest = hand_example()
    loss, sums = value_loss(values, *rest, clip=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1.69 + 1 + 1.44) / 3)
    # Where the clipped value counts, the gradient is 0; elsewhere it is (v - R) / 3.
    torch.testing.assert_close(values.grad, torch.tensor([0, 1 / 3, 0, 0], dtype=torch.float64))
    # R: mean 2/3, mean square 2, variance 2 - 4/9 = 14/9
    # R - v_old = 1.5, -0.9, -1.4: mean -0.8/3, mean square 5.02/3, variance 15.06/9 - 0.64/9 = 14.42/9
    # explained variance: 1 - 14.42/14 = -0.03
    assert reduce_metrics(sums) == pytest.approx(
        {
            "critic/vf_loss": 0.5 * 4.13 / 3,
            "critic/vf_clipfrac": 2 / 3,
            "critic/vpred_mean": 1.0,
            "critic/vf_explained_var": -0.03,
        }
    )


def test_values_within_the_range_are_not_counted_as_clipped():
    """For many values old + (v - old) differs from v by rounding, so that its loss may be larger."""
    old, values, returns = (normal(1000, seed).float() for seed in range(3))
    within = (values - old).abs() < 0.4
    assert (old + (values - old) != values)[within].any()
    loss, sums = value_loss(values, old, returns, within, torch.ones(1000), 0.5)
    assert sums["critic/vf_clipfrac"] == 0
    assert loss == value_loss(values, old, returns, within, torch.ones(1000), None)[0]


def test_without_clipping_it_is_half_the_squared_error():
    loss, sums = value_loss(*hand_example(), clip=None)
    assert loss.item() == pytest.approx(0.5)  # three errors of 1
    assert sums["critic/vf_clipfrac"] == 0


@repeatable
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=20), st.integers(0, 2**31))
def test_micro_batches_add_up_to_the_mini_batch(tokens, seed):
    owner = torch.tensor([part for part, _ in tokens])
    mask = torch.tensor([live for _, live in tokens])
    old, returns, weights, start = (normal(len(tokens), seed + i) for i in range(4))

    def run(parts):
        values = start.clone().requires_grad_()
        all_sums = []
        for part in parts:
            loss, sums = value_loss(values[part], old[part], returns[part], mask[part], weights[part], 0.5)
            loss.backward()
            all_sums.append(sums)
        return values.grad, reduce_metrics(add_sums(all_sums))

    whole = run([torch.arange(len(tokens))])
    split = run([(owner == k).nonzero().flatten() for k in range(3)])
    torch.testing.assert_close(split[0], whole[0])
    assert split[1] == pytest.approx(whole[1], rel=1e-6, abs=1e-9)


def test_explained_variance_of_a_perfect_and_a_constant_critic():
    returns = torch.tensor([1.0, 2.0, 4.0])
    mask, weights = torch.ones(3, dtype=torch.bool), torch.ones(3)
    for old, expected in ((returns, 1.0), (torch.full((3,), 5.0), 0.0)):
        metrics = reduce_metrics(value_loss(returns, old, returns, mask, weights, 0.5)[1])
        assert metrics["critic/vf_explained_var"] == pytest.approx(expected)
    same = torch.full((3,), 0.1)
    assert "critic/vf_explained_var" not in reduce_metrics(value_loss(same, old, same, mask, weights, 0.5)[1])
