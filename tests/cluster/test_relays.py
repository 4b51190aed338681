"""Groups whose calls go through relays give the same answers and errors as other groups."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy
import pytest
import ray
import ray._private.worker

from megarl.cluster import (
    ResourcePool,
    WaitTimeout,
    WorkerDied,
    WorkerFailed,
    WorkerGroup,
    wait,
)
from megarl.cluster.relays import MOST_RANKS, RelayedGroup, group_kind, shares_of
from tests.cluster.conftest import start_ranks
from tests.cluster.processes import alive_after, wait_until_it_hangs
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def relayed(pool: ResourcePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayedGroup]:
    """A group for tests that leave it as it is."""
    group = start_ranks("actor", pool, 3, tmp_path_factory.mktemp("relayed"), RelayedGroup, most=2)
    yield group
    group.shutdown()


@pytest.fixture
def start_relayed(start_group: Callable[..., WorkerGroup]) -> Callable[..., WorkerGroup]:
    """Three ranks, with a relay for the first and one for the others."""
    return partial(start_group, "actor", 3, kind=RelayedGroup, most=2)


def test_shares_are_even_and_of_neighbouring_nodes():
    assert shares_of(["a"] * 3, 2) == [[0], [1, 2]]
    assert shares_of(["a", "b", "a", "b", "b"], 16) == [[0, 2, 1, 3, 4]]
    assert shares_of(["a", "b", "a", "b", "b"], 3) == [[0, 2], [1, 3, 4]]
    assert shares_of([f"n{rank % 128}" for rank in range(1024)], 32) == [
        [node + 128 * place for node in range(first, first + 4) for place in range(8)]
        for first in range(0, 128, 4)
    ]
    assert [len(share) for share in shares_of(["a"] * 40, 16)] == [13, 13, 14]


def test_the_controller_and_each_relay_make_as_few_calls_as_can_be_for_a_thousand_ranks():
    nodes = [f"n{rank // 8}" for rank in range(1024)]

    def calls(most: int) -> int:
        shares = shares_of(nodes, most)
        return len(shares) + max(map(len, shares))

    assert calls(MOST_RANKS) == min(map(calls, range(1, 1025)))


def test_calls_go_by_relays_and_answers_come_back_in_order(relayed):
    assert [len(relay.share) for relay in relayed.watched[3:]] == [1, 2]
    calls = relayed.call("echo", 1, "b", word="c")
    # One of Ray's calls for each relay.
    assert len({call.ref for call in calls}) == 2
    assert wait(calls, [relayed]) == [(rank, (1, "b"), {"word": "c"}) for rank in range(3)]
    each = wait(relayed.call_each("echo", [(rank,) for rank in range(3)]), [relayed])
    assert each == [(rank, (rank,), {}) for rank in range(3)]
    assert wait([relayed.call_rank(2, "echo", 5)], [relayed]) == [(2, (5,), {})]


def test_references_arrive_as_values_that_lie_in_the_store(relayed):
    array = ray.put(numpy.arange(1_000_000))
    assert wait(relayed.call("where", array), [relayed]) == [(False, True)] * 3


def test_calls_are_executed_in_order(relayed):
    calls = [
        relayed.call("append", 1), relayed.call_each("append", [(2,)] * 3),
        [relayed.call_rank(1, "append", 3)], relayed.call("append", 4),
    ]  # fmt: skip
    *_, last = [wait(of_one, [relayed]) for of_one in calls]
    assert last == [[1, 2, 4], [1, 2, 3, 4], [1, 2, 4]]


def test_a_killed_rank_ends_a_hung_call(start_relayed):
    """The killed rank shares its relay with the hung one, and has answered."""
    group = start_relayed()
    refs = group.call("hang_if", 1)
    wait_until_it_hangs(group.processes[1])
    begin = time.monotonic()
    os.kill(group.pids[2], signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        wait(refs, [group])
    assert time.monotonic() - begin < 30
    assert (caught.value.role, caught.value.rank, caught.value.pid) == ("actor", 2, group.pids[2])


def test_a_killed_relay_is_named(start_relayed, tmp_path):
    group = start_relayed()
    refs = group.call("hang_if", 1)
    wait_until_it_hangs(group.processes[1])
    relay = group.watched[4]
    os.kill(relay.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        wait(refs, [group])
    assert (caught.value.role, caught.value.rank, caught.value.pid) == ("actor-relay", 1, relay.pid)
    assert caught.value.log_path == str(tmp_path / "actor-relay-rank1.log")


def test_an_exception_ends_the_call_although_others_hang(start_relayed):
    """Ranks of the same relay and of another one hang; the group works on with the ranks that do not hang."""
    group = start_relayed()
    begin = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        wait(group.call("fail_if", 1), [group])
    assert time.monotonic() - begin < 30
    error = caught.value
    assert (error.role, error.rank, error.kind, error.message) == ("actor", 1, "LocalError", "3 is not 4")
    assert "raise LocalError(3, 4)" in error.remote_traceback
    assert error.log_tail.endswith("I shall raise")


def test_a_group_works_on_after_an_exception(relayed):
    with pytest.raises(WorkerFailed, match="no_such_method"):
        wait(relayed.call("no_such_method"), [relayed])
    assert wait(relayed.call("hang_if", 5), [relayed]) == [0, 1, 2]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_earliest_exception_is_reported(relayed, first, tmp_path):
    """Whichever relay reports it."""
    with pytest.raises(WorkerFailed, match=r"RuntimeError: failed first") as caught:
        wait(relayed.call("fail_in_turn", first, str(tmp_path / "failed")), [relayed])
    assert caught.value.rank == first
    others = str(caught.value).partition("also: ")[2]
    assert all(f"actor rank {rank} " in others for rank in {0, 1, 2} - {first})


def test_a_result_that_cannot_be_sent_is_reported(relayed):
    with pytest.raises(WorkerFailed, match=r"cannot pickle '_thread.lock' object"):
        wait(relayed.call("return_lock"), [relayed])


def test_the_death_is_reported_not_what_it_caused(start_relayed):
    """The peers of rank 1 raise "Connection closed by peer" because it was killed."""
    group = start_relayed()
    refs = group.call("lose_peer", 1.0)
    with pytest.raises(WorkerDied, match=r"actor rank [12]"):
        wait(refs, [group])


def test_who_is_missing_in_a_collective_is_named(start_relayed, with_torch):
    group = start_relayed(fork_server=with_torch)
    with pytest.raises(WorkerFailed, match=r"missing in the collective: actor rank 2 ") as caught:
        wait(group.call("reduce_unless", 2, 2.0), [group])
    assert caught.value.rank in (0, 1)


def test_a_timeout_names_the_silent_rank_alone(start_relayed, tmp_path):
    group = start_relayed(most=3)
    with pytest.raises(WaitTimeout, match=r"no answer within 5 s") as caught:
        wait(group.call("hang_if", 2), [group], timeout=5)
    assert caught.value.silent == ["actor rank 2"]
    wait_for(lambda: "in hang_if" in (tmp_path / "actor-rank2.log").read_text())


def test_a_rank_that_was_started_anew_is_called(start_relayed):
    group = start_relayed()
    before = wait(group.call("append", 1), [group])
    started = group.restart(1)
    wait(started, [group])
    assert before == [[1]] * 3
    assert wait(group.call("append", 2), [group]) == [[1, 2], [2], [1, 2]]


def test_a_group_ends_with_its_relays(start_relayed):
    group = start_relayed()
    pids = [process.pid for process in group.watched]
    group.shutdown()
    # The kernel may still be taking down a process that was killed.
    assert len(pids) == 5 and alive_after(pids, 30) == []


@pytest.mark.slow
def test_relays_on_two_machines(controller, tmp_path):
    """Two raylets: a relay calls ranks of both, and deaths on the machine without the controller are reported."""
    process, report = controller("relays_on_two_nodes", tmp_path)
    assert process.wait(60) == 0
    hosts = ["127.0.0.2", "127.0.0.3"]
    assert report["hosts"] == [hosts[0]] * 2 + [hosts[1]] * 2
    assert report["relays"] == [[hosts[0], [0, 1, 2, 3]], [hosts[0], [0, 1]], [hosts[1], [2, 3]]]
    echoed, placed = report["answers"]
    assert echoed == [[rank, ["a"], {}] for rank in range(4)]
    assert placed == [[False, True]] * 4  # in the object store of its own machine
    assert report["rank_death"].startswith("actor rank 3 (process")
    assert "on 127.0.0.3) died: killed" in report["rank_death"]
    assert "I hang now" in report["rank_death"]
    assert report["relay_death"].startswith("critic-relay rank 1 (process")
    assert "on 127.0.0.3) died: killed" in report["relay_death"]


def test_small_groups_have_no_relays():
    assert group_kind(63, 64) is group_kind(10_000, None) is WorkerGroup
    assert group_kind(64, 64) is group_kind(1, 1) is RelayedGroup
