"""The process that owns a rollout engine: takes weights, answers prompts with trajectories.

An engine on several nodes has such a process on each. Requests go to the first; the others only start their
node's ranks, and write their inboxes: which slices each rank takes from which trainer rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from megarl.cluster.guard import DISK
from megarl.cluster.ranks import RankInfo
from megarl.data.routing import RoutingShape
from megarl.data.sessions import request_of, requested
from megarl.data.trajectories import build_trajectories
from megarl.gateway.sandboxes.find import try_sandbox
from megarl.rollout.completions import Flight
from megarl.rollout.engine import EngineCapacity, EngineConfig, EngineHungError, Generation, SamplingParams
from megarl.rollout.sglang.engine import SGLangEngine, SGLangPart
from megarl.trainer.workers.agents import Agents
from megarl.trainer.workers.agents_spec import AgentsSpec
from megarl.trainer.workers.dispatch import TRAINING, Landed
from megarl.trainer.workers.multi_turn import Players, TurnsSpec
from megarl.weight_sync.packets import Address, SyncShare
from megarl.weight_sync.receiver import InboxFile


@dataclass
class _Requests:
    """Requests that were launched and have not landed.

    Attributes:
        signs: the engine's last sign of life when the requests were last seen to make progress.
        launched: by uid, the request's table and row, and the shape of the experts that its trajectories have.
        waited: seconds in which they were waited for since then.
        busy: the flight's `busy` at the last call.
    """

    flight: Flight[list[Generation]]
    signs: float
    launched: dict[str, tuple[pa.Table, int, RoutingShape | None]] = field(default_factory=dict)
    waited: float = 0.0
    busy: float = 0.0

    def launch(
        self,
        requests: pa.Table,
        coroutines: list[Coroutine[Any, Any, list[Generation]]],
        routing: RoutingShape | None,
    ) -> None:
        """`routing`: as in `build_trajectories`."""
        uids = requests["uid"].to_pylist()
        twice = [uid for uid in uids if uid in self.launched]
        assert not twice and len({*uids}) == len(uids), f"requests were launched twice: {twice or uids}"
        self.launched |= {uid: (requests, row, routing) for row, uid in enumerate(uids)}
        self.flight.add(coroutines)

    def trajectories(self, finished: Iterable[Sequence[Generation]], keeps: bool) -> pa.Table | None:
        """The trajectories of finished requests, one or several of each request; None: there are none. The requests are forgotten.
        `keeps`: as in `build_trajectories`."""
        found: dict[int, tuple[pa.Table, RoutingShape | None, list[int], list[Generation]]] = {}  # by table
        for generations in finished:
            requests, row, routing = self.launched.pop(request_of(generations[0].uid))
            _, _, rows, own = found.setdefault(id(requests), (requests, routing, [], []))
            rows += [row] * len(generations)
            own += generations
        tables = [
            build_trajectories(requested(requests, rows, [one.uid for one in own]), own, routing, keeps)
            for requests, routing, rows, own in found.values()
        ]
        return pa.concat_tables(tables).combine_chunks() if tables else None


class EngineWorker:
    """One engine, or a further node's part of one: of `info.parts` processes this is number `info.part`."""

    engine_class: type[SGLangEngine] = SGLangEngine

    def __init__(
        self, info: RankInfo, config: EngineConfig, turns: TurnsSpec | AgentsSpec | None = None
    ) -> None:
        """`turns`: how trajectories of several turns are generated; None: trajectories have one turn."""
        self.info, temporary = info, tempfile.gettempdir()
        # SGLang and multiprocessing put sockets into this folder, and leave them there when they are killed.
        tempfile.tempdir = info.scratch
        if isinstance(turns, AgentsSpec):
            gateway = turns.gateway  # without such a sandbox a ValueError comes before SGLang is started
            try_sandbox(gateway.sandbox, turns.readable, gateway.memory_mb, gateway.image)
        if info.parts > 1:
            config = replace(config, nodes=info.parts, node=info.part, address=address(info))
        self.engine = self.engine_class(config) if info.part == 0 else SGLangPart(config)
        self.engine.start()
        self.players: Players | Agents | None = None
        self._of: dict[str, _Requests] = {}
        if info.part == 0 and isinstance(turns, AgentsSpec):
            folder = folder_on_disk(info.scratch, temporary)
            self.players = Agents(turns, self.engine, config.stop_token_ids, folder)
        elif info.part == 0 and turns is not None:
            stops, longest = config.stop_token_ids, self.engine.longest_input
            self.players = Players(turns, self.engine.answer, stops, longest)

    def begin_generation(self, of: str = TRAINING, anew: bool = False) -> tuple[EngineCapacity, list[str]]:
        """How much the engine computes at a time, and the uids of requests that were launched and have not landed.

        Args:
            of: whose requests they are.
            anew: give up the requests that an earlier generation, such as one that failed, has left behind.

        Of agents it is no more sessions than run at a time: others would wait here for a place, while another engine has some.
        """
        if anew:
            self._requests(of).flight.cancel()
            del self._of[of]
        capacity = self.engine.capacity()
        if isinstance(self.players, Agents):
            capacity = replace(capacity, requests=min(capacity.requests, self.players.concurrency))
        return capacity, list(self._requests(of).launched)

    def land(
        self, seconds: float, parts: Sequence[tuple[pa.Table, SamplingParams]] = (), of: str = TRAINING
    ) -> Landed:
        """Begin to answer further requests, and return the trajectories that have finished since the last call.

        It waits for them for `seconds`, or until all requests are answered. Requests continue between calls; while weights change or
        memory is released they wait, and then continue after their last token.

        Args:
            parts: tables of requests (see `expand_prompts`), each with its own sampling.
            of: whose requests they are: a validation lands none of the requests that training has in flight.

        Raises:
            EngineHungError: the engine gave no sign of life for `request_timeout` seconds in which requests were waited for.
        """
        begun, own = time.monotonic(), self._requests(of)
        for requests, sampling in parts:
            routing = self.engine.routing if sampling.return_experts else None
            own.launch(requests, self._answers(requests, sampling), routing)
        generations = own.flight.take(seconds)
        own.waited += time.monotonic() - begun
        # While agents and environments compute, the engine may have nothing to do.
        at_rest = not self.engine.num_requests
        if generations or own.signs != self.engine.last_sign or at_rest:
            own.signs, own.waited = self.engine.last_sign, 0.0
        if own.waited > self.engine.config.request_timeout:
            raise EngineHungError(
                f"SGLang has neither computed a step for any of {len(own.flight)} requests nor answered one within "
                f"request_timeout={self.engine.config.request_timeout} s"
            )
        before, own.busy = own.busy, own.flight.busy
        table = own.trajectories(generations, self.engine.keeps)
        return Landed(table, self.engine.waiting, own.busy - before, self.engine.take_counts())

    def _requests(self, of: str) -> _Requests:
        if of not in self._of:
            self._of[of] = _Requests(self.engine.flight(), self.engine.last_sign)
        return self._of[of]

    def _answers(
        self, requests: pa.Table, sampling: SamplingParams
    ) -> list[Coroutine[Any, Any, list[Generation]]]:
        """A coroutine for each of the requests, in their order; it returns the request's trajectories."""
        if isinstance(self.players, Agents):  # the agents write the prompts
            return self.players.answers(requests, sampling, self.engine.weight_version)
        prompts, uids = requests["prompt_ids"].to_pylist(), requests["uid"].to_pylist()
        for uid, ids in zip(uids, prompts, strict=True):
            self.engine.check_request(uid, ids, sampling)
        if self.players is not None:
            return self.players.answers(requests, sampling, self.engine.weight_version)

        async def answer(uid: str, ids: list[int]) -> list[Generation]:
            return [await self.engine.answer(uid, ids, sampling)]

        return [answer(uid, ids) for uid, ids in zip(uids, prompts, strict=True)]

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


@contextmanager
def ending_when_hung(method: str) -> Iterator[None]:
    """Around each call of an engine's process: it ends if the engine hangs, because a lost engine is restarted, while an error would end the run.

    While it receives weights the engine waits for the trainer, which may be the one that hangs: there the error is raised.
    """
    try:
        yield
    except EngineHungError as error:
        if method == "receive_weights":
            raise
        print(f"{method}: {error}: the engine ends", file=sys.stderr, flush=True)
        os._exit(1)


def folder_on_disk(scratch: str, temporary: str) -> Path:
    """A new folder in the folder `temporary`, removed with a rank's `scratch`: agents may write as much as a repository or an environment of
    Python's, and the scratch folder is memory, of which the object store and NCCL need theirs."""
    folder = tempfile.mkdtemp(prefix="megarl-agents-", dir=temporary)
    Path(scratch, DISK).symlink_to(folder)
    return Path(folder)


def address(info: RankInfo) -> str:
    """Where the TP ranks of an engine's processes meet."""
    host = f"[{info.master_addr}]" if ":" in info.master_addr else info.master_addr
    return f"{host}:{info.master_port}"
