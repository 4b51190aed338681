"""What is said of those who are still waited for."""

from megarl.cluster.failures.missing import Missing
from megarl.cluster.pool import ResourcePool
from megarl.cluster.ranks import RankProcess


def process(rank: int) -> RankProcess:
    return RankProcess(None, "rollout", rank, f"10.0.0.{rank}", "node", "log")


def test_who_is_missing_is_said_with_their_machines():
    said: list[str] = []
    missing = Missing(said.append, "to come up", 16, every=0.0)
    missing([])
    assert said == []
    missing([process(3), process(5)])
    assert said[0].endswith(
        "2 of 16 processes have yet to come up: rollout rank 3 (10.0.0.3), rollout rank 5 (10.0.0.5)"
    )
    missing([process(rank) for rank in range(10)])
    assert said[1].endswith(", rollout rank 7 (10.0.0.7) and 2 more")
    assert len(said) == 2


def test_nothing_is_said_of_what_is_quick():
    said: list[str] = []
    Missing(said.append, "to come up", 16, every=1e6)([process(1)])
    assert said == []


def test_many_nodes_have_longer_to_come_up():
    pool = ResourcePool.__new__(ResourcePool)
    pool.nnodes = 1
    assert pool.setup_seconds == 120
    pool.nnodes = 16
    assert pool.setup_seconds == 420
