"""Each guarantee that megarl/data/balance.py opens with, under its name."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.balance import (
    aligned_lengths,
    aligned_total,
    micro_batches,
    partition_balanced,
    plan_figures,
    plan_groups,
    plan_mini_batches,
    sequence_costs,
    shared_tokens,
    sums_of,
)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@st.composite
def plans(draw):
    """Arguments for which a plan is promised: mini-batches are multiples of num_dp * multiple_of."""
    num_dp = draw(st.integers(1, 4))
    multiple_of = draw(st.integers(1, 3))
    mini_batch_size = num_dp * multiple_of * draw(st.integers(1, 4))
    num_rows = mini_batch_size * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 60), min_size=num_rows, max_size=num_rows))
    by_tokens = draw(st.booleans())
    pair_share = draw(
        st.sampled_from([None, 0.0, 0.01, 1.0])
    )  # with 1 a sequence of 60 tokens costs 31 times its tokens
    return {
        "lengths": lengths,
        "costs": None if pair_share is None else sequence_costs(lengths, pair_share),
        "num_dp": num_dp,
        "mini_batch_size": mini_batch_size,
        "max_tokens": max(lengths) + draw(st.integers(0, 100)) if by_tokens else None,
        "micro_batch_size": None if by_tokens else draw(st.integers(1, 9)),
        "epochs": draw(st.integers(1, 3)),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32)),
        "multiple_of": multiple_of,
    }


def rows_of(mini_batch):
    return [row for rank in mini_batch for micro in rank for row in micro]


@given(plans())
def test_exactly_once(arguments):
    plan = plan_mini_batches(**arguments)
    num_rows, size = len(arguments["lengths"]), arguments["mini_batch_size"]
    per_epoch = num_rows // size
    assert len(plan) == per_epoch * arguments["epochs"]
    for epoch in range(arguments["epochs"]):
        batches = plan[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(itertools.chain(*map(rows_of, batches))) == list(range(num_rows))
        for number, batch in enumerate(batches):
            assert len(rows_of(batch)) == size
            if not arguments["shuffle"]:
                assert sorted(rows_of(batch)) == list(range(number * size, (number + 1) * size))


@given(plans())
def test_within_budget(arguments):
    for batch in plan_mini_batches(**arguments):
        for micro in itertools.chain(*batch):
            assert micro
            if arguments["max_tokens"]:
                assert sum(arguments["lengths"][row] for row in micro) <= arguments["max_tokens"]
            else:
                assert len(micro) <= arguments["micro_batch_size"]


@given(plans())
def test_same_count(arguments):
    for batch in plan_mini_batches(**arguments):
        assert len(batch) == arguments["num_dp"]
        counts = {len(rank) for rank in batch}
        assert len(counts) == 1
        assert counts.pop() % arguments["multiple_of"] == 0


@given(plans())
def test_deterministic(arguments):
    as_array = {**arguments, "lengths": np.array(arguments["lengths"])}
    assert plan_mini_batches(**arguments) == plan_mini_batches(**as_array)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 50))
def test_always_possible(num_dp, multiple_of, rows_each, length):
    """The hardest case: every row fills a micro-batch by itself."""
    num_rows = num_dp * multiple_of * rows_each
    plan = plan_mini_batches(
        [length] * num_rows,
        num_dp=num_dp,
        mini_batch_size=num_rows,
        max_tokens=length,
        multiple_of=multiple_of,
    )
    assert [[len(micro) for micro in rank] for rank in plan[0]] == [[1] * multiple_of * rows_each] * num_dp


def first_fit_decreasing(lengths, budget):
    bins = []
    for length in sorted(lengths, reverse=True):
        for index, used in enumerate(bins):
            if used + length <= budget:
                bins[index] += length
                break
        else:
            bins.append(length)
    return len(bins)


@given(LENGTHS, st.integers(0, 100), st.integers(1, 4))
def test_few(lengths, room, multiple_of):
    budget = max(lengths) + room
    lengths = lengths * multiple_of  # so that a plan is possible
    check_few(lengths, budget, multiple_of, micro_batches(lengths, budget, multiple_of))
    # By cost alone, more texts would be together than fit: the token budget has priority.
    costs = sequence_costs(lengths, 1.0)
    check_few(lengths, budget, multiple_of, micro_batches(lengths, budget, multiple_of, costs))


def check_few(lengths, budget, multiple_of, bins):
    enough = -(-first_fit_decreasing(lengths, budget) // multiple_of) * multiple_of
    assert -(-sum(lengths) // budget) <= len(bins) <= enough
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert max(sum(lengths[row] for row in part) for part in bins) <= budget


def smallest_largest_sum(lengths, k):
    """The optimum, found by trying all assignments."""
    best = sum(lengths)
    for places in itertools.product(range(k), repeat=len(lengths)):
        sums = [0] * k
        for length, place in zip(lengths, places, strict=True):
            sums[place] += length
        best = min(best, max(sums))
    return best


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=40)
def test_balanced_against_the_optimum(lengths, k):
    """At most 4/3 - 1/(3k) times the optimum: Michiels, Korst, Aarts, "Performance ratios of the
    Karmarkar-Karp differencing method", Journal of Combinatorial Optimization 13 (2007)."""
    k = min(k, len(lengths))
    parts = partition_balanced(lengths, k, equal_size=False)
    largest = max(sum(lengths[item] for item in part) for part in parts)
    assert largest <= (4 / 3 - 1 / (3 * k)) * smallest_largest_sum(lengths, k) + 1e-9


