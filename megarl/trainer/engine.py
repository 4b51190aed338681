"""The process that owns a rollout engine: takes weights, answers prompts with trajectories.

An engine on several nodes has such a process on each. What is asked of an engine comes to the first; the others only start
their node's ranks, and write down for these what they take from whom.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from megarl.cluster.worker import RankInfo
from megarl.data.trajectories import build_trajectories, take
from megarl.rollout.engine import EngineConfig, Generation, SamplingParams, SyncReport
from megarl.rollout.packets import Address, SyncShare
from megarl.rollout.receiver import InboxFile
from megarl.rollout.sglang_engine import SGLangEngine
from megarl.rollout.sglang_part import SGLangPart
from megarl.trainer.turns import TurnsSpec, make_players


class EngineWorker:
    """One engine, or a further node's part of one: of `info.parts` processes this is number `info.part`."""

    def __init__(self, info: RankInfo, config: EngineConfig, turns: TurnsSpec | None = None) -> None:
        """`turns`: how trajectories of several turns are played; None: they have one."""
        self.info = info
        # SGLang and multiprocessing put sockets wherever this says, and leave them there when they are killed.
        tempfile.tempdir = info.scratch
        if info.parts > 1:
            config = replace(config, nodes=info.parts, node=info.part, address=address(info))
        self.engine = SGLangEngine(config) if info.part == 0 else SGLangPart(config)
        self.engine.start()
        plays = turns is not None and info.part == 0
        self.players = make_players(turns, self.engine, config.stop_token_ids) if plays else None

    def generate(self, requests: pa.Table, sampling: SamplingParams) -> pa.Table:
        """The trajectories of `requests` (see `expand_prompts`), in their order."""
        parts = self._generations(requests, sampling)
        return build_trajectories(requests, [generation for part in parts for generation in part])

    def stream(self, requests: pa.Table, sampling: SamplingParams) -> Iterator[pa.Table]:
        """The trajectories of `requests` as they finish: tables of all that have since the last one."""
        rows = {uid: row for row, uid in enumerate(requests["uid"].to_pylist())}
        for generations in self._generations(requests, sampling):
            part = take(requests, [rows[generation.uid] for generation in generations])
            yield build_trajectories(part, generations)

    def _generations(self, requests: pa.Table, sampling: SamplingParams) -> Iterator[list[Generation]]:
        prompts, uids = requests["prompt_ids"].to_pylist(), requests["uid"].to_pylist()
        if self.players is None:
            yield from self.engine.generate_stream(prompts, uids, sampling)
            return
        for uid, ids in zip(uids, prompts, strict=True):
            self.engine.check_request(uid, ids, sampling)
        version = self.engine.weight_version
        tasks = self.players.tasks(requests)
        play = self.players.player.play
        yield from self.engine.as_completed(
            [play(task, ids, sampling, version) for task, ids in zip(tasks, prompts, strict=True)]
        )

    def write_inboxes(self, shares: list[SyncShare], addresses: list[Address], timeout: float) -> list[Path]:
        """Write down for each TP rank of this process what it takes from which trainer ranks; returns the files."""
        inboxes = [Path(self.info.scratch, f"inbox-{rank}") for rank in range(len(shares))]
        for share, inbox in zip(shares, inboxes, strict=True):
            needed = {address.rank: address for address in addresses if address.rank in share.transports}
            InboxFile(share, needed, timeout).write(inbox)
        return inboxes

    def connect(self, inboxes: Sequence[Path]) -> None:
        """Tell each TP rank of the engine where that is written, on the rank's own node."""
        self.engine.connect(inboxes)

    def release_memory(self, parts: list[str]) -> None:
        self.engine.release_memory(parts)

    def resume_memory(self, parts: list[str]) -> None:
        self.engine.resume_memory(parts)

    def memory(self) -> list[dict[str, int]]:
        """By rank of the engine, the bytes of its parts on the device."""
        return self.engine.memory()

    def begin_update(self, version: int) -> int | None:
        """Announce a version; returns the one that the engine held."""
        return self.engine.begin_update(version)

    def receive_weights(self, whole: bool = True) -> None:
        """Take the version that the trainer ranks send meanwhile; `whole`: also what training leaves alone."""
        self.engine.receive_weights(whole)

    def finish_update(self) -> SyncReport:
        """Serve the version that arrived."""
        return self.engine.finish_update()


def address(info: RankInfo) -> str:
    """Where the TP ranks of an engine's processes meet."""
    host = f"[{info.master_addr}]" if ":" in info.master_addr else info.master_addr
    return f"{host}:{info.master_port}"
