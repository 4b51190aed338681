from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import (
    ESTIMATORS,
    AdvantageBatch,
    AdvantageOptions,
    AdvantageResult,
    compute_advantages,
    register_advantage,
)
from megarl.config.schema.algorithm import ADV_ESTIMATORS, GROUP_ESTIMATORS
from megarl.util.plugins import load_plugins
from tests.algorithms.ragged_examples import brief, normal, offsets_of, ragged_masks, rows


def test_estimator_gae_whitens_advantages_and_not_returns():
    batch = AdvantageBatch(
        token_level_rewards=torch.tensor([0.0, 0.0, 1.0, 0.5, -1.0]),
        mask=torch.ones(5, dtype=torch.bool),
        offsets=offsets_of([3, 2]),
        values=torch.tensor([0.5, 0.6, 0.7, 0.1, 0.2]),
    )
    raw = compute_advantages("gae", batch, AdvantageOptions(gamma=0.9, lam=0.5, whiten=False))
    white = compute_advantages("gae", batch, AdvantageOptions(gamma=0.9, lam=0.5))
    torch.testing.assert_close(raw.advantages, torch.tensor([0.11425, 0.165, 0.3, 0.04, -1.2]))
    torch.testing.assert_close(
        white.advantages, (raw.advantages - raw.advantages.mean()) / raw.advantages.std()
    )
    assert torch.equal(white.returns, raw.returns)


def test_estimator_grpo_spreads_the_advantage_over_live_tokens():
    # Scores: 1 - 0.5 = 0.5 and 0 (the rewards' sums); mean 0.25, so +-0.25 without the std.
    batch = AdvantageBatch(
        token_level_rewards=torch.tensor([-0.5, 1.0, 0.0, 0.0, 0.0]),
        mask=torch.tensor([True, True, True, False, True]),
        offsets=offsets_of([2, 3]),
        prompt_uids=["p", "p"],
    )
    result = compute_advantages("grpo", batch, AdvantageOptions(norm_by_std=False))
    torch.testing.assert_close(result.advantages, torch.tensor([0.25, 0.25, -0.25, 0.0, -0.25]))
    assert result.returns is None


def test_refusals_name_what_is_wrong():
    batch = AdvantageBatch(torch.zeros(2), torch.tensor([True, False]), offsets_of([2]))
    with pytest.raises(ValueError, match=r"adv_estimator='gea' is unknown; known: gae, gpg, grpo"):
        compute_advantages("gea", batch, AdvantageOptions())
    with pytest.raises(ValueError, match="'gae' needs the critic's values"):
        compute_advantages("gae", batch, AdvantageOptions())
    with pytest.raises(ValueError, match="'grpo' needs the prompt"):
        compute_advantages("grpo", batch, AdvantageOptions())
    lost = AdvantageBatch(torch.tensor([0.0, 1.0]), batch.mask, batch.offsets)
    with pytest.raises(ValueError, match="1 non-zero token level rewards stand on masked tokens"):
        compute_advantages("grpo", lost, AdvantageOptions())
    with pytest.raises(ValueError, match="'gae' is already registered"):
        register_advantage("gae")(lambda batch, options: None)
    with pytest.raises(ValueError, match="'remax' needs the score of each prompt's greedy response"):
        compute_advantages("remax", batch, AdvantageOptions())
    assert set(ADV_ESTIMATORS) <= set(ESTIMATORS.names())


def test_estimator_reinforce_plus_plus_by_hand():
    # gamma 0.5: to go 2, 4 | 1. Mean 7/3, unbiased variance ((1/3)^2 + (5/3)^2 + (4/3)^2) / 2 = 7/3.
    batch = AdvantageBatch(
        token_level_rewards=torch.tensor([0.0, 4.0, 1.0, 0.0]),
        mask=torch.tensor([True, True, True, False]),
        offsets=offsets_of([2, 2]),
    )
    raw = compute_advantages("reinforce_plus_plus", batch, AdvantageOptions(gamma=0.5, whiten=False))
    torch.testing.assert_close(raw.advantages, torch.tensor([2.0, 4.0, 1.0, 0.0]))
    white = compute_advantages("reinforce_plus_plus", batch, AdvantageOptions(gamma=0.5))
    expected = torch.tensor([-1 / 3, 5 / 3, -4 / 3, 0.0]) / (7 / 3) ** 0.5
    torch.testing.assert_close(white.advantages, expected)
    assert white.returns is None


def test_estimator_reinforce_plus_plus_baseline_whitens_over_tokens():
    # Scores 3 and 1: +1 on 2 tokens, -1 on 1 token. Mean 1/3, variance ((2/3)^2 * 2 + (4/3)^2) / 2 = 4/3.
    batch = AdvantageBatch(
        token_level_rewards=torch.tensor([1.0, 2.0, 1.0]),
        mask=torch.ones(3, dtype=torch.bool),
        offsets=offsets_of([2, 1]),
        prompt_uids=["p", "p"],
    )
    name = "reinforce_plus_plus_baseline"
    raw = compute_advantages(name, batch, AdvantageOptions(whiten=False))
    torch.testing.assert_close(raw.advantages, torch.tensor([1.0, 1.0, -1.0]))
    white = compute_advantages(name, batch, AdvantageOptions())
    torch.testing.assert_close(white.advantages, torch.tensor([2 / 3, 2 / 3, -4 / 3]) / (4 / 3) ** 0.5)


