"""Trajectories whose tokens were drawn from a part of the vocabulary (data/kept.py): what they can be learnt with, and their metrics."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from megarl.config import TrainConfig
from megarl.config.checks.rollout import kept_token_problems
from megarl.data.kept import KEPT_COUNTS
from megarl.data.trajectories import ragged


def check_kept(table: pa.Table, config: TrainConfig) -> None:
    """ValueError: trajectories have kept tokens, and the configuration has a loss that is none for them, as with trajectories of another run."""
    if KEPT_COUNTS not in table.column_names:
        return
    problems = list(kept_token_problems(config, "trajectories with kept tokens"))
    if problems:
        raise ValueError("\n".join(problems))


def kept_metrics(table: pa.Table) -> dict[str, float]:
    """rollout/kept_tokens/mean, max and alone: from how many tokens those that the policy chose were drawn, and the share of those that were drawn
    from one, which have the log-prob 0 and no gradient; {}: from all."""
    if KEPT_COUNTS not in table.column_names:
        return {}
    counts = ragged(table, KEPT_COUNTS)[0][ragged(table, "response_mask")[0]]
    if not len(counts):
        return {}
    found = {"mean": counts.mean(), "max": counts.max(), "alone": np.mean(counts == 1)}
    return {f"rollout/kept_tokens/{name}": float(value) for name, value in found.items()}
