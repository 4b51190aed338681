"""Scores of trajectories, and what else their rewards tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from megarl.data.trajectories import append_column
from megarl.rewards.registry import RewardFunction
from megarl.rewards.scoring import score_trajectories

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def score(
    batch: pa.Table, tokenizer: PreTrainedTokenizerBase, reward: RewardFunction | None
) -> tuple[pa.Table, dict[str, float]]:
    """Append `score`; other numbers that the reward function gave become metrics."""
    responses = tokenizer.batch_decode(batch["response_ids"].to_pylist(), skip_special_tokens=True)
    result = score_trajectories(
        uids=batch["uid"].to_pylist(),
        data_sources=batch["data_source"].to_pylist(),
        responses=responses,
        ground_truths=batch["ground_truth"].to_pylist(),
        extra_infos=batch["extra_info"].to_pylist(),
        custom=reward,
    )
    metrics = {f"reward/{name}": float(np.nanmean(values)) for name, values in result.metrics.items()}
    return append_column(batch, "score", np.asarray(result.scores)), metrics