@given(LENGTHS, st.integers(1, 12), st.booleans())
def test_partition_is_a_partition(lengths, k, equal_size):
    k = min(k, len(lengths))
    parts = partition_balanced(lengths, k, equal_size)
    assert len(parts) == k
    assert all(parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    if equal_size:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_partition_by_hand():
    # the method's textbook example: differences 8-7 = 1, 6-5 = 1, 4-1 = 3, 3-1 = 2: sums 16 and 14
    parts = partition_balanced([8, 7, 6, 5, 4], 2, equal_size=False)
    assert [sum([8, 7, 6, 5, 4][item] for item in part) for part in parts] == [16, 14]


def test_balanced_over_ranks():
    """Realistic lengths: ranks differ by less than the longest row, and micro-batches are filled evenly."""
    lengths = np.random.default_rng(0).lognormal(5.0, 0.8, size=512).astype(int).clip(1, 2000)
    (batch,) = plan_mini_batches(lengths, num_dp=8, mini_batch_size=512, max_tokens=4096)
    loads = [sum(lengths[row] for micro in rank for row in micro) for rank in batch]
    assert max(loads) - min(loads) < 0.01 * np.mean(loads)
    fills = [lengths[micro].sum() for rank in batch for micro in rank]
    assert max(fills) < 1.05 * min(fills)
    assert all(
        [lengths[micro].sum() for micro in rank]
        == sorted((lengths[micro].sum() for micro in rank), reverse=True)
        for rank in batch
    )


def test_costs_of_sequences():
    # 4 tokens and their 1 + 2 + 3 + 4 pairs, each a tenth of a token
    assert sequence_costs([4, 1], 0.1).tolist() == [5000, 1100]
    assert sequence_costs([4, 1], 0.0).tolist() == [4000, 1000]


def test_balanced_by_cost():
    """One text of 100 tokens or ten texts of 10: equally many tokens, but 5,050 pairs against 550."""
    lengths = [100] * 4 + [10] * 40
    costs = sequence_costs(lengths, 0.05)
    (by_cost,) = plan_mini_batches(lengths, num_dp=4, mini_batch_size=44, max_tokens=250, costs=costs)
    assert all(sum(lengths[row] == 100 for micro in rank for row in micro) == 1 for rank in by_cost)
    assert plan_figures([by_cost], costs).rank_imbalance == 0
    (uneven,) = plan_mini_batches([100, 100, 90, 10, 100], num_dp=2, mini_batch_size=5, max_tokens=210)
    assert plan_figures([uneven], [1, 1, 1, 1, 1]).rank_imbalance > 0


def test_level_where_first_fit_decides():
    """Karmarkar-Karp exceeds the budget, and first-fit-decreasing leaves sums of 12, 13, 13 and 14: exchanges of rows level them."""
    lengths = [9, 8, 8, 5, 5, 4, 4, 3, 3, 3]
    parts = partition_balanced(lengths, 4, equal_size=False)
    assert max(sum(lengths[row] for row in part) for part in parts) > 14
    bins = micro_batches(lengths, 14)
    assert [sum(lengths[row] for row in part) for part in bins] == [13, 13, 13, 13]
    assert sorted(itertools.chain(*bins)) == list(range(10))


@pytest.mark.parametrize("num_dp", [2, 8, 32, 64])
def test_lengths_like_gsm8ks_are_within_three_percent(num_dp):
    """Prompts of about 100 tokens, responses of a long tail; Qwen2.5-7B's attention (a pair is 1 / 70,000 of a token).

    The costliest rank, and the costliest micro-batch, cost at most 3 % more than their mean.
    """
    random = np.random.default_rng(num_dp)
    lengths = random.integers(60, 250, 1024) + np.minimum(random.lognormal(5.2, 0.6, 1024), 1024).astype(int)
    costs = sequence_costs(lengths, 1 / 70_000)
    plan = plan_mini_batches(lengths, num_dp=num_dp, mini_batch_size=1024, max_tokens=8192, costs=costs)
    figures = plan_figures(plan, costs)
    assert figures.rank_imbalance < 0.03
    assert figures.micro_imbalance < 0.03
    assert figures.num_micro == len(plan[0][0])


def test_shuffle_differs_by_epoch_and_seed():
    arguments = {"num_dp": 1, "mini_batch_size": 4, "micro_batch_size": 4, "epochs": 2, "shuffle": True}
    first = plan_mini_batches([5] * 32, seed=1, **arguments)
    second = plan_mini_batches([5] * 32, seed=2, **arguments)
    assert list(map(rows_of, first[:8])) != list(map(rows_of, first[8:]))
    assert list(map(rows_of, first)) != list(map(rows_of, second))


def test_last_mini_batch_may_be_smaller():
    plan = plan_mini_batches([3] * 10, num_dp=2, mini_batch_size=4, micro_batch_size=2)
    assert [len(rows_of(batch)) for batch in plan] == [4, 4, 2]


def test_too_long_row_is_named():
    with pytest.raises(ValueError, match=r"row 2 has 90 tokens, more than the 80 .* to 90 at least"):
        plan_mini_batches([10, 20, 90, 30], num_dp=1, mini_batch_size=4, max_tokens=80)
    with pytest.raises(ValueError, match="row 1 has 9 tokens"):
        micro_batches([1, 9], 8)


def test_too_few_rows_are_refused_with_numbers():
    with pytest.raises(ValueError, match=r"mini-batch of 3 rows .* 4 data parallel ranks .* at least 4 rows"):
        plan_mini_batches([5] * 3, num_dp=4, mini_batch_size=3, max_tokens=10)
    with pytest.raises(ValueError, match="5 rows need 6 micro-batches"):
        plan_mini_batches([10] * 5, num_dp=2, mini_batch_size=5, max_tokens=10)
    with pytest.raises(ValueError, match="mini-batch of 5 rows in micro-batches of 1 needs 6"):
        plan_mini_batches([10] * 5, num_dp=2, mini_batch_size=5, micro_batch_size=1)


def test_exactly_once_for_thousands_of_rows():
    lengths = np.random.default_rng(1).integers(1, 8192, size=8192)
    (batch,) = plan_mini_batches(lengths, num_dp=64, mini_batch_size=8192, max_tokens=32768)
    assert sorted(rows_of(batch)) == list(range(8192))


def test_figures_of_a_plan():
    plan = [[[[0], [1]], [[2], [3]]], [[[0, 1]], [[2, 3]]]]
    figures = plan_figures(plan, [1, 2, 3, 2])  # ranks cost 3 and 5 in both mini-batches
    assert figures.rank_imbalance == pytest.approx(1 / 4)
    assert figures.micro_imbalance == pytest.approx((3 / 2 - 1 + 1 / 4) / 2)
    assert figures.num_micro == 1.5


def test_alignment_by_hand():
    assert aligned_lengths([5, 3]).tolist() == [5, 3]
    assert aligned_lengths([5, 3], tp=2, sequence_parallel=True).tolist() == [5, 3]
    assert aligned_lengths([5, 3], tp=4, sequence_parallel=False).tolist() == [5, 3]
    assert aligned_lengths([5, 4], tp=4, sequence_parallel=True).tolist() == [5, 7]
    assert aligned_lengths([5, 3], cp=2).tolist() == [8, 4]
    assert aligned_lengths([5, 3], tp=4, cp=2, sequence_parallel=True).tolist() == [8, 8]
    assert aligned_lengths([5, 4], multiple=16).tolist() == [5, 11]
    assert aligned_lengths([5, 4], tp=2, sequence_parallel=True, multiple=16).tolist() == [5, 27]
    assert aligned_lengths([5, 4], tp=2, multiple=16).tolist() == [5, 11]
    assert aligned_lengths([5, 4], tp=2, cp=2, sequence_parallel=True, multiple=16).tolist() == [8, 56]


@pytest.mark.parametrize(
    "tp, cp, sequence_parallel", [(1, 1, False), (4, 1, True), (1, 2, False), (4, 2, True)]
)
def test_the_total_is_that_of_each_micro_batch(tp, cp, sequence_parallel):
    lengths = np.random.default_rng(0).integers(1, 50, 20)
    parts = [[3, 1, 19], [0], [5, 4, 6, 7]]
    options = {"tp": tp, "cp": cp, "sequence_parallel": sequence_parallel}
    expected = sum(aligned_lengths(lengths[part], **options).sum() for part in parts)
    assert aligned_total(lengths, parts, **options) == expected


def test_sums_of_parts():
    assert sums_of(np.array([1, 2, 4, 8]), [[0, 3], [], [1], [2, 1, 0], []]).tolist() == [9, 0, 2, 7, 0]


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


@settings(max_examples=40)
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
        ([0] * 12, {}),  # no two rows have a prompt in common
        ([0, 4, 4, 0, 4, 0, 4, 4, 4, 0, 4, 4], {}),  # prompts have different numbers of rows
        ([0, 4, 4] * 4, {"mini_batch_size": 4}),  # a mini-batch would end within a prompt's rows
        ([0, 4, 4] * 4, {"micro_batch_size": 2}),
        ([0, 4, 4] * 4, {"micro_batch_size": None, "max_tokens": 21}),
        ([0, 4, 4] * 4, {"num_dp": 3}),
    ],
)
def test_where_they_cannot_rows_are_planned_one_by_one(shared: list[int], changed: dict) -> None:
    assert plan(np.full(12, 10), np.array(shared), **changed) is None
    assert plan(np.full(12, 10), np.array([0, 4, 4] * 4), micro_batch_size=None, max_tokens=22) is not None


def test_what_is_shared_costs_nothing() -> None:
    """Half of the prompts are long: a rank with all of the long ones would have more to do."""
    prompts = np.array([4] * 4 + [64] * 4).repeat(4)
    shared = np.where(np.arange(32) % 4 == 0, 0, prompts - 1)
    (found,) = plan(prompts + 8, shared, mini_batch_size=32, micro_batch_size=16)
    costs = sequence_costs(prompts + 8, PAIR_SHARE) - np.where(
        shared > 0, sequence_costs(shared, PAIR_SHARE), 0
    )
    ranks = [sum(costs[row] for micro in share for row in micro) for share in found]
    assert ranks[0] == ranks[1]