def test_estimator_remax_by_hand():
    # To go: -0.5 + 1, 1 | 0; minus the greedy responses' 0.25 and 1. gamma plays no part.
    batch = AdvantageBatch(
        token_level_rewards=torch.tensor([-0.5, 1.0, 0.0, 0.0]),
        mask=torch.tensor([True, True, True, False]),
        offsets=offsets_of([2, 2]),
        baselines=torch.tensor([0.25, 1.0]),
    )
    found = compute_advantages("remax", batch, AdvantageOptions(gamma=0.5)).advantages
    torch.testing.assert_close(found, torch.tensor([0.25, 0.75, -1.0, 0.0]))


def a_batch(mask, offsets, seed):
    """Random rewards and values; scores repeat, so that ties occur; three prompts."""
    n = offsets.numel() - 1
    generator = np.random.default_rng(seed)
    return AdvantageBatch(
        token_level_rewards=torch.from_numpy(generator.integers(-2, 3, mask.numel()) * mask.numpy() * 0.5),
        mask=mask,
        offsets=offsets,
        values=normal(mask.numel(), seed),
        prompt_uids=[f"p{number}" for number in generator.integers(0, 3, n)],
        baselines=normal(n, seed + 1),
    )


def assert_same(found, expected):
    assert (found is None) == (expected is None)
    if found is not None:
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


every_estimator = st.sampled_from(ADV_ESTIMATORS)


@brief
@given(ragged_masks(), every_estimator, st.integers(0, 2**31), st.sampled_from([float("nan"), 1e30]))
def test_what_stands_on_masked_tokens_never_matters(ragged, name, seed, poison):
    mask, offsets = ragged
    batch = a_batch(mask, offsets, seed)
    clean = compute_advantages(name, batch, AdvantageOptions(gamma=0.9, lam=0.8))
    poisoned = replace(batch, values=torch.where(mask, batch.values, poison))
    found = compute_advantages(name, poisoned, AdvantageOptions(gamma=0.9, lam=0.8))
    for a, b in ((found.advantages, clean.advantages), (found.returns, clean.returns)):
        assert_same(a, b)
    assert not clean.advantages[~mask].any()


@brief
@given(ragged_masks(), every_estimator, st.integers(0, 2**31))
def test_trajectories_without_a_live_token_take_no_part(ragged, name, seed):
    mask, offsets = ragged
    batch = a_batch(mask, offsets, seed)
    whole = compute_advantages(name, batch, AdvantageOptions())
    keep = [row for row, part in enumerate(rows(offsets)) if bool(mask[part].any())]
    found = compute_advantages(name, rows_of(batch, keep), AdvantageOptions())
    kept = [torch.arange(offsets[row], offsets[row + 1]) for row in keep]
    index = torch.cat(kept) if kept else torch.zeros(0, dtype=torch.int64)
    assert_same(found.advantages, whole.advantages[index])


@brief
@given(ragged_masks(), every_estimator, st.integers(0, 2**31), st.randoms())
def test_the_order_of_trajectories_never_matters(ragged, name, seed, rng):
    mask, offsets = ragged
    batch = a_batch(mask, offsets, seed)
    order = list(range(offsets.numel() - 1))
    rng.shuffle(order)
    whole = compute_advantages(name, batch, AdvantageOptions(gamma=0.9, lam=0.8))
    mixed = compute_advantages(name, rows_of(batch, order), AdvantageOptions(gamma=0.9, lam=0.8))
    index = torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in order])
    assert_same(mixed.advantages, whole.advantages[index])
    assert_same(mixed.returns, None if whole.returns is None else whole.returns[index])


def rows_of(batch, order):
    """The batch's trajectories `order`, in that order."""
    parts = [torch.arange(batch.offsets[row], batch.offsets[row + 1]) for row in order]
    index = torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
    return AdvantageBatch(
        batch.token_level_rewards[index],
        batch.mask[index],
        offsets_of([len(part) for part in parts]),
        batch.values[index],
        [batch.prompt_uids[row] for row in order],
        batch.baselines[order],
    )


def test_the_groups_are_those_that_the_configuration_says():
    batch = a_batch(torch.ones(4, dtype=torch.bool), offsets_of([2, 2]), seed=3)
    for name in ADV_ESTIMATORS:
        without = replace(batch, prompt_uids=None)
        if name in GROUP_ESTIMATORS:
            with pytest.raises(ValueError, match=f"'{name}' needs the prompt of each trajectory"):
                compute_advantages(name, without, AdvantageOptions())
        else:
            compute_advantages(name, without, AdvantageOptions())


def test_a_file_of_the_users_adds_an_estimator(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from megarl.algorithms.advantages import AdvantageResult, register_advantage\n"
        "@register_advantage('twice_the_reward')\n"
        "def twice(batch, options):\n"
        "    return AdvantageResult(2 * batch.token_level_rewards, None)\n"
    )
    load_plugins([str(file)])
    batch = a_batch(torch.ones(2, dtype=torch.bool), offsets_of([2]), seed=1)
    found = compute_advantages("twice_the_reward", batch, AdvantageOptions())
    torch.testing.assert_close(found.advantages, 2 * batch.token_level_rewards)


def test_a_result_that_does_not_fit_the_batch_is_refused():
    name = "a number a trajectory"
    register_advantage(name)(lambda batch, options: AdvantageResult(torch.zeros(2), None))
    batch = AdvantageBatch(torch.zeros(3), torch.ones(3, dtype=torch.bool), offsets_of([2, 1]))
    with pytest.raises(ValueError, match=r"returned advantages of shape \[2\] for a batch of 3 tokens"):
        compute_advantages(name, batch, AdvantageOptions())
