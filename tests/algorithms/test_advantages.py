import math
import random
import statistics
import time
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
    gae,
    masked_whiten,
    register_advantage,
    reward_to_go,
)
from megarl.algorithms.comparisons import centred, gdpo, gpg, grpo, grpo_passk, maxrl, opo, rloo
from megarl.algorithms.turns import Turns
from megarl.config.schema.algorithm import ADV_ESTIMATORS, GROUP_ESTIMATORS
from megarl.util.plugins import load_plugins
from tests.algorithms.ragged_examples import brief, normal, offsets_of, ragged_masks, repeatable, rows


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
    with pytest.raises(ValueError, match=r"adv_estimator='gea' is unknown; known: gae, gdpo, gigpo, gpg"):
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


def options_of(**given):
    """Options for the batches of `a_batch`, which have two named rewards."""
    return AdvantageOptions(part_weights=(1.0, -0.5), **given)


def a_batch(mask, offsets, seed):
    """Random rewards and values; scores repeat, so that ties occur; three prompts; turns that begin anywhere, in one of two states."""
    n = offsets.numel() - 1
    generator = np.random.default_rng(seed)
    begins = torch.from_numpy(generator.random(mask.numel()) < 0.4)
    begins[offsets[:-1][offsets.diff() > 0]] = True
    starts = begins.nonzero().squeeze(1)
    return AdvantageBatch(
        token_level_rewards=torch.from_numpy(generator.integers(-2, 3, mask.numel()) * mask.numpy() * 0.5),
        mask=mask,
        offsets=offsets,
        values=normal(mask.numel(), seed),
        prompt_uids=[f"p{number}" for number in generator.integers(0, 3, n)],
        baselines=normal(n, seed + 1),
        parts=normal(2 * n, seed + 2).view(n, 2),
        turns=Turns(starts, [f"s{number}" for number in generator.integers(0, 2, len(starts))]),
        players=[("game", f"r{number}") for number in generator.integers(0, 2, n)],
        player_baselines={("game", "r0"): 0.5},
    )


def assert_same(found, expected):
    assert (found is None) == (expected is None)
    if found is not None:
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


every_estimator = st.sampled_from(ADV_ESTIMATORS)
without_order = st.sampled_from([name for name in ADV_ESTIMATORS if name != "spiral"])


@brief
@given(ragged_masks(), every_estimator, st.integers(0, 2**31), st.sampled_from([float("nan"), 1e30]))
def test_what_stands_on_masked_tokens_never_matters(ragged, name, seed, poison):
    mask, offsets = ragged
    batch = a_batch(mask, offsets, seed)
    clean = compute_advantages(name, batch, options_of(gamma=0.9, lam=0.8))
    poisoned = replace(batch, values=torch.where(mask, batch.values, poison))
    found = compute_advantages(name, poisoned, options_of(gamma=0.9, lam=0.8))
    for a, b in ((found.advantages, clean.advantages), (found.returns, clean.returns)):
        assert_same(a, b)
    assert not clean.advantages[~mask].any()


@brief
@given(ragged_masks(), every_estimator, st.integers(0, 2**31))
def test_trajectories_without_a_live_token_take_no_part(ragged, name, seed):
    mask, offsets = ragged
    batch = a_batch(mask, offsets, seed)
    whole = compute_advantages(name, batch, options_of())
    keep = [row for row, part in enumerate(rows(offsets)) if bool(mask[part].any())]
    found = compute_advantages(name, rows_of(batch, keep), options_of())
    kept = [torch.arange(offsets[row], offsets[row + 1]) for row in keep]
    index = torch.cat(kept) if kept else torch.zeros(0, dtype=torch.int64)
    assert_same(found.advantages, whole.advantages[index])


@brief
@given(ragged_masks(), without_order, st.integers(0, 2**31), st.randoms())
def test_the_order_of_trajectories_never_matters(ragged, name, seed, rng):
    mask, offsets = ragged
    batch = a_batch(mask, offsets, seed)
    order = list(range(offsets.numel() - 1))
    rng.shuffle(order)
    whole = compute_advantages(name, batch, options_of(gamma=0.9, lam=0.8))
    mixed = compute_advantages(name, rows_of(batch, order), options_of(gamma=0.9, lam=0.8))
    index = torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in order])
    assert_same(mixed.advantages, whole.advantages[index])
    assert_same(mixed.returns, None if whole.returns is None else whole.returns[index])


