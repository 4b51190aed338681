"""Each policy loss against numbers worked by hand from its paper's formula."""

import math

import pytest
import torch

from megarl.algorithms.policy_loss import PolicyLossOptions, PolicyTokens, Sequences, policy_loss

# clip_low 0.2, clip_high 0.28, clip_c 3, weights 0.2; the last token is masked.
#   A   ratio  -A ratio  -A clip(ratio)   loss
#   1   1.5    -1.5      -1.28            -1.28  clipped
#   1   0.5    -0.5      -0.8             -0.5
#  -1   0.5     0.5       0.8              0.8   clipped
#  -1   2       2         1.28             2
#  -2   4       8         2.56             6     dual clip: 2 * 3
RATIOS = [1.5, 0.5, 0.5, 2.0, 4.0]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0, -2.0]


def hand_example(selected=None, ids=None):
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0, math.nan], dtype=torch.float64)
    log_ratio = torch.tensor([*map(math.log, RATIOS), 0.0], dtype=torch.float64)
    tokens = PolicyTokens(
        mask=torch.tensor([True] * 5 + [False]),
        weights=torch.full((6,), 0.2, dtype=torch.float64),
        old_log_probs=old,
        advantages=torch.tensor([*ADVANTAGES, math.inf], dtype=torch.float64),
        selected=None if selected is None else torch.tensor(selected),
        sequences=None if ids is None else Sequences(torch.tensor(ids), max(ids) + 1),
    )
    return (old + log_ratio).requires_grad_(), tokens


def run(mode, clip_c=3.0, selected=None, ids=None, **options):
    """(loss, gradient, sums) of the example."""
    log_probs, tokens = hand_example(selected, ids)
    loss, sums = policy_loss(
        log_probs,
        tokens,
        PolicyLossOptions(**{"clip_low": 0.2, "clip_high": 0.28, **options}, clip_c=clip_c, loss_mode=mode),
    )
    loss.backward()
    return loss.item(), log_probs.grad.tolist(), {name: value.item() for name, value in sums.items()}


def test_ppo_by_hand():
    loss, gradient, sums = run("vanilla")
    assert loss == pytest.approx(0.2 * (-1.28 - 0.5 + 0.8 + 2 + 6))  # 1.404
    # d loss / d log_prob = weight * -A ratio where the ratio's own branch holds, else 0
    assert gradient == pytest.approx([0, -0.1, 0, 0.4, 0, 0])
    assert sums == pytest.approx(
        {
            "actor/pg_loss": 1.404,
            "actor/tokens": 5,
            "actor/ppo_kl": -math.log(1.5 * 0.5 * 0.5 * 2 * 4),  # sum of old - new = -ln 3
            "actor/log_ratio_abs": math.log(1.5 * 2 * 2 * 2 * 4),
            "actor/ratio": 8.5,
            "actor/pg_clipfrac": 2,
            "actor/pg_clipfrac_lower": 1,
        }
    )


def test_without_the_dual_clip():
    loss, _, sums = run("vanilla", clip_c=None)
    assert loss == pytest.approx(0.2 * (-1.28 - 0.5 + 0.8 + 2 + 8))
    assert sums["actor/pg_clipfrac_lower"] == 0


def test_a_broken_token_leaves_the_loss_finite():
    one = torch.ones(1)
    for mode in ("vanilla", "gspo", "kl_cov"):
        log_probs = torch.tensor([0.0], requires_grad=True)
        tokens = PolicyTokens(
            one.bool(),
            one,
            torch.tensor([-500.0]),
            -one,
            selected=~one.bool(),
            sequences=Sequences(torch.tensor([0]), 1),
        )
        loss, _ = policy_loss(log_probs, tokens, PolicyLossOptions(0.2, 0.2, None, loss_mode=mode))
        loss.backward()
        assert loss.item() == pytest.approx(math.exp(20.0))
        assert log_probs.grad.item() == 0.0


def test_gspo_by_hand():
    # Trajectories: ratios 1.5, 0.5, 0.5 and 2, 4: s = (3/8)^(1/3) = 0.721125 and 8^(1/2) = 2.828427.
    # A = 1, 1, -1 | -1, -2: -A s = -0.721125 twice (0.8 clipped is smaller: -0.8 < -0.721125), 0.8 clipped for the
    # third (A = -1: max(0.721125, 0.8)), 2.828427 (max with 1.28), 5.656854.
    first, second = 0.375 ** (1 / 3), math.sqrt(8)
    loss, gradient, sums = run("gspo", ids=[0, 0, 0, 1, 1, 1])
    assert loss == pytest.approx(0.2 * (-first - first + 0.8 + second + 2 * second))
    # through each token's own log-prob: weight * -A s
    assert gradient == pytest.approx([-0.2 * first, -0.2 * first, 0, 0.2 * second, 0.4 * second, 0])
    assert sums["actor/pg_clipfrac"] == 1
    assert "actor/pg_clipfrac_lower" not in sums


