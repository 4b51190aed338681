"""SPIRAL's baselines against its formula by hand: algorithm 1 of arXiv:2506.24119, with alpha 0.5, for which all numbers are exact."""

import math

import pytest
import torch

from megarl.algorithms.advantages import AdvantageBatch, AdvantageOptions, compute_advantages
from megarl.algorithms.player_baselines import rae

WHITE, BLACK, OTHER = ("nim", "white"), ("nim", "black"), ("poker", "white")


def test_the_papers_algorithm_by_hand() -> None:
    """White wins, wins and loses: b is 1/2, 3/4 and -1/8. Black, and white in another game, have baselines of their own."""
    scores = torch.tensor([1.0, -1.0, 1.0, 0.0, -1.0, 1.0])
    advantages, after = rae(scores, [WHITE, BLACK, WHITE, OTHER, WHITE, BLACK], {}, 0.5)
    assert advantages.tolist() == [0.5, -0.5, 0.25, 0.0, -0.875, 0.75]
    assert after == {WHITE: -0.125, BLACK: 0.25, OTHER: 0.0}


def test_baselines_go_on_from_step_to_step() -> None:
    scores, players = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64), [WHITE, BLACK, WHITE, WHITE]
    at_once, after = rae(scores, players, {}, 0.95)
    first, between = rae(scores[:2], players[:2], {}, 0.95)
    kept = dict(between)
    second, end = rae(scores[2:], players[2:], between, 0.95)
    assert torch.cat([first, second]).tolist() == at_once.tolist() and end == after
    assert between == kept, "the state before a step is left as it was"
    # The authors' code takes the baseline before its update; the result differs only by the factor.
    assert second[0].item() == pytest.approx(0.95 * (0.5 - between[WHITE]))


def test_a_score_that_is_not_finite_moves_no_baseline() -> None:
    advantages, after = rae(torch.tensor([1.0, math.nan, 1.0]), [WHITE] * 3, {}, 0.5)
    assert after == {WHITE: 0.75} and math.isnan(advantages[1]) and advantages[2] == 0.25


def test_the_estimator_leaves_out_trajectories_without_a_live_token() -> None:
    batch = AdvantageBatch(
        torch.tensor([0.0, 1.0, 0.0, 0.0, 0.25, 0.75]),
        torch.tensor([True, True, False, False, True, True]),
        torch.tensor([0, 2, 4, 6]),
        players=[WHITE, WHITE, BLACK],
        player_baselines={BLACK: 2.0},
    )
    found = compute_advantages("spiral", batch, AdvantageOptions(baseline_decay=0.5))
    assert found.advantages.tolist() == [0.5, 0.5, 0.0, 0.0, -0.5, -0.5] and found.returns is None
    assert found.player_baselines == {WHITE: 0.5, BLACK: 1.5}
    with pytest.raises(ValueError, match="'spiral' needs the game and the player"):
        compute_advantages(
            "spiral",
            AdvantageBatch(*[batch.token_level_rewards, batch.mask, batch.offsets]),
            AdvantageOptions(),
        )