def rows_of(batch, order):
    """The trajectories `order` of the batch, in that order."""
    parts = [torch.arange(batch.offsets[row], batch.offsets[row + 1]) for row in order]
    index = torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
    states = dict(zip(batch.turns.starts.tolist(), batch.turns.states, strict=True))
    turns = [(place, states[token]) for place, token in enumerate(index.tolist()) if token in states]
    return AdvantageBatch(
        batch.token_level_rewards[index],
        batch.mask[index],
        offsets_of([len(part) for part in parts]),
        batch.values[index],
        [batch.prompt_uids[row] for row in order],
        batch.baselines[order],
        batch.parts[order],
        Turns(torch.tensor([place for place, _ in turns], dtype=torch.int64), [state for _, state in turns]),
        [batch.players[row] for row in order],
        batch.player_baselines,
    )


def test_the_groups_are_those_that_the_configuration_says():
    batch = a_batch(torch.ones(4, dtype=torch.bool), offsets_of([2, 2]), seed=3)
    for name in ADV_ESTIMATORS:
        without = replace(batch, prompt_uids=None)
        if name in GROUP_ESTIMATORS:
            with pytest.raises(ValueError, match=f"'{name}' needs the prompt of each trajectory"):
                compute_advantages(name, without, options_of())
        else:
            compute_advantages(name, without, options_of())


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
    found = compute_advantages("twice_the_reward", batch, options_of())
    torch.testing.assert_close(found.advantages, 2 * batch.token_level_rewards)


def test_a_result_that_does_not_fit_the_batch_is_refused():
    name = "a number a trajectory"
    register_advantage(name)(lambda batch, options: AdvantageResult(torch.zeros(2), None))
    batch = AdvantageBatch(torch.zeros(3), torch.ones(3, dtype=torch.bool), offsets_of([2, 1]))
    with pytest.raises(ValueError, match=r"returned advantages of shape \[2\] for a batch of 3 tokens"):
        compute_advantages(name, batch, options_of())


# Two groups, p: 1, 0, 0, 1 and q: 3, 1.
SCORES = torch.tensor([1.0, 3.0, 0.0, 0.0, 1.0, 1.0])
IDS = ["p", "q", "p", "p", "q", "p"]


def test_grpo_by_hand():
    # Group p: 1, 0, 0, 1: mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.577350, 0.5 / 0.577351 = 0.866024
    # Group q: 3, 1: mean 2, std sqrt(2) = 1.414214, 1 / 1.414215 = 0.707106
    scores = torch.tensor([1.0, 3.0, 0.0, 0.0, 1.0, 1.0])
    ids = ["p", "q", "p", "p", "q", "p"]
    expected = torch.tensor([0.866024, 0.707106, -0.866024, -0.866024, -0.707106, 0.866024])
    torch.testing.assert_close(grpo(scores, ids), expected, atol=2e-6, rtol=0)
    without_std = torch.tensor([0.5, 1.0, -0.5, -0.5, -1.0, 0.5])
    torch.testing.assert_close(grpo(scores, ids, norm_by_std=False), without_std)


def test_grpo_gives_0_to_a_group_of_one_and_to_equal_scores():
    scores = torch.tensor([0.7, 0.1, 0.1, 0.1])
    for norm_by_std in (True, False):
        assert torch.equal(grpo(scores, ["alone", "g", "g", "g"], norm_by_std), torch.zeros(4))


@repeatable
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-5, 5)), min_size=1), st.randoms())
def test_grpo_knows_groups_by_id_not_by_order(rows_in, rng: random.Random):
    shuffled = list(enumerate(rows_in))
    rng.shuffle(shuffled)

    def run(pairs):
        return grpo(torch.tensor([s for _, s in pairs], dtype=torch.float64), [g for g, _ in pairs])

    straight, mixed = run(rows_in), run([pair for _, pair in shuffled])
    for place, (original, _) in enumerate(shuffled):
        assert float(mixed[place]) == pytest.approx(float(straight[original]), abs=1e-6)


def test_rloo_by_hand():
    # p: 1 - (0 + 0 + 1) / 3 = 2/3 and 0 - (1 + 0 + 1) / 3 = -2/3; q: 3 - 1 = 2 and 1 - 3 = -2
    expected = torch.tensor([2 / 3, 2.0, -2 / 3, -2 / 3, -2.0, 2 / 3])
    torch.testing.assert_close(rloo(SCORES, IDS), expected)


