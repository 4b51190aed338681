"""Trajectories whose tokens were drawn from a part of the vocabulary (data/kept.py): what they can be learnt with, and their metrics."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from megarl.config import TrainConfig
from megarl.config.checks.rollout import kept_token_problems
from megarl.data.kept import KEPT_COUNTS
from megarl.data.trajectories import ragged


def check_kept(table: pa.Table, config: TrainConfig) -> None:
    """ValueError: the trajectories, of another run for example, have kept tokens, and a loss of the configuration does not fit these."""
    if KEPT_COUNTS not in table.column_names:
        return
    problems = list(kept_token_problems(config, "trajectories with kept tokens"))
    if problems:
        raise ValueError("\n".join(problems))


def kept_metrics(table: pa.Table) -> dict[str, float]:
    """From how many tokens the policy's tokens were drawn: rollout/kept_tokens/mean, max, and alone, the share of tokens that were drawn
    from one token, with the log-prob 0 and no gradient; {}: all were drawn from the whole vocabulary."""
    if KEPT_COUNTS not in table.column_names:
        return {}
    counts = ragged(table, KEPT_COUNTS)[0][ragged(table, "response_mask")[0]]
    if not len(counts):
        return {}
    found = {"mean": counts.mean(), "max": counts.max(), "alone": np.mean(counts == 1)}
    return {f"rollout/kept_tokens/{name}": float(value) for name, value in found.items()}
