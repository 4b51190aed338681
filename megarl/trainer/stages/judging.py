"""Engines of references judge the trajectories of a step, while Megatron's models compute log-probs and values.

An engine gets all its rows in one call; the trajectories of a prompt go to one engine, which computes the prompt once. The rows of a lost
engine are requested again, from the engine that takes its place.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from megarl.cluster import WorkerGroup, WorkerLost
from megarl.data.trajectories import sequence_lengths, take
from megarl.trainer.roles.judges import JudgeEngines
from megarl.trainer.run.run import Run

_SHARED_BY = ("uid", "prompt_uid", "prompt_ids", "response_ids")


@dataclass
class _Call:
    """The rows of an engine. `process`: the engine's process at its last call; a restart replaces it."""

    group: WorkerGroup
    rank: int
    rows: list[int]
    process: Any = None
    ref: Any = None


class Judging:
    """Calls of the engines of all references; `results` waits for them."""

    def __init__(
        self,
        run: Run,
        judges: Mapping[str, JudgeEngines],
        asked: pa.Table,
        read: ray.ObjectRef,
        rows: Mapping[str, Sequence[int]],
        top: int,
    ) -> None:
        """Call all engines that have rows.

        Args:
            asked: the trajectories as references read them, which `read` refers to.
            rows: the rows of each judge, by its role; a judge without rows does nothing.
            top: how many of the most likely tokens are asked for at each place; 0: none.
        """
        self._run, self._judges, self._read, self._top = run, judges, read, top
        self._calls: dict[str, list[_Call]] = {}
        lengths = asked.select([name for name in _SHARED_BY if name in asked.column_names])
        for role, judge in judges.items():
            own = np.asarray(rows[role], np.int64)
            shares = share_out(take(lengths, own), judge.group.world_size) if len(own) else []
            self._calls[role] = [
                _Call(judge.group, rank, [int(row) for row in own[share]])
                for rank, share in enumerate(shares)
                if share
            ]
            if self._calls[role]:
                judge.restarts.replace_lost()  # engines that died since the last step
            self._begin(self._calls[role])

    def results(self) -> dict[str, list[Any]]:
        """By role, the columns of each of its engines that had rows (`RowColumns`).

        Raises:
            WorkerLost: an engine is lost, and `max_restarts` are exceeded.
        """
        every = [(role, call) for role, calls in self._calls.items() for call in calls]
        found: dict[str, list[Any]] = {}
        while every and not found:
            try:
                answers = self._run.wait([call.ref for _, call in every])
            except WorkerLost as failure:
                if failure.role not in self._calls:
                    raise
                self._judges[failure.role].restarts.replace_lost(failure)
                self._begin(self._calls[failure.role])
                continue
            for (role, _), answer in zip(every, answers, strict=True):
                found.setdefault(role, []).append(answer)
        return found

    def _begin(self, calls: Sequence[_Call]) -> None:
        """Call engines that have not been called, in the processes that they have now."""
        for call in calls:
            process = call.group.processes_of(call.rank)[0]
            if process is not call.process:
                call.process = process
                call.ref = call.group.call_rank(call.rank, "judge", self._read, call.rows, self._top)


def share_out(table: pa.Table, count: int) -> list[list[int]]:
    """The rows of a table for each of `count` engines, in ascending order: a prompt's rows together, tokens as evenly as that allows."""
    lengths = sequence_lengths(table)
    names = table["prompt_uid" if "prompt_uid" in table.column_names else "uid"].to_pylist()
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        groups.setdefault(name, []).append(row)
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for rows in sorted(groups.values(), key=lambda rows: (-int(lengths[rows].sum()), rows[0])):
        load, number = loads[0]
        shares[number] += rows
        heapq.heapreplace(loads, (load + int(lengths[rows].sum()), number))
    return [sorted(share) for share in shares]
