"""Metrics of responses such as repetition, worked by hand, and changes that must not affect them."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.metrics import (
    add_sums,
    batch_metrics,
    duplicate_share,
    first_difference,
    ngram_repetition,
    reduce_metrics,
    rollout_difference,
)
from tests.algorithms.ragged_examples import offsets_of


def test_sums_of_two_mini_batches_reduce_to_one_number_a_metric():
    first = {"actor/pg_loss": torch.tensor(0.2), "actor/tokens": torch.tensor(10.0), "actor/ppo_kl": 1.0}
    second = {"actor/pg_loss": 0.4, "actor/tokens": 30.0, "actor/ppo_kl": 1.0}
    total = add_sums([first, {}, second])
    # losses: the mean of two updates; token statistics: over all 40 tokens
    assert reduce_metrics(total, num_updates=2) == pytest.approx({"actor/pg_loss": 0.3, "actor/ppo_kl": 0.05})


def test_a_mini_batch_without_live_tokens_reports_its_loss_only():
    assert reduce_metrics({"actor/pg_loss": 0.0, "actor/tokens": 0.0, "actor/ppo_kl": 0.0}) == {
        "actor/pg_loss": 0.0
    }


def test_the_difference_that_a_first_mini_batch_tells_is_that_of_its_log_probs():
    engine, trainer = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.7, -0.5])
    change = trainer - engine
    sums = {
        "actor/tokens": 3.0,
        "actor/ppo_kl": float(-change.sum()),
        "actor/ratio": float(change.exp().sum()),
        "actor/log_ratio_abs": float(change.abs().sum()),
    }
    whole = rollout_difference(trainer, engine, torch.tensor([True] * 3))
    found = first_difference(sums)
    assert len(found) == 4 and found == pytest.approx({name: whole[name] for name in found}, abs=1e-6)
    assert first_difference(dict.fromkeys(sums, 0.0)) == {}


def test_batch_metrics_by_hand():
    metrics = batch_metrics(
        scores=torch.tensor([1.0, 0.0]),
        token_level_rewards=torch.tensor([-0.25, 1.0, 0.0]),
        advantages=torch.tensor([2.0, 4.0, math.nan]),
        mask=torch.tensor([True, True, False]),
        offsets=offsets_of([2, 1]),
        truncated=torch.tensor([False, True]),
        returns=torch.tensor([1.0, 3.0, 9.0]),
    )
    expected = {
        "critic/score": (0.5, 1.0, 0.0),
        "critic/rewards": (0.75, 0.75, 0.75),  # the second trajectory has no live token
        "critic/advantages": (3.0, 4.0, 2.0),
        "critic/returns": (2.0, 3.0, 1.0),
        "response_length": (1.5, 2.0, 1.0),
    }
    flat = {
        f"{name}/{part}": number
        for name, numbers in expected.items()
        for part, number in zip(("mean", "max", "min"), numbers, strict=True)
    }
    assert metrics == pytest.approx(flat | {"response_length/clip_ratio": 0.5})


def test_rollout_difference_by_hand():
    # probabilities 0.5 against 0.25 and 0.5 against 0.5: |differences| 0.25 and 0, log-probs ln 2 and 0
    trainer = torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64).log()
    engine = torch.tensor([0.25, 0.5, math.nan], dtype=torch.float64).log()
    assert rollout_difference(trainer, engine, torch.tensor([True, True, False])) == pytest.approx(
        {
            "training/rollout_log_prob_diff_mean": math.log(2) / 2,
            "training/rollout_log_prob_diff_max": math.log(2),
            "training/rollout_probs_diff_mean": 0.125,
            "training/rollout_probs_diff_max": 0.25,
            "training/rollout_kl": -math.log(2) / 2,
            # d = -ln 2 and 0: exp(-d) - 1 + d = 2 - 1 - ln 2 and 0; the trainer's perplexity is 2, the engine's 8^(1/2)
            "training/rollout_k3_kl": (1 - math.log(2)) / 2,
            "training/rollout_ppl_ratio": 2 / math.sqrt(8),
        }
    )


def test_rollout_difference_of_more_tokens_than_are_compared_at_once():
    generator = torch.Generator().manual_seed(0)
    trainer, engine = (-torch.rand(2, 600_001, generator=generator)).unbind()
    mask = torch.rand(600_001, generator=generator) < 0.9
    a, b = trainer[mask].double(), engine[mask].double()
    assert rollout_difference(trainer, engine, mask) == pytest.approx(
        {
            "training/rollout_log_prob_diff_mean": float((a - b).abs().mean()),
            "training/rollout_log_prob_diff_max": float((a - b).abs().max()),
            "training/rollout_probs_diff_mean": float((a.exp() - b.exp()).abs().mean()),
            "training/rollout_probs_diff_max": float((a.exp() - b.exp()).abs().max()),
            "training/rollout_kl": float((b - a).mean()),
            "training/rollout_k3_kl": float(((a - b).exp() - 1 + (b - a)).mean()),
            "training/rollout_ppl_ratio": float((b - a).mean().exp()),
        },
        rel=1e-9,
    )


def responses(*texts: str) -> list[np.ndarray]:
    return [np.array([ord(letter) for letter in text], dtype=np.int32) for text in texts]


def test_duplicates_by_hand() -> None:
    # Prompt p has 3 responses, 2 of them different: (3 - 2) / 2. Both responses of q are equal: 1. r has only one response.
    share = duplicate_share(responses("ab", "ab", "ba", "xyz", "xyz", "ab"), ["p", "p", "p", "q", "q", "r"])
    assert share == pytest.approx((0.5 + 1.0) / 2)
    assert duplicate_share(responses("a", "b"), ["p", "p"]) == 0.0
    assert duplicate_share(responses("a", "a"), ["p", "q"]) is None
    assert duplicate_share([], []) is None


def test_ngrams_by_hand() -> None:
    # abcdabcdabcd: 9 runs of 4 tokens, of which abcd, bcda, cdab, dabc are different: 5/9 occurred before.
    assert ngram_repetition(responses("abcdabcdabcd")) == pytest.approx(5 / 9)
    assert ngram_repetition(responses("aaaaa")) == pytest.approx(1 / 2)
    assert ngram_repetition(responses("abcdefgh")) == 0.0
    # A response that is too short does not count in the mean.
    assert ngram_repetition(responses("abc", "aaaaa", "abcdef")) == pytest.approx((1 / 2 + 0) / 2)
    assert ngram_repetition(responses("abc", "")) is None


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=6))
def test_ngrams_are_counted_exactly(tokens: list[list[int]]) -> None:
    rates = []
    for response in tokens:
        runs = Counter(tuple(response[start : start + 4]) for start in range(len(response) - 3))
        if runs:
            rates.append(1 - len(runs) / runs.total())
    found = ngram_repetition([np.array(response, dtype=np.int32) for response in tokens])
    assert found == (pytest.approx(np.mean(rates)) if rates else None)
