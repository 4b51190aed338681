"""The process that owns a rollout engine: takes weights, answers prompts with trajectories.

An engine on several nodes has such a process on each. Requests go to the first; the others only start their
node's ranks, and write their inboxes: the slices that each takes from which trainer rank.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from megarl.cluster.ranks import RankInfo
from megarl.data.trajectories import build_trajectories, take
from megarl.rollout.engine import EngineConfig, EngineError, Generation, SamplingParams
from megarl.rollout.sglang.engine import SGLangEngine, SGLangPart
from megarl.trainer.workers.multi_turn import Players, TurnsSpec
from megarl.weight_sync.packets import Address, SyncShare
from megarl.weight_sync.receiver import InboxFile


class EngineWorker:
    """One engine, or a further node's part of one: of `info.parts` processes this is number `info.part`."""

    def __init__(self, info: RankInfo, config: EngineConfig, turns: TurnsSpec | None = None) -> None:
        """`turns`: how multi-turn trajectories are generated; None: trajectories have one turn."""
        self.info = info
        # SGLang and multiprocessing put sockets wherever this says, and leave them there when they are killed.
        tempfile.tempdir = info.scratch
        if info.parts > 1:
            config = replace(config, nodes=info.parts, node=info.part, address=address(info))
        self.engine = SGLangEngine(config) if info.part == 0 else SGLangPart(config)
        self.engine.start()
        self.players: Players | None = None
        self._launched: dict[str, pa.Table] = {}  # by uid, the request of one row
        if info.part == 0:
            if turns is not None:
                self.players = Players(turns, self.engine.answer, config.stop_token_ids)
            self.flight = self.engine.flight()
            self._signs, self._waited = self.engine.last_sign, 0.0

    def stream(self, requests: pa.Table, sampling: SamplingParams, apart: float = 0.0) -> Iterator[pa.Table]:
        """The trajectories of `requests` (see `expand_prompts`) as they finish: tables of all that have since the last one.

        Args:
            apart: seconds between two tables, at least; but the last one comes when all are there.
        """
        rows = {uid: row for row, uid in enumerate(requests["uid"].to_pylist())}
        assert len(rows) == requests.num_rows, "requests have different uids"
        for generations in self.engine.as_completed(self._answers(requests, sampling), apart):
            part = take(requests, [rows[generation.uid] for generation in generations])
            yield build_trajectories(part, generations, self.engine.routing)

    def launch(self, parts: list[tuple[pa.Table, SamplingParams]]) -> None:
        """Begin to answer requests, each table with its own sampling; they continue between calls, and `land` returns finished ones.

        While weights change or memory is released they wait, and then continue after their last token.
        """
        for requests, sampling in parts:
            for row, uid in enumerate(requests["uid"].to_pylist()):
                assert uid not in self._launched, f"request {uid} was launched twice"
                self._launched[uid] = requests.slice(row, 1)
            self.flight.add(self._answers(requests, sampling))

    def land(self, seconds: float) -> pa.Table | None:
        """The trajectories that have finished since the last call, after at most so many seconds; None: none has.

        Raises:
            EngineError: the engine gave no sign of life for `request_timeout` seconds in which requests were waited for.
        """
        begun = time.monotonic()
        generations = self.flight.take(seconds)
        self._waited += time.monotonic() - begun
        if generations or self._signs != self.engine.last_sign or not len(self.flight):
            self._signs, self._waited = self.engine.last_sign, 0.0
        if self._waited > self.engine.config.request_timeout:
            raise EngineError(
                f"SGLang has neither computed a step for any of {len(self.flight)} requests nor answered one within "
                f"request_timeout={self.engine.config.request_timeout} s"
            )
        if not generations:
            return None
        requests = pa.concat_tables([self._launched.pop(generation.uid) for generation in generations])
        return build_trajectories(requests.combine_chunks(), generations, self.engine.routing)

    def in_flight(self) -> list[str]:
        """The uids of requests that were launched and have not landed."""
        return list(self._launched)

    def _answers(self, requests: pa.Table, sampling: SamplingParams) -> list[Coroutine[Any, Any, Generation]]:
        """A coroutine for each of the requests, in their order."""
        prompts, uids = requests["prompt_ids"].to_pylist(), requests["uid"].to_pylist()
        for uid, ids in zip(uids, prompts, strict=True):
            self.engine.check_request(uid, ids, sampling)
        if self.players is None:
            return [self.engine.answer(uid, ids, sampling) for uid, ids in zip(uids, prompts, strict=True)]
        version, tasks = self.engine.weight_version, self.players.tasks(requests)
        play = self.players.player.play
        return [play(task, ids, sampling, version) for task, ids in zip(tasks, prompts, strict=True)]

    def write_inboxes(self, shares: list[SyncShare], addresses: list[Address], timeout: float) -> list[Path]:
        """Write a file for each TP rank of this process with the packets that it takes from other ranks; returns the files."""
        inboxes = [Path(self.info.scratch, f"inbox-{rank}") for rank in range(len(shares))]
        for share, inbox in zip(shares, inboxes, strict=True):
            near = {rank: addresses[rank] for rank in share.near}
            InboxFile(share, near, addresses[0].hub, timeout).write(inbox)
        return inboxes

    def __getattr__(self, name: str) -> Any:
        """Every other call is the engine's own: updates of the weights, their connection, memory, interruptions."""
        return getattr(self.__dict__["engine"], name)


def address(info: RankInfo) -> str:
    """Where the TP ranks of an engine's processes meet."""
    host = f"[{info.master_addr}]" if ":" in info.master_addr else info.master_addr
    return f"{host}:{info.master_port}"