def test_grpo_passk_by_hand():
    # a: 0, 5, 2: the best leads by 3; unbiased std of 0, 5, 2: mean 7/3, sqrt((49 + 64 + 1) / 9 / 2) = 2.516611
    # b: 1, 1, 0: two are best, so none leads. c: a single trajectory.
    scores, ids = torch.tensor([0.0, 1.0, 5.0, 1.0, 2.0, 0.0, 9.0]), list("abababc")
    torch.testing.assert_close(
        grpo_passk(scores, ids, norm_by_std=False), torch.tensor([0.0, 0, 3, 0, 0, 0, 0])
    )
    torch.testing.assert_close(
        grpo_passk(scores, ids), torch.tensor([0.0, 0, 3 / 2.516611, 0, 0, 0, 0]), atol=1e-5, rtol=0
    )


def test_opo_by_hand():
    # p: lengths 1, 1, 2, 4: baseline (1*1 + 4*1) / 8 = 0.625; q: lengths 3, 1: (3*3 + 1*1) / 4 = 2.5
    lengths = torch.tensor([1, 3, 1, 2, 1, 4])
    expected = torch.tensor([0.375, 0.5, -0.625, -0.625, -1.5, 0.375])
    torch.testing.assert_close(opo(SCORES, IDS, lengths), expected)


def test_gpg_by_hand():
    # r has equal scores: 2 of 8 trajectories without a gradient, alpha = 8 / 6; means 0.5 and 2
    scores = torch.cat([SCORES, torch.tensor([4.0, 4.0])])
    expected = torch.tensor([0.5, 1.0, -0.5, -0.5, -1.0, 0.5, 0.0, 0.0]) * (8 / 6)
    torch.testing.assert_close(gpg(scores, [*IDS, "r", "r"]), expected)
    assert torch.equal(gpg(torch.ones(3), ["a", "a", "b"]), torch.zeros(3))


def test_centred_by_hand():
    torch.testing.assert_close(centred(SCORES, IDS), torch.tensor([0.5, 1.0, -0.5, -0.5, -1.0, 0.5]))


def test_rewards_that_are_compared_by_themselves_do_not_collapse():
    """Two groups of two answers: in the first group one answer is better by one reward, in the second by both. For GRPO the groups' sums, (0, 1) and
    (0, 2), are equally good; for GDPO the second counts twice as much. The step's normalisation keeps that proportion."""
    parts, ids = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), ["a", "a", "b", "b"]
    half = 1 / math.sqrt(2)
    torch.testing.assert_close(grpo(parts.sum(1), ids), half * torch.tensor([-1.0, 1.0, -1.0, 1.0]))
    before = [-half, half, -2 * half, 2 * half]
    expected = torch.tensor(before) / statistics.stdev(before)
    torch.testing.assert_close(gdpo(parts, ids, (1.0, 1.0)), expected, rtol=1e-5, atol=1e-5)


def by_parts(parts, ids, weights):
    """GDPO from its formula, in plain Python."""
    total = [0.0] * len(ids)
    for number, weight in enumerate(weights):
        column = [row[number] for row in parts]
        for place, own in enumerate(ids):
            group = [value for value, other in zip(column, ids, strict=True) if other == own]
            if len(group) > 1:
                total[place] += (
                    weight * (column[place] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
                )
    if len(total) < 2:
        return [0.0]
    return [(value - statistics.mean(total)) / (statistics.stdev(total) + 1e-6) for value in total]


@brief
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from([0.0, 30.0, -7.5])
        ),
        min_size=1,
    ),
    st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
)
def test_gdpo_equals_its_definition(trajectories, weights):
    ids, parts = [row[0] for row in trajectories], [row[1:] for row in trajectories]
    found = gdpo(torch.tensor(parts, dtype=torch.float64), ids, weights)
    assert found.tolist() == pytest.approx(by_parts(parts, ids, weights), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "maxrl", "centred"])
def test_a_group_of_one_says_nothing(name):
    found = COMPARE[name](torch.tensor([0.7, 0.0, 1.0]), ["alone", "g", "g"], torch.tensor([2, 3, 3]))
    assert found[0] == 0
    assert found[2] > 0


