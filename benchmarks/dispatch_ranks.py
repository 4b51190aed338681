"""Stand-ins for ranks and engines in dispatch.py: processes that each play many ranks, and answer with zeros.

They take what the controller really sends, and return columns of the real sizes; no model is there.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from megarl.cluster import ResourcePool, WorkerGroup, wait
from megarl.cluster.ranks import RankInfo
from megarl.cluster.relays import RELAY, RelayedGroup, shares_of
from megarl.data.trajectories import Generation, build_trajectories, list_lengths, take
from megarl.layout.grid import ParallelLayout, coords_of
from megarl.rollout.engine import EngineCapacity, SyncReport
from megarl.trainer.workers.dispatch import Landed
from megarl.weight_sync.sender import SendReport

ENGINE_RANKS = 8


class SimulatedGroup(WorkerGroup):
    """A worker group whose `world_size` ranks are played by fewer real processes: rank r by process r % their number.

    Calls, results and waiting are a real group's. One thing is not: Ray has as many connections as there are processes.
    """

    def __init__(
        self,
        role: str,
        worker_class: str,
        pool: ResourcePool,
        num_hosts: int,
        world_size: int,
        settings: dict[str, Any],
        log_dir: Path,
    ) -> None:
        super().__init__(role, worker_class, pool, num_hosts, settings, log_dir)
        wait(self.started, [self], timeout=120)
        self.hosting = list(self.processes)
        self.world_size = world_size
        self.processes = [
            replace(self.hosting[rank % num_hosts], rank=rank, mark=f"{rank}") for rank in range(world_size)
        ]

    def shutdown(self) -> None:
        self.processes = getattr(self, "hosting", self.processes)
        super().shutdown()


class SimulatedRelayedGroup(RelayedGroup, SimulatedGroup):
    """The same with relays of at most `most` ranks each, which are played by as many processes as the ranks."""

    def __init__(self, role: str, *args: Any, most: int) -> None:
        SimulatedGroup.__init__(self, role, *args)
        _, pool, num_hosts, _, _, log_dir = args
        shares = shares_of([process.node_id for process in self.processes], most)
        self.relay_by(
            SimulatedGroup(f"{role}-relay", RELAY, pool, num_hosts, len(shares), {}, log_dir), shares
        )
        wait(self.started, [self], timeout=120)


def called_rank() -> int:
    """The rank that is called, from the name that `WorkerGroup` gives to its calls."""
    name = ray.get_runtime_context().get_task_name()
    return int(re.search(r"-rank(\d+)\.", name)[1])


class Movable:
    """Moves of memory off the devices and back: there is none."""

    def release_memory(self, parts: list[str]) -> None:
        pass

    def resume_memory(self, parts: list[str]) -> None:
        pass


class Ranks(Movable):
    """Ranks of a Megatron role."""

    def __init__(self, info: RankInfo, layout: ParallelLayout) -> None:
        self.layout = layout

    def send_weights(self, version: int, known: Any, merged: bool, complete: bool, to: str) -> SendReport:
        return SendReport(version)

    def compute_both_log_probs(self, table: pa.Table, shares: list, ref_shares: list) -> Any:
        policy = self._columns(table, shares, ["old_log_probs"])
        reference = self._columns(table, ref_shares, ["ref_log_probs"])
        return None if policy is None else (policy, reference)

    def compute_values(self, table: pa.Table, shares: list) -> Any:
        return self._columns(table, shares, ["values"])

    def update_policy(self, table: pa.Table, plan: list, counts: list, how: Any) -> list[dict[str, float]]:
        sums = {"actor/pg_loss": 0.0, "actor/tokens": 1.0, "actor/kl_loss": 0.0, "actor/ppo_kl": 0.0}
        return [{**sums, "grad_norm": 1.0, "lr": 1e-6} for _ in plan]

    def update_values(self, table: pa.Table, plan: list, counts: list, *how: Any) -> list[dict[str, float]]:
        return [{"critic/vf_loss": 0.0, "grad_norm": 1.0, "lr": 1e-6} for _ in plan]

    def _columns(self, table: pa.Table, shares: list, names: list[str]) -> Any:
        """As `ModelWorker.compute_columns`: the last stage's first rank of each data parallel rank answers."""
        place = coords_of(self.layout, called_rank())
        if place.pp != self.layout.pp - 1 or place.tp or place.cp:
            return None
        rows = [row for micro in shares[place.dp] for row in micro]
        lengths = list_lengths(table.select(["response_ids"]), "response_ids")[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return rows, {name: (np.zeros(offsets[-1], np.float32), offsets) for name in names}


class Engines(Movable):
    """Rollout engines of ENGINE_RANKS ranks: responses of drawn lengths, some trajectories a call."""

    def __init__(self, info: RankInfo, shortest: int, longest: int, at_once: int) -> None:
        self.lengths, self.at_once = (shortest, longest + 1), at_once
        self.version = 0  # of all engines that this process plays: they are synced together
        self.waiting: dict[int, list[tuple[pa.Table, int]]] = {}  # by engine, requests as rows of tables

    def begin_update(self, version: int) -> int:
        held, self.version = self.version, version
        return held

    def receive_weights(self, complete: bool) -> None:
        pass

    def finish_update(self) -> SyncReport:
        none = (0,) * ENGINE_RANKS
        seconds = dict.fromkeys(("wait", "write", "verify"), (0.0,) * ENGINE_RANKS)
        return SyncReport(self.version, none, none, none, none, seconds, 0.0)

    def begin_generation(self, of: str, anew: bool) -> tuple[EngineCapacity, list[str]]:
        return EngineCapacity(1 << 20, 1 << 40), []

    def land(self, seconds: float, parts: list[tuple[pa.Table, Any]], of: str) -> Landed:
        """Answers `at_once` of the requests that it has."""
        waiting = self.waiting.setdefault(called_rank(), [])
        for requests, _ in parts:
            waiting += [(requests, row) for row in range(requests.num_rows)]
        ended, self.waiting[called_rank()] = waiting[: self.at_once], waiting[self.at_once :]
        if not ended:
            return Landed(None, 0, 0.0)
        random = np.random.default_rng(called_rank())
        part = pa.concat_tables([take(requests, [row]) for requests, row in ended]).combine_chunks()
        sizes = random.integers(*self.lengths, part.num_rows)
        uids = part["uid"].to_pylist()
        generations = [_generation(uid, size) for uid, size in zip(uids, sizes, strict=True)]
        return Landed(build_trajectories(part, generations), 0, seconds)


def _generation(uid: str, size: int) -> Generation:
    return Generation(uid, np.ones(size, np.int32), np.full(size, -0.5, np.float32), "stop", 1)
