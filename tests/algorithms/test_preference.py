"""Losses on preferences against the papers' formulas, with numbers worked by hand, and against TRL's."""

import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megarl.algorithms.preference import (
    DPOOptions,
    KTOOptions,
    dpo_loss,
    kto_baseline,
    kto_loss,
    labelled_metrics,
    preference_loss,
    ranking_metrics,
    ranking_pairs,
)
from tests.trl import trl_function


def log_loss(difference: float) -> float:
    return math.log(1 + math.exp(-difference))


def test_four_texts_make_six_pairs_of_equal_weight() -> None:
    """InstructGPT, eq. 1, K = 4: rewards 2, 0, 1, -1 of texts ranked 1, 2, 3, 4.

    Differences of the pairs 12 13 14 23 24 34: 2, 1, 3, -1, 1, 2; the third text should be under the second, but is not.
    """
    rewards = torch.tensor([2.0, 0.0, 1.0, -1.0], requires_grad=True)
    pairs = ranking_pairs(torch.tensor([-1, -2, -3, -4]), torch.tensor([0, 4]))
    assert list(zip(pairs.better.tolist(), pairs.worse.tolist(), strict=True)) == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3),
    ]  # fmt: skip
    loss, sums = preference_loss(rewards, pairs, torch.zeros(4), num_rankings=1)
    differences = [2.0, 1.0, 3.0, -1.0, 1.0, 2.0]
    assert loss.item() == pytest.approx(sum(map(log_loss, differences)) / 6, rel=1e-6)
    assert loss.item() == pytest.approx(0.373705, abs=1e-6)
    loss.backward()
    # the derivative by the reward of a pair's better text is sigmoid(difference) - 1
    slopes = [1 / (1 + math.exp(-difference)) - 1 for difference in differences]
    expected = [
        slopes[0] + slopes[1] + slopes[2],
        -slopes[0] + slopes[3] + slopes[4],
        -slopes[1] - slopes[3] + slopes[5],
        -slopes[2] - slopes[4] - slopes[5],
    ]
    torch.testing.assert_close(rewards.grad, torch.tensor(expected) / 6)
    found = ranking_metrics({name: value.item() for name, value in sums.items()}, 1)
    assert found == {
        "loss": pytest.approx(loss.item()), "accuracy": pytest.approx(5 / 6), "margin": pytest.approx(8 / 6)
    }  # fmt: skip


def test_rankings_count_alike_however_many_pairs_they_have() -> None:
    """One ranking is a pair with difference 1; the other has three texts, two of them equally good, and so two pairs, 2 and 0.5."""
    rewards = torch.tensor([1.0, 0.0, 3.0, 1.0, 2.5])
    pairs = ranking_pairs(torch.tensor([1.0, 0.0, 7.0, 5.0, 5.0]), torch.tensor([0, 2, 5]))
    loss, sums = preference_loss(rewards, pairs, torch.zeros(5), num_rankings=2)
    assert loss.item() == pytest.approx((log_loss(1) + (log_loss(2) + log_loss(0.5)) / 2) / 2, rel=1e-6)
    assert sums["pairs"].item() == 3 and sums["margin"].item() == pytest.approx(3.5)


def test_a_batch_in_parts_is_the_batch() -> None:
    """Losses are sums: the loss of each part is divided by the number of rankings in the complete batch."""
    rewards, scores = torch.randn(7), torch.tensor([3.0, 1.0, 2.0, 0.0, 1.0, 5.0, 4.0])
    whole, _ = preference_loss(
        rewards, ranking_pairs(scores, torch.tensor([0, 3, 5, 7])), torch.zeros(7), num_rankings=3
    )
    parts = [(0, 3), (3, 5), (5, 7)]
    losses = [
        preference_loss(
            rewards[a:b], ranking_pairs(scores[a:b], torch.tensor([0, b - a])), torch.zeros(b - a), num_rankings=3
        )[0]
        for a, b in parts
    ]  # fmt: skip
    assert sum(losses).item() == pytest.approx(whole.item(), rel=1e-6)


def test_a_margin_is_what_the_better_reward_should_have_more() -> None:
    """Llama 2, eq. 2: -log sigmoid(r_chosen - r_rejected - m)."""
    pairs = ranking_pairs(torch.tensor([1.0, 0.0]), torch.tensor([0, 2]))
    loss, sums = preference_loss(torch.tensor([1.5, 1.0]), pairs, torch.tensor([2.0, 2.0]), num_rankings=1)
    assert loss.item() == pytest.approx(log_loss(0.5 - 2.0), rel=1e-6)
    assert sums["accuracy"].item() == 1 and sums["margin"].item() == pytest.approx(0.5)


