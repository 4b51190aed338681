import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.aggregate import LOSS_AGG_MODES, loss_counts, token_weights
from megarl.algorithms.metrics import add_sums, reduce_metrics
from megarl.algorithms.policy_loss import PolicyLossOptions, PolicyTokens, actor_loss, ppo_loss
from tests.algorithms.ragged_examples import normal, ragged_masks, repeatable

# clip_low 0.2, clip_high 0.28, clip_c 3, weights 0.2; the last token is masked.
#   A   ratio  -A ratio  -A clip(ratio)   loss
#   1   1.5    -1.5      -1.28            -1.28  clipped
#   1   0.5    -0.5      -0.8             -0.5
#  -1   0.5     0.5       0.8              0.8   clipped
#  -1   2       2         1.28             2
#  -2   4       8         2.56             6     dual clip: 2 * 3
RATIOS = [1.5, 0.5, 0.5, 2.0, 4.0]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0, -2.0]


def hand_example():
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0, math.nan], dtype=torch.float64)
    log_ratio = torch.tensor([*map(math.log, RATIOS), 0.0], dtype=torch.float64)
    log_probs = (old + log_ratio).requires_grad_()
    advantages = torch.tensor([*ADVANTAGES, math.inf], dtype=torch.float64)
    mask = torch.tensor([True] * 5 + [False])
    weights = torch.full((6,), 0.2, dtype=torch.float64)
    return log_probs, old, advantages, mask, weights


def test_ppo_loss_by_hand():
    log_probs, *rest = hand_example()
    loss, sums = ppo_loss(log_probs, *rest, clip_low=0.2, clip_high=0.28, clip_c=3.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.2 * (-1.28 - 0.5 + 0.8 + 2 + 6))  # 1.404
    # d loss / d log_prob = weight * -A ratio where the ratio's own branch holds, else 0
    torch.testing.assert_close(log_probs.grad, torch.tensor([0, -0.1, 0, 0.4, 0, 0], dtype=torch.float64))
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {
            "actor/pg_loss": 1.404,
            "actor/tokens": 5,
            "actor/ppo_kl": -math.log(1.5 * 0.5 * 0.5 * 2 * 4),  # sum of old - new = -ln 3
            "actor/ratio": 8.5,
            "actor/pg_clipfrac": 2,
            "actor/pg_clipfrac_lower": 1,
        }
    )


def test_without_the_dual_clip():
    loss, sums = ppo_loss(*hand_example(), clip_low=0.2, clip_high=0.28, clip_c=None)
    assert loss.item() == pytest.approx(0.2 * (-1.28 - 0.5 + 0.8 + 2 + 8))
    assert sums["actor/pg_clipfrac_lower"] == 0


def test_on_policy_the_ratio_is_exactly_1_and_the_gradient_the_policy_gradient():
    old = torch.randn(50)
    log_probs = old.clone().requires_grad_()
    advantages, mask, weights = torch.randn(50), torch.rand(50) < 0.7, torch.rand(50)
    loss, sums = ppo_loss(log_probs, old, advantages, mask, weights, 0.2, 0.2, 3.0)
    loss.backward()
    assert sums["actor/ratio"] == sums["actor/tokens"] == mask.sum()
    assert sums["actor/ppo_kl"] == sums["actor/pg_clipfrac"] == sums["actor/pg_clipfrac_lower"] == 0
    torch.testing.assert_close(log_probs.grad, -advantages * weights * mask)


def test_a_broken_token_leaves_the_loss_finite():
    log_probs = torch.tensor([0.0], requires_grad=True)
    one = torch.ones(1)
    loss, _ = ppo_loss(log_probs, torch.tensor([-500.0]), -one, one.bool(), one, 0.2, 0.2, None)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20.0))
    assert log_probs.grad.item() == 0.0


