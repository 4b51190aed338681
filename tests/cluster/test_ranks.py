"""Error messages that name a rank, and the rendezvous of a group, which listens only at the group's address."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megarl.cluster import WorkerDied, WorkerFailed, WorkerHung
from megarl.cluster.hosts import log_tail, reserve_port
from megarl.cluster.ranks import RankError, RankInfo, RankProcess, meet
from tests.ranks import RankError as ForkedRankError
from tests.ranks import RankPool

PROCESS = RankProcess(SimpleNamespace(), "actor", 1, "host7", "node", "/run/logs/actor-rank1.log", pid=42)


def test_the_last_line_names_the_rank_and_the_cause() -> None:
    told = RankError("ValueError", "wrong\nin detail", "Traceback ...", 0.0, "tail")
    for failure, words in (
        (WorkerDied(PROCESS, "killed by SIGKILL", "a\nb", ["x died, too"]), "died: killed by SIGKILL"),
        (WorkerHung(PROCESS, "stopped", "a\nb"), "hangs: stopped"),
        (WorkerFailed(PROCESS, told), "raised ValueError: wrong"),
    ):
        failure.name_report(Path("/run/failures/1.txt"))
        *_, log, report, last = (
            line for line in str(failure).splitlines() if not line.startswith(("  |", "also"))
        )
        assert str(failure).startswith(f"actor rank 1 (process 42 on host7) {words}")
        assert log.startswith("log: /run/logs/actor-rank1.log on host7")
        assert report == "stacks and logs of all processes: /run/failures/1.txt"
        assert last == f"the run ended: actor rank 1 (process 42 on host7) {words}"


def test_warnings_of_libraries_are_left_out_of_a_logs_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "started\n/lib/a.py:12: UserWarning: use b\n  warnings.warn(\n/lib/c.py:3: FutureWarning: gone soon\nmine\n  indented\n"
        "a.py:1: not a warning\n"
    )
    assert log_tail(str(log)) == ("started\nmine\n  indented\na.py:1: not a warning", "")


def info(rank: int, port: int, world: int) -> RankInfo:
    return RankInfo(rank, world, rank, "127.0.0.1", port, "rank", "", (), "")


def free_port() -> int:
    with reserve_port() as holder:
        return holder.getsockname()[1]


def _meet(rank: int, world: int, port: int) -> list[str]:
    """The value that rank 1 has put into the store, and the addresses at which rank 0 listens."""
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
        with pytest.raises(ForkedRankError) as caught:
            ranks.run(_taken, holder.getsockname()[1], world=1)
    assert isinstance(caught.value.__cause__, OSError) and "in use" in str(caught.value.__cause__)
