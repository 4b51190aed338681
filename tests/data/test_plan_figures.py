"""What plans come to, by hand."""

import numpy as np
import pytest

from megarl.data.plan_figures import aligned_lengths, aligned_total, plan_figures, sums_of


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