COMPARE = {
    "grpo": lambda scores, ids, lengths: grpo(scores, ids),
    "grpo_passk": lambda scores, ids, lengths: grpo_passk(scores, ids),
    "rloo": lambda scores, ids, lengths: rloo(scores, ids),
    "opo": opo,
    "gpg": lambda scores, ids, lengths: gpg(scores, ids),
    "maxrl": lambda scores, ids, lengths: maxrl(scores, ids),
    "centred": lambda scores, ids, lengths: centred(scores, ids),
}


def by_definition(name, scores, ids, lengths):
    """The advantage of each trajectory by itself, from the papers' formulas, in plain Python."""
    useful = 0
    for own in ids:
        group = [s for s, g in zip(scores, ids, strict=True) if g == own]
        useful += max(group) != min(group)
    out = []
    for i, own in enumerate(ids):
        group = [j for j, other in enumerate(ids) if other == own]
        others = [scores[j] for j in group if j != i]
        mean = sum(scores[j] for j in group) / len(group)
        if not others:
            out.append(0.0)
        elif name == "rloo":
            out.append(scores[i] - sum(others) / len(others))
        elif name == "grpo_passk":
            out.append(max(scores[j] for j in group) - max(others))
        elif name == "opo":
            weight = sum(lengths[j] for j in group)
            out.append(scores[i] - sum(lengths[j] * scores[j] for j in group) / weight)
        elif name == "gpg":
            out.append((scores[i] - mean) * len(ids) / max(useful, 1))
        elif name == "maxrl":
            out.append((scores[i] - mean) / mean if mean > 0 else 0.0)
        else:
            out.append(scores[i] - mean)
    return out


@brief
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 1.0, -2.0]), st.integers(1, 9)),
        min_size=1,
    ),
    st.sampled_from(["grpo", "grpo_passk", "rloo", "opo", "gpg", "maxrl", "centred"]),
)
def test_every_comparison_equals_its_definition(trajectories, name):
    ids, scores, lengths = ([row[field] for row in trajectories] for field in range(3))
    values, counts = torch.tensor(scores, dtype=torch.float64), torch.tensor(lengths)
    if name in ("grpo", "grpo_passk"):
        found = {"grpo": grpo, "grpo_passk": grpo_passk}[name](values, ids, norm_by_std=False)
    else:
        found = COMPARE[name](values, ids, counts)
    assert found.tolist() == pytest.approx(by_definition(name, scores, ids, lengths))


def test_gae_by_hand():
    # gamma 0.9, lam 0.5, so gamma lam = 0.45.
    # First:  delta_3 = 1 - 0.7 = 0.3; delta_2 = 0.9*0.7 - 0.6 = 0.03; delta_1 = 0.9*0.6 - 0.5 = 0.04
    #         A_3 = 0.3; A_2 = 0.03 + 0.45*0.3 = 0.165; A_1 = 0.04 + 0.45*0.165 = 0.11425
    # Second: delta_2 = -1 - 0.2 = -1.2; delta_1 = 0.5 + 0.9*0.2 - 0.1 = 0.58; A_1 = 0.58 + 0.45*-1.2 = 0.04
    advantages, returns = gae(
        torch.tensor([0.0, 0.0, 1.0, 0.5, -1.0]),
        torch.tensor([0.5, 0.6, 0.7, 0.1, 0.2]),
        torch.ones(5, dtype=torch.bool),
        offsets_of([3, 2]),
        gamma=0.9,
        lam=0.5,
    )
    torch.testing.assert_close(advantages, torch.tensor([0.11425, 0.165, 0.3, 0.04, -1.2]))
    torch.testing.assert_close(returns, torch.tensor([0.61425, 0.765, 1.0, 0.14, -1.0]))


def test_masked_tokens_are_no_steps():
    # The first trajectory of test_gae_by_hand with masked tokens before, between and after its three.
    mask = torch.tensor([False, True, False, False, True, True, False])
    values = torch.tensor([9.0, 0.5, float("nan"), 9.0, 0.6, 0.7, 9.0])
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    advantages, returns = gae(rewards, values, mask, offsets_of([7]), gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([0.0, 0.11425, 0.0, 0.0, 0.165, 0.3, 0.0]))
    torch.testing.assert_close(returns, torch.tensor([0.0, 0.61425, 0.0, 0.0, 0.765, 1.0, 0.0]))


