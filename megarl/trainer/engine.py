"""The process that owns a rollout engine: takes weights, answers prompts with trajectories."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa

from megarl.cluster.worker import RankInfo
from megarl.data.trajectories import build_trajectories
from megarl.hybrid_engine import Packet, SyncPlan, write_update
from megarl.rollout.engine import EngineConfig, SamplingParams, SyncReport
from megarl.rollout.sglang_engine import SGLangEngine


class EngineWorker:
    """One engine; `sync` describes how weights come to it (None: it serves those of its model folder)."""

    def __init__(self, info: RankInfo, config: EngineConfig, sync: SyncPlan | None) -> None:
        self.info, self.sync = info, sync
        # SGLang and multiprocessing put sockets wherever this says, and leave them there when they are killed.
        tempfile.tempdir = info.scratch
        self.engine = SGLangEngine(config)
        self.engine.start()
        self.folder = Path(info.scratch, "weights")
        self.folder.mkdir()

    def generate(self, requests: pa.Table, sampling: SamplingParams) -> pa.Table:
        """The trajectories of `requests` (see `expand_prompts`), in their order."""
        prompts, uids = requests["prompt_ids"].to_pylist(), requests["uid"].to_pylist()
        return build_trajectories(requests, self.engine.generate(prompts, uids, sampling))

    def begin_update(self, version: int) -> None:
        self.engine.begin_update(version)

    def receive_bucket(self, version: int, bucket: int, *packets: list[Packet]) -> None:
        """Take a bucket: `packets[source rank][engine rank]`."""
        assert self.sync is not None
        self.engine.receive_bucket(write_update(self.folder, self.sync, version, bucket, packets))

    def finish_update(self) -> SyncReport:
        """Serve the version that arrived."""
        report = self.engine.finish_update()
        for file in self.folder.iterdir():
            file.unlink()
        return report