def test_gmpo_by_hand():
    # clip_low = clip_high = ln 1.28 on logarithms: A > 0: 1.5 -> 1.28, 0.5 stays; A < 0: 0.5 -> 1 / 1.28, 2 and 4 stay.
    # Geometric means: (1.28 * 0.5 / 1.28)^(1/3) = 0.5^(1/3) and 8^(1/2).
    bound = math.log(1.28)
    first, second = 0.5 ** (1 / 3), math.sqrt(8)
    loss, gradient, sums = run("gmpo", ids=[0, 0, 0, 1, 1, 1], clip_low=bound, clip_high=bound)
    assert loss == pytest.approx(0.2 * (-first - first + first + second + 2 * second))
    # the mean's share of each token that is not clipped: sum(weight * -A) * mean / count
    assert gradient == pytest.approx([0, -0.2 * first / 3, 0, 0.6 * second / 2, 0.6 * second / 2, 0])
    assert sums["actor/pg_clipfrac"] == 2


def test_cispo_by_hand():
    # weights 1.28, 0.8, 0.8, 1.28, 1.28 on -A log-prob
    log_probs, _ = hand_example()
    bounded = [1.28, 0.8, 0.8, 1.28, 1.28]
    loss, gradient, sums = run("cispo")
    values = [-b * a * p for b, a, p in zip(bounded, ADVANTAGES, log_probs.tolist()[:5], strict=True)]
    assert loss == pytest.approx(0.2 * sum(values))
    assert gradient == pytest.approx([-0.256, -0.16, 0.16, 0.256, 0.512, 0])
    assert sums["actor/pg_clipfrac"] == 5


def test_sapo_by_hand():
    # A > 0: tau 2: 2 sigmoid(2 (r - 1)): r 1.5: 2 * 0.731059, 0.5: 2 * 0.268941
    # A < 0: tau 4: 1 sigmoid(4 (r - 1)): 0.5: 0.119203, 2: 0.982014, 4: 0.9999938558
    loss, gradient, _ = run("sapo", tau_pos=2.0, tau_neg=4.0)
    gates = [1.462117, 0.537883, 0.119203, 0.982014, 0.9999938558]
    assert loss == pytest.approx(0.2 * sum(-a * g for a, g in zip(ADVANTAGES, gates, strict=True)), rel=1e-5)
    # d gate / d log_prob = 4 sigmoid (1 - sigmoid) ratio
    slopes = [4 * s * (1 - s) * r for s, r in zip([0.731059, 0.268941, *gates[2:]], RATIOS, strict=True)]
    expected = [-0.2 * a * d for a, d in zip(ADVANTAGES, slopes, strict=True)]
    assert gradient == pytest.approx([*expected, 0], rel=1e-3, abs=1e-7)


CHOSEN = [False, True, True, False, False, True]


def test_clip_cov_by_hand():
    # PPO without dual clip, tokens 1 and 2 left out
    loss, gradient, sums = run("clip_cov", selected=CHOSEN)
    assert loss == pytest.approx(0.2 * (-1.28 + 2 + 8))
    assert gradient == pytest.approx([0, 0, 0, 0.4, 1.6, 0])
    assert (sums["actor/pg_clipfrac"], sums["actor/cov_selected"]) == (2, 2)


def test_kl_cov_by_hand():
    # -A ratio, plus 0.5 |ln ratio| on tokens 1 and 2: |ln 0.5| twice
    loss, gradient, sums = run("kl_cov", selected=CHOSEN, ppo_kl_coef=0.5)
    assert loss == pytest.approx(0.2 * (-1.5 - 0.5 + 0.5 + 2 + 8 + 2 * 0.5 * math.log(2)))
    # weight * (-A ratio), minus weight * 0.5 where the log ratio is negative
    assert gradient == pytest.approx([-0.3, -0.1 - 0.1, 0.1 - 0.1, 0.4, 1.6, 0])
    assert sums["actor/cov_selected"] == 2


def test_gpg_by_hand():
    log_probs, _ = hand_example()
    loss, gradient, _ = run("gpg")
    values = [-a * p for a, p in zip(ADVANTAGES, log_probs.tolist()[:5], strict=True)]
    assert loss == pytest.approx(0.2 * sum(values))
    assert gradient == pytest.approx([-0.2, -0.2, 0.2, 0.2, 0.4, 0])


def test_gspo_and_gmpo_sum_over_all_ranks_that_hold_a_trajectory():
    # A rank that holds the first token alone; the others' part of each sum comes from `all_reduce`.
    log_probs, tokens = hand_example()
    index = torch.tensor([0])
    others = iter(
        [torch.tensor([math.log(0.25)]), torch.tensor([2.0])]
    )  # log ratios of tokens 1, 2; their count
    part = PolicyTokens(
        tokens.mask[index],
        tokens.weights[index],
        tokens.old_log_probs[index],
        tokens.advantages[index],
        sequences=Sequences(torch.tensor([0]), 1, lambda own: own + next(others)),
    )
    options = PolicyLossOptions(0.2, 0.28, None, loss_mode="gspo")
    assert policy_loss(log_probs[index], part, options)[0].item() == pytest.approx(-0.2 * 0.375 ** (1 / 3))
