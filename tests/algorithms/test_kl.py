"""KL: its estimates, its controllers, and the exact KL as a loss and in the reward, where the models have computed it."""

import math

import pytest
import torch
from hypothesis import given

from megarl.algorithms.kl import (
    FULL_KL,
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    LinearKLController,
    apply_kl_penalty,
    kl_estimate,
    make_kl_controller,
    place_scores,
    place_steps,
)
from megarl.algorithms.policy_loss import PolicyLossOptions, PolicyTokens, actor_loss
from megarl.config.schema import algorithm as algorithm_sections
from tests.algorithms.ragged_examples import normal, offsets_of, ragged_masks, repeatable, rows


def test_estimates_by_hand():
    # r = ln 2 and r = -ln 2; k3: 1/2 - 1 + 0.693147 = 0.193147 and 2 - 1 - 0.693147 = 0.306853
    log_probs = torch.tensor([-1.0, -1.0])
    ref = log_probs - torch.tensor([math.log(2), -math.log(2)])
    expected = {
        "kl": [0.693147, -0.693147],
        "abs": [0.693147, 0.693147],
        "mse": [0.240227, 0.240227],
        "low_var_kl": [0.193147, 0.306853],
    }
    expected |= {"k1": expected["kl"], "k2": expected["mse"], "k3": expected["low_var_kl"]}
    expected |= {"k1+": expected["kl"], "k3+": expected["low_var_kl"]}
    assert set(expected) == set(KL_KINDS)
    assert set(KL_KINDS) <= set(algorithm_sections.KL_KINDS)
    for kind, numbers in expected.items():
        torch.testing.assert_close(
            kl_estimate(log_probs, ref, kind), torch.tensor(numbers), atol=1e-6, rtol=0
        )


def test_low_var_kl_is_bounded_with_a_finite_gradient():
    log_probs = torch.tensor([-100.0, 0.0, -1.0], requires_grad=True)
    ref = torch.tensor([0.0, -100.0, -1.0])
    estimate = kl_estimate(log_probs, ref, "low_var_kl")
    estimate.sum().backward()
    assert estimate.tolist() == [10.0, 10.0, 0.0]
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]


def test_expected_values_and_gradients_over_a_whole_vocabulary():
    """Exact expectations over 5 tokens, against torch's own KL and its gradient."""
    logits = normal(5, 0).requires_grad_()
    ref = normal(5, 1).log_softmax(0)
    log_probs = logits.log_softmax(0)
    probs = log_probs.exp()
    reverse = (probs * (log_probs - ref)).sum()
    forward = (ref.exp() * (ref - log_probs)).sum()

    def expectation(kind):  # tokens are sampled with `probs`, which pass no gradient
        return (probs.detach() * kl_estimate(log_probs, ref, kind)).sum()

    def gradient(scalar):
        return torch.autograd.grad(scalar, logits, retain_graph=True)[0]

    torch.testing.assert_close(expectation("kl"), reverse)
    torch.testing.assert_close(expectation("low_var_kl"), reverse)
    torch.testing.assert_close(gradient(expectation("kl")), torch.zeros_like(logits), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient(expectation("mse")), gradient(reverse))
    for kind in ("k1+", "k3+"):
        torch.testing.assert_close(gradient(expectation(kind)), gradient(reverse))
    torch.testing.assert_close(gradient(expectation("low_var_kl")), gradient(forward))


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"'k4' is unknown; known: kl, k1, k1\+, abs, mse"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_kl_penalty_by_hand():
    # KL (k1): first trajectory 0.2, -0.1 (its masked 3rd token does not count); second 0.4. coef 0.5
    # rewards: -0.5*0.2 = -0.1; 1 - 0.5*-0.1 = 1.05 (the last LIVE token); 0; 2 - 0.2 = 1.8
    # mean: ((0.2 - 0.1) / 2 + 0.4) / 2 = 0.225
    rewards, kl = apply_kl_penalty(
        scores=torch.tensor([1.0, 2.0]),
        old_log_probs=torch.tensor([-1.0, -1.0, float("nan"), -1.0]),
        ref_log_probs=torch.tensor([-1.2, -0.9, 5.0, -1.4]),
        mask=torch.tensor([True, True, False, True]),
        offsets=offsets_of([3, 1]),
        coef=0.5,
        kind="kl",
    )
    torch.testing.assert_close(rewards, torch.tensor([-0.1, 1.05, 0.0, 1.8]))
    assert kl == pytest.approx(0.225)


@repeatable
@given(ragged_masks())
def test_each_score_lands_once_on_its_last_live_token(ragged):
    mask, offsets = ragged
    scores = torch.arange(1.0, offsets.numel())
    rewards = place_scores(scores, mask, offsets)
    for score, row in zip(scores.tolist(), rows(offsets), strict=True):
        live = mask[row].nonzero().flatten().tolist()
        expected = [0.0] * (row.stop - row.start)
        if live:
            expected[live[-1]] = score
        assert rewards[row].tolist() == expected


