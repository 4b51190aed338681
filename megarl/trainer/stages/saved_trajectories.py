"""Trajectories that a run has written, read back as the batch of a step."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from megarl.config import DataConfig
from megarl.data.kept import KEPT_COUNTS, KEPT_IDS
from megarl.data.routing import ROUTED_EXPERTS
from megarl.data.sessions import num_sessions
from megarl.data.trajectories import (
    CARRIED,
    GIVEN,
    SCORED_MASK,
    TRAJECTORY_SCHEMA,
    from_ragged,
    ragged,
    read_trajectories,
    replace_column,
    sequence_lengths,
)
from megarl.trainer.stages.scoring import BASELINE_SCORE, OVERLONG_PENALTY, REWARD_PART
from megarl.trainer.stages.step_scores import STEP_SCORES

# The columns that learning reads; the others of the file are computed again.
_SCORES = ("score", GIVEN, OVERLONG_PENALTY, BASELINE_SCORE, STEP_SCORES)
_COLUMNS = (*TRAJECTORY_SCHEMA.names, ROUTED_EXPERTS, KEPT_IDS, KEPT_COUNTS, *CARRIED, *_SCORES)


def step_file(folder: str | Path, step: int) -> Path:
    """The file of a step's trajectories in a run's trajectory folder."""
    return Path(folder, f"step-{step:06d}.parquet")


def read_step(path: str | Path, data: DataConfig, n: int, records_experts: bool = False) -> pa.Table:
    """The trajectories of a step, scored, as they were before log-probs and advantages were computed.

    Args:
        n: responses to a prompt.
        records_experts: the policy's pass for old log-probs records experts, so that those of the file, which such a pass or an engine
            recorded, are left out.

    Raises:
        ValueError: the file is missing, damaged, without scores, or does not have the sizes of `data` and `n`.
    """
    table = read_trajectories(path, finite=False)
    if "score" not in table.column_names:
        raise ValueError(f"{path} has no column 'score': these trajectories were not scored")
    check_sizes(table, path, data, n)
    if SCORED_MASK in table.column_names:
        flags, offsets = ragged(table, SCORED_MASK)
        table = replace_column(table, "response_mask", from_ragged(flags > 0, offsets))
    parts = [name for name in table.column_names if name.startswith(REWARD_PART)]
    if records_experts and ROUTED_EXPERTS in table.column_names:
        table = table.drop_columns(ROUTED_EXPERTS)
    return table.select([*(name for name in _COLUMNS if name in table.column_names), *parts])


def check_sizes(table: pa.Table, path: str | Path, data: DataConfig, n: int) -> None:
    """ValueError: the trajectories from `path` do not fit a step with `data` and `n` responses to a prompt: they are too many,
    too few, or too long."""
    found = num_sessions(table)
    if found != data.train_batch_size * n:
        raise ValueError(
            f"{path} has {found} trajectories; data.train_batch_size x actor_rollout_ref.rollout.n is "
            f"{data.train_batch_size} x {n}"
        )
    longest = int(sequence_lengths(table).max())
    if longest > data.max_prompt_length + data.max_response_length:
        raise ValueError(
            f"{path} has a trajectory of {longest} tokens; data.max_prompt_length + data.max_response_length is "
            f"{data.max_prompt_length} + {data.max_response_length}"
        )


def count_steps(folder: Path, asked: int | None) -> int:
    """The number of steps of a run on the trajectories in `folder`: `asked`, or all that are there without a gap.

    Raises:
        ValueError: there are fewer than `asked`, or none.
    """
    there = 0
    while there != asked and step_file(folder, there + 1).is_file():
        there += 1
    if not there or (asked is not None and there < asked):
        raise ValueError(
            f"trainer.train_only={folder}: there is no {step_file(folder, there + 1).name}"
            + (f", and trainer.total_training_steps={asked}" if asked else "")
        )
    return there