def test_equal_rewards_are_right_by_half() -> None:
    """A head that begins at zero knows nothing: its loss is log 2, and as many pairs are right as by chance."""
    pairs = ranking_pairs(torch.tensor([1.0, 0.0]), torch.tensor([0, 2]))
    loss, sums = preference_loss(torch.zeros(2), pairs, torch.zeros(2), num_rankings=1)
    assert loss.item() == pytest.approx(math.log(2)) and sums["accuracy"].item() == 0.5


def by_hand(kind: str, smoothing: float = 0.0):
    """A pair with h = 1.5 and a ranking of three with h = 1, 3, 2; beta 0.5."""
    ratios = torch.tensor([1.0, -0.5, -1.0, 2.0, 1.0], requires_grad=True)
    pairs = ranking_pairs(torch.tensor([1.0, 0.0, 1.0, 3.0, 2.0]), torch.tensor([0, 2, 5]))
    return ratios, *dpo_loss(ratios, torch.ones(5), pairs, 2, DPOOptions(0.5, smoothing, kind))


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_sigmoid_loss_of_pairs_and_rankings(smoothing: float) -> None:
    def loss(h: float) -> float:
        return (1 - smoothing) * softplus(-0.5 * h) + smoothing * softplus(0.5 * h)

    ratios, found, sums = by_hand("sigmoid", smoothing)
    assert found.item() == pytest.approx((loss(1.5) + (loss(1.0) + loss(3.0) + loss(2.0)) / 3) / 2)
    found.backward()
    # only the pair's gradient: d loss / d h over 2 rankings
    step = -0.5 * ((1 - smoothing) / (1 + math.exp(0.75)) - smoothing / (1 + math.exp(-0.75)))
    assert ratios.grad[:2].tolist() == pytest.approx([step / 2, -step / 2])
    metrics = ranking_metrics({name: value.item() for name, value in sums.items()}, 2)
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
    _, sums = dpo_loss(torch.tensor([1.0, 1.0, 0.0, 2.0]), torch.ones(4), pairs, 2, DPOOptions(0.1))
    assert sums["accuracy"].item() == 0.5


LOG_PROBS, LENGTHS = torch.tensor([-3.0, -8.0, -0.5, -20.0]), torch.tensor([3.0, 4.0, 1.0, 10.0])
TWO = ranking_pairs(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 2, 4]))


def test_simpo_is_trls() -> None:
    """The loss is of means over tokens, without a reference; the better response should lead by gamma."""
    losses, better, worse = trl_function("experimental/cpo/cpo_trainer.py", "cpo_loss")(
        SimpleNamespace(
            alpha=0.0, beta=2.0, simpo_gamma=0.7, label_smoothing=0.0, loss_type="simpo",
            accelerator=SimpleNamespace(device="cpu"),
        ),
        *((LOG_PROBS / LENGTHS)[side] for side in (TWO.better, TWO.worse)),
    )  # fmt: skip
    loss, sums = dpo_loss(LOG_PROBS, LENGTHS, TWO, 2, DPOOptions(2.0, 0.0, "simpo", 0.7))
    torch.testing.assert_close(loss, losses.mean())
    assert sums["reward_better"].item() == pytest.approx(better.sum().item())
    assert sums["reward_worse"].item() == pytest.approx(worse.sum().item())


def test_orpo_is_trls() -> None:
    """The loss has the likelihood of the better response, and the ratio of the odds of both responses."""
    means = LOG_PROBS / LENGTHS
    ratios, *_ = trl_function("experimental/orpo/orpo_trainer.py", "odds_ratio_loss")(
        SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu")),
        means[TWO.better],
        means[TWO.worse],
    )
    loss, _ = dpo_loss(LOG_PROBS, LENGTHS, TWO, 2, DPOOptions(0.3, 0.0, "orpo"))
    torch.testing.assert_close(loss, -means[TWO.better].mean() - ratios.mean())