def test_kl_of_a_batch_without_live_tokens_is_0():
    rewards, kl = apply_kl_penalty(
        torch.ones(1),
        torch.zeros(2),
        torch.ones(2),
        torch.zeros(2, dtype=torch.bool),
        offsets_of([2]),
        1.0,
        "kl",
    )
    assert rewards.tolist() == [0.0, 0.0]
    assert kl == 0.0


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


def test_adaptive_controller_by_hand():
    controller = AdaptiveKLController(coef=0.2, target_kl=6.0, horizon=10000)
    controller.update(9.0, n_steps=256)  # 9/6 - 1 = 0.5 -> 0.2; 1 + 0.2*256/10000 = 1.00512
    assert controller.coef == pytest.approx(0.201024)
    controller.update(5.7, n_steps=1000)  # 5.7/6 - 1 = -0.05; 1 - 0.05*0.1 = 0.995
    assert controller.coef == pytest.approx(0.201024 * 0.995)
    controller.update(-3.0, n_steps=1000)  # -1.5 -> -0.2; 1 - 0.02 = 0.98
    assert controller.coef == pytest.approx(0.201024 * 0.995 * 0.98)


def test_adaptive_coefficient_survives_a_resume_exactly():
    run = make_kl_controller("adaptive", 0.1, 0.1, 500)
    run.update(0.13, 7)
    resumed = make_kl_controller("adaptive", 0.1, 0.1, 500)
    resumed.load_state_dict(run.state_dict())
    for controller in (run, resumed):
        controller.update(0.05, 7)
    assert resumed.coef == run.coef != 0.1


def test_fixed_controller_stays():
    controller = make_kl_controller("fixed", 0.3, 0.1, 100)
    controller.update(50.0, 10**9)
    resumed = FixedKLController(0.4)
    resumed.load_state_dict(controller.state_dict())
    assert (controller.coef, resumed.coef) == (0.3, 0.4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adaptive", 0.1, 0.0, 10), "kl_ctrl.target_kl is 0.0"),
        (("adaptive", 0.1, 0.1, -1), "kl_ctrl.horizon is -1"),
        (("linear", 0.1, 0.1, 10), "kl_ctrl.end_kl_coef is null"),
        (("stepwise", 0.1, 0.1, 10), "kl_ctrl.type='stepwise' is unknown; known: fixed, adaptive, linear"),
    ],
)
def test_bad_controller_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_kl_controller(*arguments)


def test_controller_refuses_what_would_break_the_coefficient():
    controller = make_kl_controller("adaptive", 0.1, 0.1, 100)
    with pytest.raises(ValueError, match="is nan"):
        controller.update(math.nan, 1)
    with pytest.raises(ValueError, match="horizon=100 is too short for 500 trajectories a step"):
        controller.update(0.0, 500)
    with pytest.raises(ValueError, match="holds a 'fixed' KL controller"):
        controller.load_state_dict(FixedKLController(0.1).state_dict())
    assert controller.coef == 0.1


def test_linear_controller_by_hand():
    # 0.01 to 0.1 in 4 steps: 0.01, 0.04, 0.07, 0.1, and 0.1 from then on
    controller = make_kl_controller("linear", 0.01, 0.1, 100, end_kl_coef=0.1, schedule_steps=4)
    found = []
    for _ in range(6):
        found.append(controller.coef)
        controller.update(5.0, 64)
    assert found == pytest.approx([0.01, 0.04, 0.07, 0.1, 0.1, 0.1])
    assert LinearKLController(0.2, 0.1, num_steps=1).coef == 0.2


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "linear"])
def test_an_intervention_lasts_and_survives_a_resume(kind):
    def make():
        return make_kl_controller(kind, 0.1, 0.1, 500, end_kl_coef=0.4, schedule_steps=4)

    run, untouched = make(), make()
    for controller in (run, untouched):
        controller.update(0.13, 7)
    run.scale(2.0)
    resumed = make()
    resumed.load_state_dict(run.state_dict())
    for controller in (run, resumed, untouched):
        controller.update(0.05, 7)
    assert run.coef == resumed.coef == pytest.approx(2 * untouched.coef)


def test_scores_of_steps_by_hand():
    """A step's score goes to the last live token up to the step's end, or to the first live token if there is none; scores on one token are added; a
    trajectory without live tokens has none."""
    mask = torch.tensor([False, True, True, False, True, False, False, True])
    offsets = offsets_of([5, 2, 1])
    rows = torch.tensor([0, 0, 0, 0, 1, 2])
    places = torch.tensor([0, 1, 3, 4, 5, 7])
    scores = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    found = place_steps(rows, places, scores, mask, offsets)
    assert found.tolist() == [0, 3, 4, 0, 8, 0, 0, 32]
    assert place_steps(rows, places, scores, torch.zeros(8, dtype=torch.bool), offsets).tolist() == [0] * 8
