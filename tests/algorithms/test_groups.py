import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.groups import centred, gpg, grpo, grpo_passk, opo, rloo
from tests.algorithms.ragged_examples import brief, repeatable

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
    # b: 1, 1, 0: two are best, nobody leads. c: alone.
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


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "centred"])
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
    "centred": lambda scores, ids, lengths: centred(scores, ids),
}


def by_definition(name, scores, ids, lengths):
    """Each trajectory by itself, from the papers' formulas, in plain Python."""
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
        else:
            out.append(scores[i] - mean)
    return out


@brief
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 1.0, -2.0]), st.integers(1, 9)),
        min_size=1,
    ),
    st.sampled_from(["grpo", "grpo_passk", "rloo", "opo", "gpg", "centred"]),
)
def test_every_comparison_equals_its_definition(trajectories, name):
    ids, scores, lengths = ([row[field] for row in trajectories] for field in range(3))
    values, counts = torch.tensor(scores, dtype=torch.float64), torch.tensor(lengths)
    if name in ("grpo", "grpo_passk"):
        found = {"grpo": grpo, "grpo_passk": grpo_passk}[name](values, ids, norm_by_std=False)
    else:
        found = COMPARE[name](values, ids, counts)
    assert found.tolist() == pytest.approx(by_definition(name, scores, ids, lengths))