def gae_from_k_step_returns(rewards, values, gamma, lam):
    """The definition (arXiv:1506.02438, eq. 14 and 16's first line): the exponentially weighted mean of k-step advantages; those that reach past the
    end are all equal, so the last one has the rest of the weight."""
    n = len(rewards)
    advantages = []
    for t in range(n):
        k_step = []
        for k in range(1, n - t + 1):
            rest = gamma**k * values[t + k] if t + k < n else 0.0
            k_step.append(sum(gamma**i * rewards[t + i] for i in range(k)) + rest - values[t])
        weights = [(1 - lam) * lam**i for i in range(len(k_step))]
        weights[-1] = lam ** (len(k_step) - 1)
        advantages.append(sum(w * a for w, a in zip(weights, k_step, strict=True)))
    return advantages


@repeatable
@given(ragged_masks(), st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_definition(ragged, seed, gamma, lam):
    mask, offsets = ragged
    rewards = normal(mask.numel(), seed) * mask
    values = normal(mask.numel(), seed + 1)
    advantages, returns = gae(rewards, values, mask, offsets, gamma, lam)
    expected = torch.zeros_like(values)
    for row in rows(offsets):
        live = mask[row]
        numbers = gae_from_k_step_returns(rewards[row][live].tolist(), values[row][live].tolist(), gamma, lam)
        expected[row][live] = torch.tensor(numbers, dtype=torch.float64)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values * mask)


def test_gae_handles_1024_trajectories_of_1024_tokens_in_a_second():
    offsets = offsets_of([1024] * 1024)
    tokens = int(offsets[-1])
    rewards, values = torch.randn(tokens), torch.randn(tokens)
    seconds = []
    for _ in range(3):
        started = time.process_time()  # other programs' share of a busy machine does not count
        gae(rewards, values, torch.ones(tokens, dtype=torch.bool), offsets, 0.99, 0.95)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 1.0  # measured: 0.1 s on one core


def test_whitening_by_hand():
    # Live: 0, 2, 4: mean 2, unbiased variance (4 + 0 + 4) / 2 = 4, std 2.
    x = torch.tensor([0.0, float("nan"), 2.0, 4.0, 77.0])
    mask = torch.tensor([True, False, True, True, False])
    torch.testing.assert_close(masked_whiten(x, mask), torch.tensor([-1.0, 0.0, 0.0, 1.0, 0.0]))


@repeatable
@given(st.lists(st.tuples(st.floats(-100, 100), st.booleans()), min_size=2))
def test_whitened_live_tokens_have_mean_0_and_variance_1(pairs):
    x = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    mask = torch.tensor([flag for _, flag in pairs])
    live = x[mask].tolist()
    whitened = masked_whiten(x, mask)
    assert (whitened[~mask] == 0).all()
    if len(live) >= 2 and statistics.variance(live) > 1e-2:
        out = whitened[mask].tolist()
        assert statistics.mean(out) == pytest.approx(0, abs=1e-9)
        assert statistics.variance(out) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("live", [0, 1, 11])
def test_whitening_without_spread_gives_zeros(live):
    x = torch.full((11,), 0.1)  # in float32 the mean of these is not 0.1, and the residual would be blown up
    mask = torch.arange(11) < live
    assert torch.equal(masked_whiten(x, mask), torch.zeros(11))


def test_reward_to_go_by_hand():
    # gamma 0.5. First: 4; 2 + 0.5*4 = 4; (masked); 1 + 0.5*4 = 3. Second: -2.
    rewards = torch.tensor([1.0, 0.0, 2.0, 4.0, -2.0])
    mask = torch.tensor([True, False, True, True, True])
    to_go = reward_to_go(rewards, mask, offsets_of([4, 1]), gamma=0.5)
    torch.testing.assert_close(to_go, torch.tensor([3.0, 0.0, 4.0, 4.0, -2.0]))


@repeatable
@given(ragged_masks(), st.integers(0, 2**31), st.floats(0, 1))
def test_reward_to_go_is_gae_without_a_critic_and_with_lam_1(ragged, seed, gamma):
    mask, offsets = ragged
    rewards = normal(mask.numel(), seed) * mask
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, offsets, gamma, lam=1.0)
    torch.testing.assert_close(reward_to_go(rewards, mask, offsets, gamma), advantages)