def test_a_certain_response_has_finite_odds() -> None:
    """A response of probability 1: its odds are bounded, so the loss and its gradient are finite."""
    sure = torch.tensor([0.0, -1.0], requires_grad=True)
    pairs = ranking_pairs(torch.tensor([1.0, 0.0]), torch.tensor([0, 2]))
    loss, _ = dpo_loss(sure, torch.ones(2), pairs, 1, DPOOptions(0.3, 0.0, "orpo"))
    loss.backward()
    assert loss.isfinite() and sure.grad.isfinite().all()


def trls_kto(
    texts: Tensor, others: Tensor, prompt: int, labels: list[bool], of_token: Tensor, reference: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """TRL's loss and metrics for a model in which each token has a fixed log-prob, whatever comes before it.

    `texts`, `others` [texts, tokens]: prompts with their own and with others' responses; `reference` [2, texts]: log-probs of both.
    """

    def model(input_ids: Tensor, labels: Tensor, **_: object) -> SimpleNamespace:
        found = of_token[input_ids[:, 1:]] * (labels[:, 1:] != -100)
        return SimpleNamespace(
            log_probs=found, entropy=torch.zeros_like(found), mean_logits=torch.zeros_like(found)
        )

    model.training = True
    mask = torch.ones_like(texts)
    mask[:, :prompt] = 0
    trainer = SimpleNamespace(
        calculate_KL=True, precompute_ref_logps=True, aux_loss_enabled=False, loss_type="kto", beta=0.4,
        desirable_weight=1.2, undesirable_weight=0.9, model=model, _total_train_tokens=0, _tp_size=1,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda found: found),
    )  # fmt: skip
    file = "trainer/kto_trainer.py"
    trainer._compute_kl_logps = partial(trl_function(file, "_compute_kl_logps"), trainer)
    batch = {
        "input_ids": texts, "attention_mask": torch.ones_like(texts), "completion_mask": mask,
        "KL_input_ids": others, "KL_attention_mask": torch.ones_like(texts), "KL_completion_mask": mask,
        "label": torch.tensor(labels), "ref_logps": reference[0], "ref_KL_logps": reference[1],
    }  # fmt: skip
    loss = trl_function(file, "_compute_loss")(trainer, model, batch, False)
    return loss, {name: found[-1] for name, found in trainer._metrics["train"].items()}


@pytest.mark.parametrize("lead", [0.5, -0.5])
@pytest.mark.parametrize("labels", [[True, False, False, True], [True] * 4, [False] * 4])
def test_kto_is_trls(labels: list[bool], lead: float) -> None:
    """Loss, gradient and metrics. `lead`: how much more the policy prefers others' responses than the reference does; the baseline is not
    negative."""
    generator = torch.Generator().manual_seed(5)
    texts, prompt = torch.randint(0, 9, (4, 7), generator=generator), 3
    others = torch.cat([texts[:, :prompt], texts.roll(1, 0)[:, prompt:]], dim=1)
    of_token = torch.randn(9, generator=generator).requires_grad_()
    sums, of_others = of_token[texts[:, prompt:]].sum(1), of_token[others[:, prompt:]].sum(1).detach()
    reference = torch.stack([sums.detach() + torch.randn(4, generator=generator), of_others - lead])
    expected, metrics = trls_kto(texts, others, prompt, labels, of_token, reference)

    baseline = kto_baseline(of_others - reference[1])
    assert baseline == pytest.approx(max(0.0, lead), abs=1e-6)
    ratios, options = sums - reference[0], KTOOptions(0.4, 1.2, 0.9)
    loss, found = kto_loss(ratios, torch.tensor(labels), baseline, 4, options)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(each, of_token, retain_graph=True)[0] for each in (loss, expected)]
    torch.testing.assert_close(*gradients)
    ours = labelled_metrics({name: value.item() for name, value in found.items()}, 4, baseline)
    names = {
        "kl_baseline": "kl",
        "reward_desirable": "rewards/chosen",
        "reward_undesirable": "rewards/rejected",
        "margin": "rewards/margins",
    }
    assert ours.pop("loss") == pytest.approx(expected.item())
    assert ours == pytest.approx(
        {name: metrics[theirs] for name, theirs in names.items() if theirs in metrics}, abs=1e-6
    )
    assert len(ours) == (4 if len(set(labels)) == 2 else 2)

    parts = [
        kto_loss(ratios[part], torch.tensor(labels)[part], baseline, 4, options)[0]
        for part in (slice(3), slice(3, 4))
    ]
    torch.testing.assert_close(sum(parts), loss)
