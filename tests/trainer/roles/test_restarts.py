"""Lost engines, and the parts that their replacements hold."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megarl.cluster import WorkerDied, WorkerLost
from megarl.cluster.ranks import RankProcess
from megarl.trainer.roles.device_memory import DeviceMemory, Owner
from megarl.trainer.roles.restarts import EngineRestarts


def process(rank: int) -> RankProcess:
    return RankProcess(None, "rollout", rank, "host", "node", f"rollout-rank{rank}.log")


class Engines:
    """Two engines, both dead; the second dies again during its first restart."""

    role = "rollout"

    def __init__(self) -> None:
        self.dead, self.starts = {0, 1}, []

    @property
    def processes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(rank=rank, is_dead=rank in self.dead, log_path="l") for rank in range(2)]

    def processes_of(self, rank: int) -> list[SimpleNamespace]:
        return [self.processes[rank]]

    def restart(self, rank: int) -> list[int]:
        self.starts.append(rank)
        self.dead.discard(rank)
        if self.starts == [0, 1]:
            self.dead.add(1)
        return [rank]


class Run:
    def __init__(self, engines: Engines) -> None:
        self.engines = engines

    @contextmanager
    def status(self, what: str):
        yield

    def wait(self, ranks: list[int]) -> None:
        for rank in ranks:
            if rank in self.engines.dead:
                raise WorkerDied(process(rank), "out of memory", "")

    @contextmanager
    def timed(self, phase: str):
        yield

    def refuse_loss(self, lost: SimpleNamespace, why: str) -> None:
        raise WorkerDied(process(lost.rank), "out of memory", "", [why])


def test_each_new_engine_releases_what_the_others_have_released_though_the_next_does_not_start() -> None:
    engines, joined, connected = Engines(), [], []
    memory = SimpleNamespace(make_room=lambda group: None, join=lambda group, ranks: joined.extend(ranks))
    restarts = EngineRestarts(
        Run(engines), engines, 3, memory, lambda: connected.append(set(engines.dead)), lambda version: None
    )
    restarts.replace_lost()
    assert engines.starts == [0, 1, 1] and restarts.count == 3 and restarts.lacks_weights
    assert joined == [0, 1]
    assert connected == [set()]


def test_an_engine_too_many_is_a_lost_process_also_where_no_call_showed_it() -> None:
    """The error must be that of a lost process: `trainer.max_restarts` restarts a run after no other error."""
    engines = Engines()
    memory = SimpleNamespace(make_room=lambda group: None, join=lambda group, ranks: None)
    restarts = EngineRestarts(Run(engines), engines, 1, memory, lambda: None, lambda version: None)
    with pytest.raises(
        WorkerLost,
        match=r"(?s)rollout rank 1 .*1 engines were started anew already \(actor_rollout_ref\.rollout\.max_r",
    ):
        restarts.replace_lost()
    assert engines.starts == [0]


class FreedEngines(Engines):
    """Two engines whose memory is released and taken back, each with the parts that are released and the version that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = set()
        self.released = [{"weights", "kv_cache"}, {"weights", "kv_cache"}]
        self.versions: list[int | None] = [None, None]

    def restart(self, rank: int) -> list[int]:
        self.released[rank], self.versions[rank] = set(), None
        self.dead.discard(rank)
        return [rank]

    def call(self, method: str, parts: list[str]) -> list[int]:
        return [self.call_rank(rank, method, parts) for rank in range(2)]

    def call_rank(self, rank: int, method: str, parts: list[str]) -> int:
        """As an engine does it (rollout/sglang/engine.py)."""
        if method == "release_memory":
            assert not self.released[rank] & {*parts}
            self.released[rank] |= {*parts}
            if "weights" in parts:
                self.versions[rank] = None
        else:
            assert self.released[rank] >= {*parts}
            assert "kv_cache" not in parts or self.versions[rank] is not None, "sync a version first"
            self.released[rank] -= {*parts}
        return rank

    def sync(self, version: int) -> None:
        assert self.released == [{"kv_cache"}, {"kv_cache"}]
        self.versions = [version, version]


def test_a_new_engine_has_weights_before_its_cache_is_taken_back() -> None:
    """As in a step of several generations, between which a reward model takes the place of the caches."""
    engines = FreedEngines()
    run, judge = Run(engines), SimpleNamespace(role="reward_model", call=lambda method, parts: [])
    parts = [Owner(f"rollout_{part}", engines, part, True, False) for part in ("weights", "kv_cache")]
    memory = DeviceMemory(run, [*parts, Owner("reward_model_weights", judge, "weights", True)], steps=3)
    restarts = EngineRestarts(run, engines, 1, memory, lambda: None, engines.sync)
    memory.recover, memory.serve = restarts.replace_lost, restarts.serve_all
    with memory.held("sync"):
        engines.sync(7)
        restarts.served(7)
    with memory.held("generate"):
        engines.dead.add(1)
        restarts.replace_lost()  # where memory is measured, an engine that has ended is replaced
    with memory.held("score_model"):
        assert restarts.lacks_weights and engines.versions == [7, None]
    with memory.held("generate"):
        assert engines.versions == [7, 7] and engines.released == [set(), set()]
        assert not restarts.lacks_weights
