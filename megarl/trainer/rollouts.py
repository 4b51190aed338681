"""Rollouts: trajectories for prompts, of training and of validation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from megarl.data.trajectories import expand_prompts
from megarl.rewards.registry import RewardFunction
from megarl.rollout.engine import SamplingParams
from megarl.trainer.dispatch import split_requests
from megarl.trainer.scoring import score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.cluster import WorkerGroup
    from megarl.trainer.run import Run


def generate(run: Run, engines: WorkerGroup, prompts: pa.Table, sampling: SamplingParams, n: int) -> pa.Table:
    """`n` trajectories for each prompt, in the prompts' order."""
    parts = split_requests(expand_prompts(prompts, n), engines.world_size)
    refs = engines.call_each("generate", [(part, sampling) for part in parts])
    return pa.concat_tables(run.wait(refs)).combine_chunks()


def validate(
    run: Run,
    engines: WorkerGroup,
    prompts: pa.Table,
    sampling: SamplingParams,
    n: int,
    tokenizer: PreTrainedTokenizerBase,
    reward: RewardFunction | None,
    batch_size: int | None,
) -> tuple[pa.Table, dict[str, float]]:
    """Answer held-out prompts with the weights that the engines hold; the scored answers, mean scores as metrics."""
    size = batch_size or prompts.num_rows
    parts = [prompts.slice(start, size) for start in range(0, prompts.num_rows, size)]
    answers = pa.concat_tables([generate(run, engines, part, sampling, n) for part in parts])
    batch, extra = score(answers, tokenizer, reward)
    return batch, {f"val/{name}": value for name, value in {**mean_scores(batch), **extra}.items()}


def mean_scores(batch: pa.Table) -> dict[str, float]:
    """The mean score of all trajectories, and of each data source."""
    scores, sources = batch["score"].to_numpy(), np.asarray(batch["data_source"].to_pylist())
    by_source = {f"score/{name}": float(scores[sources == name].mean()) for name in sorted(set(sources))}
    return {"score/mean": float(scores.mean()), **by_source}
