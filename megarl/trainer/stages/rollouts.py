"""Rollouts: trajectories for prompts from all engines, passed on as they finish."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from megarl.cluster import WorkerGroup, WorkerLost
from megarl.config import RolloutConfig, SamplingConfig, TrainConfig
from megarl.data.trajectories import Blocks, expand_prompts, replace_column, take
from megarl.rollout.engine import SamplingParams
from megarl.trainer.run.run import Run
from megarl.trainer.workers.dispatch import split_requests

# Seconds between two tables of an engine, for each engine of the run: the controller needs a millisecond for a table.
APART = 0.05
GREEDY = "/greedy"  # suffix of the uid of a prompt's greedy answer; its samples have "/0", "/1", ...

Finished = Callable[[pa.Table], None]
"""Called with trajectories as they finish: some rows at a time, in any order."""


def roll_out(
    run: Run, engines: WorkerGroup, prompts: pa.Table, config: TrainConfig, seed: int, finished: Finished
) -> pa.Table:
    """A step's trajectories: `rollout.n` for each prompt, in the prompts' order.

    ReMax's baseline is the score of the prompt's greedy answer: the greedy answers follow after all samples.

    Args:
        seed: of the noise.
    """
    sampling, greedy = training_sampling(
        config.actor_rollout_ref.rollout, config.data.max_response_length, seed
    )
    requests = expand_prompts(prompts, config.actor_rollout_ref.rollout.n)
    answers = generate(run, engines, requests, sampling, finished)
    if config.algorithm.adv_estimator != "remax":
        return answers
    best = generate(run, engines, greedy_requests(prompts), greedy, finished)
    return pa.concat_tables([answers, best]).combine_chunks()


def training_sampling(
    rollout: RolloutConfig, length: int, seed: int
) -> tuple[SamplingParams, SamplingParams]:
    """The sampling parameters of a step's samples, and of ReMax's greedy answers.

    Args:
        length: the most tokens of a response.
        seed: of the noise.
    """
    sampling = SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=length,
        seed=seed,
    )
    return sampling, SamplingParams(temperature=0.0, max_new_tokens=length, seed=seed)


def noise_seed(rollout: RolloutConfig, version: int) -> int:
    """The seed of the noise of a step's rollouts, or of those with a weight version."""
    return rollout.seed * 1_000_003 + version


def greedy_requests(prompts: pa.Table) -> pa.Table:
    """One request for each prompt, with a uid of its own."""
    requests = expand_prompts(prompts, 1)
    uids = [f"{uid}{GREEDY}" for uid in requests["prompt_uid"].to_pylist()]
    return replace_column(requests, "uid", pa.array(uids, pa.string()))


def generate(
    run: Run, engines: WorkerGroup, requests: pa.Table, sampling: SamplingParams, finished: Finished
) -> pa.Table:
    """The trajectories of `requests`, in their order; `finished` has been called with all of them by then.

    Trajectories that were lost with their engine are requested again after its restart, if the run restarts engines.
    """
    uids, tables, missing = requests["uid"].to_pylist(), [], requests
    while missing.num_rows:
        if run.restarts is not None:
            run.restarts.serve_all()
        apart, how = APART * engines.world_size, run.put(sampling)
        calls = [(part, how, apart) for part in split_requests(missing, engines.world_size)]
        try:
            for table in run.stream(engines.stream_each("stream", calls)):
                finished(table)
                tables.append(table)
        except WorkerLost as failure:
            run.revive(failure)
        came = {uid for table in tables for uid in table["uid"].to_pylist()}
        missing = take(requests, np.flatnonzero([uid not in came for uid in uids]))
    return in_order(pa.concat_tables(tables), uids, run.blocks)


def in_order(table: pa.Table, uids: list[str], blocks: Blocks | None = None) -> pa.Table:
    """The rows of a table in the order of `uids`, which are theirs, in memory of `blocks`."""
    at = {uid: row for row, uid in enumerate(table["uid"].to_pylist())}
    assert len(at) == table.num_rows == len(uids), f"{table.num_rows} trajectories for {len(uids)} requests"
    return take(table, np.array([at[uid] for uid in uids], dtype=np.int64), blocks)


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip


def sampling_params(sampling: SamplingConfig, max_new_tokens: int, seed: int) -> SamplingParams:
    """The sampling parameters of validation and evaluation."""
    given = {name: getattr(sampling, name) for name in _SAMPLING}
    return SamplingParams(**given, max_new_tokens=max_new_tokens, seed=seed)
