"""Lost engines, and the parts that their replacements hold."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megarl.cluster import WorkerDied, WorkerLost
from megarl.cluster.ranks import RankProcess
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
