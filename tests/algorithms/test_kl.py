import math

import pytest
import torch
from hypothesis import given

from megarl.algorithms.kl import (
    KL_KINDS,
    apply_kl_penalty,
    kl_estimate,
    place_scores,
)
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

    def expectation(kind):  # tokens are sampled with `probs`, which passes no gradient
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
