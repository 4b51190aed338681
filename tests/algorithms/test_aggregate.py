import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.aggregate import (
    LOSS_AGG_MODES,
    LossAggregation,
    LossCounts,
    loss_counts,
    token_weights,
)
from megarl.config.schema import algorithm as algorithm_sections
from tests.algorithms.ragged_examples import normal, offsets_of, ragged_masks, repeatable, rows


def test_weights_by_hand():
    # Live tokens: 2 in the first trajectory, 0 in the second, 1 in the third: 3 tokens, 2 trajectories.
    mask = torch.tensor([True, False, True, False, True])
    offsets = offsets_of([3, 1, 1])
    counts = loss_counts(mask, offsets)
    assert counts == LossCounts(tokens=3, trajectories=2)
    expected = {
        "token-mean": [1 / 3, 0, 1 / 3, 0, 1 / 3],
        "seq-mean-token-sum": [1 / 2, 0, 1 / 2, 0, 1 / 2],
        "seq-mean-token-mean": [1 / 4, 0, 1 / 4, 0, 1 / 2],
        "token-sum": [1.0, 0, 1, 0, 1],
        "seq-mean-token-sum-norm": [1 / 20, 0, 1 / 20, 0, 1 / 20],
    }
    assert set(expected) == set(LOSS_AGG_MODES) == set(algorithm_sections.LOSS_AGG_MODES)
    for mode, numbers in expected.items():
        found = token_weights(LossAggregation(mode, scale_factor=10.0), mask, offsets, counts)
        torch.testing.assert_close(found, torch.tensor(numbers))


def mean_by_definition(mode, losses, mask, offsets):
    """The mean computed directly from the mode's name, in a loop over trajectories."""
    per_trajectory = [losses[row][mask[row]] for row in rows(offsets) if bool(mask[row].any())]
    if not per_trajectory:
        return 0.0
    if mode == "token-mean":
        return float(torch.cat(per_trajectory).mean())
    if mode == "token-sum":
        return float(torch.cat(per_trajectory).sum())
    inner = torch.Tensor.mean if mode == "seq-mean-token-mean" else torch.Tensor.sum
    mean = sum(float(inner(losses)) for losses in per_trajectory) / len(per_trajectory)
    return mean / 7.0 if mode == "seq-mean-token-sum-norm" else mean


@repeatable
@given(ragged_masks(), st.sampled_from(LOSS_AGG_MODES), st.integers(0, 2**31), st.data())
def test_any_split_sums_to_the_mean_of_the_whole(ragged, mode, seed, data):
    mask, offsets = ragged
    losses = normal(mask.numel(), seed)
    n = offsets.numel() - 1
    owner = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))  # which rank gets each trajectory
    parts = []
    for rank in range(3):
        mine = [row for row, rank_of in zip(rows(offsets), owner, strict=True) if rank_of == rank]
        index = torch.cat(
            [torch.arange(row.start, row.stop) for row in mine] or [torch.zeros(0, dtype=torch.int64)]
        )
        parts.append((losses[index], mask[index], offsets_of([row.stop - row.start for row in mine])))
    counts = sum((loss_counts(m, o) for _, m, o in parts), LossCounts(0, 0))
    total = sum(
        float((token_weights(LossAggregation(mode, 7.0), m, o, counts) * part).sum()) for part, m, o in parts
    )
    assert total == pytest.approx(mean_by_definition(mode, losses, mask, offsets), rel=1e-5, abs=1e-6)


def test_unknown_mode_is_refused():
    mask, offsets = torch.ones(1, dtype=torch.bool), offsets_of([1])
    with pytest.raises(ValueError, match="loss_agg_mode='mean' is unknown; known: token-mean"):
        token_weights(LossAggregation("mean"), mask, offsets, loss_counts(mask, offsets))


def test_local_counts_in_place_of_global_ones_are_noticed():
    mask, offsets = torch.ones(4, dtype=torch.bool), offsets_of([4])
    with pytest.raises(AssertionError, match="counts must be those of all ranks"):
        token_weights(LossAggregation("token-mean"), mask, offsets, LossCounts(tokens=3, trajectories=1))
