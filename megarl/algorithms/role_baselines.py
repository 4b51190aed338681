"""Baselines of the players of games, kept from step to step: role-conditioned advantage estimation of SPIRAL."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Role = tuple[str, str]
"""(game, player): a data source, and a player of its sessions or "" where there are none."""


def rae(
    scores: Tensor, roles: Sequence[Role], baselines: Mapping[Role, float], decay: float
) -> tuple[Tensor, dict[Role, float]]:
    """b <- decay b + (1 - decay) R, A = R - b, trajectory by trajectory in their order; each role has a b of its own, which begins at 0.

    SPIRAL, arXiv:2506.24119, equation 2 and algorithm 1 (decay: its alpha). So A = decay (R - the b before). The authors' code
    (spiral-rl/spiral, where decay is 0.95) subtracts the b before, without the factor. A score that is not finite moves no baseline.

    Args: scores [n], of trajectories that have a live token; roles [n]; baselines: of the roles seen before.
    Returns: the advantages [n], in the scores' dtype, and the baselines of all roles after the last trajectory.
    """
    assert len(roles) == scores.numel(), f"{len(roles)} roles for {scores.numel()} scores"
    found, advantages = dict(baselines), []
    for score, role in zip(scores.double().tolist(), roles, strict=True):
        if math.isfinite(score):
            found[role] = decay * found.get(role, 0.0) + (1.0 - decay) * score
        advantages.append(score - found.get(role, 0.0))
    return torch.tensor(advantages, dtype=torch.float64).to(scores.dtype), found
