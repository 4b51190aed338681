"""Ranks meet at their group's address, and nowhere else."""

import os

import psutil
import pytest

from megarl.cluster.hosts import reserve_port
from megarl.cluster.ranks import RankInfo
from megarl.cluster.rendezvous import meet
from tests.ranks import RankError, RankPool


def info(rank: int, port: int, world: int) -> RankInfo:
    return RankInfo(rank, world, rank, "127.0.0.1", port, "rank", "", (), "")


def free_port() -> int:
    with reserve_port() as holder:
        return holder.getsockname()[1]


def _meet(rank: int, world: int, port: int) -> list[str]:
    """What rank 1 has put there, and the addresses on which rank 0 listens there."""
    store = meet(info(rank, port, world), 60)
    if rank:
        store.set("said", str(os.getpid()))
        store.get("over")
        store.set("seen", "yes")
        return []
    said = store.get("said").decode()
    own = psutil.Process().net_connections("inet")
    addresses = [one.laddr.ip for one in own if one.status == psutil.CONN_LISTEN and one.laddr.port == port]
    store.set("over", "yes")
    store.get("seen")  # the store ends with this function
    return [said, *addresses]


def test_the_store_listens_at_the_groups_address_alone(ranks: RankPool) -> None:
    found = ranks.run(_meet, free_port(), world=2)[0]
    assert int(found[0]) != os.getpid() and found[1:] == ["127.0.0.1"]


def _taken(rank: int, world: int, port: int) -> None:
    meet(info(rank, port, world), 5)


def test_a_port_that_is_taken_is_an_error(ranks: RankPool) -> None:
    with reserve_port() as holder:
        with pytest.raises(RankError) as caught:
            ranks.run(_taken, holder.getsockname()[1], world=1)
    assert isinstance(caught.value.__cause__, OSError) and "in use" in str(caught.value.__cause__)