def test_actor_loss_by_hand():
    # 2 live tokens, weights 1/2, ratio 1, A = 1 and -3: pg loss = (-1 + 3) / 2 = 1
    # entropy 0.4 and 0.8: bonus 0.6. KL (mse): r = 0.2 and -0.4: (0.02 + 0.08) / 2 = 0.05
    # loss = 1 - 0.1 * 0.6 + 2 * 0.05 = 1.04
    old = torch.tensor([-1.0, -2.0, -9.0])
    tokens = PolicyTokens(
        mask=torch.tensor([True, True, False]),
        weights=torch.tensor([0.5, 0.5, 0.0]),
        old_log_probs=old,
        advantages=torch.tensor([1.0, -3.0, 7.0]),
        ref_log_probs=torch.tensor([-1.2, -1.6, math.nan]),
    )
    log_probs = old.clone().requires_grad_()
    entropy = torch.tensor([0.4, 0.8, math.nan], requires_grad=True)
    options = PolicyLossOptions(0.2, 0.2, 3.0, entropy_coef=0.1, kl_coef=2.0, kl_kind="mse")
    loss, sums = actor_loss(log_probs, entropy, tokens, options)
    loss.backward()
    assert loss.item() == pytest.approx(1.04)
    # 0.5 * (-A) + 2 * 0.5 * r: -0.5 + 0.2 and 1.5 - 0.4
    torch.testing.assert_close(log_probs.grad, torch.tensor([-0.3, 1.1, 0.0]))
    torch.testing.assert_close(entropy.grad, torch.tensor([-0.05, -0.05, 0.0]))
    assert reduce_metrics(sums) == pytest.approx(
        {
            "actor/loss": 1.04,
            "actor/pg_loss": 1.0,
            "actor/kl_loss": 0.05,
            "actor/entropy": 0.6,
            "actor/ratio_mean": 1.0,
            "actor/ppo_kl": 0.0,
            "actor/pg_clipfrac": 0.0,
            "actor/pg_clipfrac_lower": 0.0,
        }
    )


def test_the_entropy_is_only_measured_without_a_coefficient():
    old, mask = torch.tensor([-1.0]), torch.tensor([True])
    tokens = PolicyTokens(mask, torch.ones(1), old, torch.ones(1))
    log_probs = old.clone().requires_grad_()
    entropy = torch.tensor([0.4], requires_grad=True)
    loss, sums = actor_loss(log_probs, entropy, tokens, PolicyLossOptions(0.2, 0.2, 3.0))
    loss.backward()
    assert loss.item() == -1.0
    assert entropy.grad is None
    assert sums["actor/entropy"].item() == pytest.approx(0.4)
    assert "actor/entropy" not in actor_loss(log_probs, None, tokens, PolicyLossOptions(0.2, 0.2, 3.0))[1]


FULL = PolicyLossOptions(0.2, 0.3, 2.0, entropy_coef=0.01, kl_coef=0.1, kl_kind="low_var_kl")


@repeatable
@given(ragged_masks(), st.sampled_from(LOSS_AGG_MODES), st.integers(0, 2**31), st.data())
def test_micro_batches_add_up_to_the_mini_batch(ragged, mode, seed, data):
    """Loss, gradient and metrics of any split of the tokens (trajectories over micro-batches and data parallel
    ranks, tokens of one trajectory over context parallel ranks) are those of one call over everything."""
    mask, offsets = ragged
    count = mask.numel()
    weights = token_weights(mode, mask, offsets, loss_counts(mask, offsets)).double()
    old, advantages, ref = normal(count, seed), normal(count, seed + 1), normal(count, seed + 2)
    start = old + 0.5 * normal(count, seed + 3)
    owner = torch.tensor(
        data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), dtype=torch.int64
    )

    def run(parts):
        log_probs = start.clone().requires_grad_()
        entropy = normal(count, seed + 4).abs().requires_grad_()
        all_sums = []
        for part in parts:
            tokens = PolicyTokens(mask[part], weights[part], old[part], advantages[part], ref[part])
            loss, sums = actor_loss(log_probs[part], entropy[part], tokens, FULL)
            loss.backward()
            all_sums.append(sums)
        return log_probs.grad, entropy.grad, reduce_metrics(add_sums(all_sums))

    whole = run([torch.arange(count)])
    split = run([(owner == k).nonzero().flatten() for k in range(4)])
    torch.testing.assert_close(split[0], whole[0])
    torch.testing.assert_close(split[1], whole[1])
    assert split[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-9)


@repeatable
@given(ragged_masks(), st.integers(0, 2**31), st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_what_stands_on_masked_tokens_never_matters(ragged, seed, poison):
    mask, _ = ragged
    count = mask.numel()
    columns = [normal(count, seed + i) for i in range(6)]  # log-probs, entropy, weights, old, advantages, ref

    def run(columns):
        log_probs, entropy = (column.clone().requires_grad_() for column in columns[:2])
        loss, sums = actor_loss(log_probs, entropy, PolicyTokens(mask, *columns[2:]), FULL)
        loss.backward()
        return loss.detach(), log_probs.grad, entropy.grad, *sums.values()

    clean = run(columns)
    poisoned = run([torch.where(mask, column, poison) for column in columns])
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)
