"""Baselines of the players of games, kept from step to step: role-conditioned advantage estimation of SPIRAL."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Player = tuple[str, str]
"""(game, player): a data source, and a player of its sessions or "" where there are none."""


def rae(
    scores: Tensor, players: Sequence[Player], baselines: Mapping[Player, float], decay: float
) -> tuple[Tensor, dict[Player, float]]:
    """b <- decay b + (1 - decay) R, A = R - b, trajectory by trajectory in their order; each player has a b of its own, which begins at 0.

    SPIRAL, arXiv:2506.24119, equation 2 and algorithm 1 (decay: its alpha). So A = decay (R - the b before). The authors' code
    (spiral-rl/spiral, where decay is 0.95) subtracts the b before, without the factor. A score that is not finite moves no baseline.

    Args: scores [n], of trajectories that have a live token; players [n]; baselines: of the players seen before.
    Returns: the advantages [n], in the scores' dtype, and the baselines of all players after the last trajectory.
    """
    assert len(players) == scores.numel(), f"{len(players)} players for {scores.numel()} scores"
    found, advantages = dict(baselines), []
    for score, player in zip(scores.double().tolist(), players, strict=True):
        if math.isfinite(score):
            found[player] = decay * found.get(player, 0.0) + (1.0 - decay) * score
        advantages.append(score - found.get(player, 0.0))
    return torch.tensor(advantages, dtype=torch.float64).to(scores.dtype), found
