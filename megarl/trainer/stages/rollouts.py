"""Rollouts: trajectories for prompts from all engines, passed on as they finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from megarl.cluster import WorkerGroup
from megarl.config import RolloutConfig, SamplingConfig, TrainConfig, leaves_tokens_out
from megarl.data.sessions import num_sessions, request_of, rows_by_request
from megarl.data.trajectories import Blocks, expand_prompts, replace_column, take
from megarl.rollout.engine import EngineCounts, SamplingParams
from megarl.trainer.run.run import Run
from megarl.trainer.stages.request_queue import Part, RequestQueue, by_prompt, joined

GREEDY = "/greedy"  # suffix of the uid of a prompt's greedy answer; its samples have "/0", "/1", ...

Finished = Callable[[pa.Table], None]
"""Called with trajectories as they finish: some rows at a time, in any order."""


def roll_out(
    run: Run, engines: WorkerGroup, prompts: pa.Table, config: TrainConfig, seed: int, finished: Finished
) -> tuple[pa.Table, float, EngineCounts]:
    """A step's trajectories, of `rollout.n` requests for each prompt, in the prompts' order; the seconds in which an engine had no request, as
    the mean over all engines; and counts of the engines' requests.

    ReMax's baseline is the score of the prompt's greedy answer: the greedy answers follow after all samples.

    Args:
        seed: of the noise.
    """
    sampling, greedy = training_sampling(
        config.actor_rollout_ref.rollout, config.data.max_response_length, seed
    )
    parts = [(expand_prompts(prompts, config.actor_rollout_ref.rollout.n), sampling)]
    if config.algorithm.adv_estimator == "remax":
        parts.append((greedy_requests(prompts), greedy))
    return answer_all(run, engines, parts, finished)


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
        min_p=rollout.min_p,
        return_kept=leaves_tokens_out(rollout),
        max_new_tokens=length,
        seed=seed,
    )
    return sampling, SamplingParams(temperature=0.0, max_new_tokens=length, seed=seed)


def noise_seed(rollout: RolloutConfig, version: int) -> int:
    """The seed of the noise of a step's rollouts, or of rollouts that begin with a weight version."""
    return rollout.seed * 1_000_003 + version


def greedy_requests(prompts: pa.Table) -> pa.Table:
    """One request for each prompt, with a uid of its own."""
    requests = expand_prompts(prompts, 1)
    uids = [f"{uid}{GREEDY}" for uid in requests["prompt_uid"].to_pylist()]
    return replace_column(requests, "uid", pa.array(uids, pa.string()))


def generate(
    run: Run, engines: WorkerGroup, requests: pa.Table, sampling: SamplingParams, finished: Finished
) -> pa.Table:
    """The trajectories of `requests`, in their order; `finished` has been called with all of them by then."""
    return answer_all(run, engines, [(requests, sampling)], finished)[0]


def answer_all(
    run: Run, engines: WorkerGroup, parts: Sequence[Part], finished: Finished
) -> tuple[pa.Table, float, EngineCounts]:
    """As `roll_out`, for requests that are sampled differently, part by part.

    Engines get prompts as they have room (request_queue.py), also the prompts of lost engines.
    """
    queue = RequestQueue(engines, "batch")
    queue.open(run, anew=True)
    uids = [uid for requests, _ in parts for uid in requests["uid"].to_pylist()]
    came: set[str] = set()
    tables: list[pa.Table] = []
    waiting, count = by_prompt(parts, lambda uid: True), len(uids)
    while len(came) < len(uids):
        dealt = queue.deal(waiting, count)
        waiting = waiting[sum(map(len, dealt)) :]
        for table in queue.exchange(run, [joined(parts, own) for own in dealt]):
            came.update(map(request_of, table["uid"].to_pylist()))
            finished(table)
            tables.append(table)
        count = len(uids) - len(came) - len(queue.engine_of)
        if count > sum(len(prompt.uids) for prompt in waiting):  # an engine was lost
            waiting = by_prompt(parts, lambda uid: uid not in came and uid not in queue.engine_of)
    queue.close(run)
    table = in_order(pa.concat_tables(tables), uids, run.blocks)
    return table, queue.take_idle()[0], queue.take_counts()


def in_order(table: pa.Table, uids: list[str], blocks: Blocks | None = None) -> pa.Table:
    """The rows of a table in the order of their requests' `uids`, in memory of `blocks`."""
    at = rows_by_request(table)
    assert len(at) == num_sessions(table) == len(uids), (
        f"{num_sessions(table)} sessions for {len(uids)} requests"
    )
    return take(table, np.array([row for uid in uids for row in at[uid]], dtype=np.int64), blocks)


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip


def sampling_params(sampling: SamplingConfig, max_new_tokens: int, seed: int) -> SamplingParams:
    """The sampling parameters of validation and evaluation: nothing is learnt from these answers, so they have no experts."""
    given = {name: getattr(sampling, name) for name in _SAMPLING}
    return SamplingParams(**given, max_new_tokens=max_new_tokens, seed=seed, return_experts=False)
