"""Trajectories of one prompt stay together, within all limits of a plan."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.balance import sequence_costs
from megarl.data.shared_prompts import plan_groups, shared_tokens

PAIR_SHARE = 0.001


def shared_rows(prompts: list[list[int]]) -> list[int]:
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    return shared_tokens(np.array(list(itertools.chain(*prompts)), dtype=np.int32), lengths).tolist()


def test_neighbours_share_all_of_a_prompt_but_its_last_token() -> None:
    a, b = [5, 6, 7, 8], [5, 6, 7, 9]
    assert shared_rows([a, a, a, b, a, b, b]) == [0, 3, 3, 0, 0, 0, 3]
    assert shared_rows([[4], [4]]) == [0, 0]  # there is nothing but the last token
    assert shared_rows([[4, 4], [4], [4, 4]]) == [0, 0, 0]


def plan(lengths: np.ndarray, shared: np.ndarray, **changed: object) -> list | None:
    limits = {
        "pair_share": PAIR_SHARE, "num_dp": 2, "mini_batch_size": 12, "max_tokens": None, "micro_batch_size": 6,
        "multiple_of": 1, "epochs": 1, "shuffle": False, "seed": 0,
    }  # fmt: skip
    return plan_groups(lengths, shared, **limits | changed)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 5), st.sampled_from([4, 8, 12]), st.booleans(), st.booleans(), st.integers(0, 99))
def test_groups_are_planned_as_one(size: int, groups: int, tokens: bool, shuffle: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    prompts = generator.integers(2, 30, groups).repeat(size)
    lengths = prompts + generator.integers(1, 40, groups * size)
    shared = np.where(np.arange(groups * size) % size == 0, 0, prompts - 1)
    own = (lengths - shared).reshape(-1, size).sum(axis=1)
    limit = (
        {"max_tokens": 2 * int(own.max()), "micro_batch_size": None}
        if tokens
        else {"micro_batch_size": 2 * size}
    )
    found = plan(lengths, shared, mini_batch_size=4 * size, epochs=2, shuffle=shuffle, seed=seed, **limit)
    assert len(found) == 2 * groups // 4
    for epoch in (found[: groups // 4], found[groups // 4 :]):
        rows = [row for shares in epoch for share in shares for micro in share for row in micro]
        assert sorted(rows) == list(range(groups * size))
    for shares in found:
        assert len(shares) == 2 and len(shares[0]) == len(shares[1])
        for micro in itertools.chain(*shares):
            whole = [
                list(range(group * size, group * size + size))
                for group in dict.fromkeys(row // size for row in micro)
            ]
            assert micro == [row for group in whole for row in group]  # together, in the table's order
            assert len(micro) <= 2 * size or tokens
            assert not tokens or own[[group[0] // size for group in whole]].sum() <= limit["max_tokens"]


@pytest.mark.parametrize(
    ("shared", "changed"),
    [
        ([0] * 12, {}),  # no two have a prompt in common
        ([0, 4, 4, 0, 4, 0, 4, 4, 4, 0, 4, 4], {}),  # not all as many
        ([0, 4, 4] * 4, {"mini_batch_size": 4}),  # a mini-batch would end within
        ([0, 4, 4] * 4, {"micro_batch_size": 2}),
        ([0, 4, 4] * 4, {"micro_batch_size": None, "max_tokens": 21}),
        ([0, 4, 4] * 4, {"num_dp": 3}),
    ],
)
def test_where_they_cannot_rows_are_planned_one_by_one(shared: list[int], changed: dict) -> None:
    assert plan(np.full(12, 10), np.array(shared), **changed) is None
    assert plan(np.full(12, 10), np.array([0, 4, 4] * 4), micro_batch_size=None, max_tokens=22) is not None


def test_what_is_shared_costs_nothing() -> None:
    """Half of the prompts are long: a rank that had all of them would have more to do."""
    prompts = np.array([4] * 4 + [64] * 4).repeat(4)
    shared = np.where(np.arange(32) % 4 == 0, 0, prompts - 1)
    (found,) = plan(prompts + 8, shared, mini_batch_size=32, micro_batch_size=16)
    costs = sequence_costs(prompts + 8, PAIR_SHARE) - np.where(
        shared > 0, sequence_costs(shared, PAIR_SHARE), 0
    )
    ranks = [sum(costs[row] for micro in share for row in micro) for share in found]
    assert ranks[0] == ranks[1]
