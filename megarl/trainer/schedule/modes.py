"""The source of the loop's batches, chosen by `trainer.mode`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from megarl.config import TrainConfig
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.run import Run
from megarl.trainer.schedule.collectors import Batches, Collect, OneStepOff, Synchronous
from megarl.trainer.schedule.in_flight import InFlight
from megarl.trainer.schedule.streaming import Streamed
from megarl.trainer.stages.request_queue import RequestQueue
from megarl.trainer.stages.scoring import Rewards


def make_batches(
    config: TrainConfig,
    run: Run,
    roles: Roles,
    rewards: Rewards,
    last_step: int,
    prompts: Iterator[pa.Table],
    collect: Collect,
    answer: Collect,
) -> Batches:
    """The source of batches for `trainer.mode`. Arguments as of `OneStepOff` and `Streamed`."""
    mode = config.trainer.mode
    if mode == "sync":
        return Synchronous(config, run, roles, rewards, collect)
    if mode == "one_step_off":
        return OneStepOff(config, run, roles, rewards, last_step, collect, answer)
    staleness = config.trainer.max_staleness
    assert staleness is not None, "resolved"
    in_flight = InFlight(
        config.algorithm.filter_groups,
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n + (config.algorithm.adv_estimator == "remax"),
        staleness,
        last_step,
        gen_batch_size=config.data.gen_batch_size,
    )
    overlapped = mode == "fully_async"
    queue = RequestQueue(roles.engines)
    return Streamed(config, run, roles, rewards, prompts, in_flight, overlapped, queue)
