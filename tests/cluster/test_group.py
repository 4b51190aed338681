"""Placement, calls and the environment of worker groups, on a real Ray cluster."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy
import pytest
import ray

from megarl.cluster import (
    Device,
    ResourcePool,
    WaitTimeout,
    WorkerDied,
    WorkerFailed,
    WorkerGroup,
    start_cluster,
    wait,
)
from megarl.cluster.cluster import object_store_bytes
from megarl.cluster.hosts import reserve_port
from megarl.cluster.pool import sort_devices
from megarl.cluster.relays import RelayedGroup, group_kind, shares_of
from tests.cluster.conftest import SPARE_SLOTS, start_ranks
from tests.cluster.processes import alive, alive_after, carrying, guards_of

GIB = 2**30


def test_ranks_know_who_they_are(trio):
    infos = wait(trio.call("get_info"), [trio])
    assert [info.rank for info in infos] == [0, 1, 2]
    assert [info.local_rank for info in infos] == [0, 1, 2]
    assert {(info.world_size, info.role, info.master_addr, info.device_ids) for info in infos} == {
        (3, "trio", "127.0.0.1", ())
    }
    assert len({info.master_port for info in infos}) == 1
    assert [Path(info.log_path).name for info in infos] == [f"trio-rank{rank}.log" for rank in range(3)]
    assert trio.names == ["trio rank 0", "trio rank 1", "trio rank 2"]
    assert trio.hosts == ["127.0.0.1"] * 3
    assert len(set(trio.pids)) == 3
    assert alive(trio.pids) == trio.pids


def test_the_process_is_ready_for_heavy_libraries(start_group):
    """Methods run in the main thread (SGLang installs signal handlers), at normal priority; torch can come."""
    group = start_group("critic", 1, env={"MY_VARIABLE": "7", "CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    (state,) = wait(group.call("process_state"), [group])
    assert state == {
        "main_thread": True,
        "nice": os.nice(0),
        "torch": False,
        "title": "ray::critic-rank0.process_state",
    }
    names = (
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
        "CUDA_VISIBLE_DEVICES",
        "MY_VARIABLE",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "NCCL_CUMEM_ENABLE",
        "NCCL_NVLS_ENABLE",
    )
    assert wait(group.call("environment", *names), [group]) == [["1", "lo", "", "7", "8", "0", "0"]]


def test_everything_that_a_rank_prints_is_in_its_log(trio):
    wait(trio.call("write"), [trio])
    for process in trio.processes:
        text = Path(process.log_path).read_text()
        assert text.startswith(f"--- trio-rank{process.rank}: process {process.pid} on 127.0.0.1")
        assert "from printfrom stderrfrom a child\nchild error\n" in text


def test_calls_pass_arguments_and_keep_order(trio):
    assert wait(trio.call("echo", 1, b=2), [trio]) == [(rank, (1,), {"b": 2}) for rank in range(3)]
    assert wait(trio.call_each("echo", [("x",), ("y", "z"), ()]), [trio]) == [
        (0, ("x",), {}),
        (1, ("y", "z"), {}),
        (2, (), {}),
    ]
    refs = [trio.call("append", value)[1] for value in range(10)]
    assert wait(list(reversed(refs)), [trio])[0] == list(range(10))


def test_object_refs_arrive_from_shared_memory_without_a_copy(trio):
    assert wait(trio.call("where", ray.put(numpy.arange(2**20))), [trio]) == [(False, True)] * 3
    # The test's own oracle: a small array that was not put lies elsewhere.
    assert wait(trio.call("where", numpy.arange(4)), [trio])[0][1] is False


def test_results_can_stay_in_the_object_store(trio):
    inner = wait(trio.call("put", 5), [trio])
    assert [ray.get(ref).tolist() for ref in inner] == [[0] * 5, [1] * 5, [2] * 5]
    large = [(ref,) for ref in wait(trio.call("put", 2**18), [trio])]
    assert wait(trio.call_each("where", large), [trio]) == [(False, True)] * 3


def test_rank_0_can_listen_on_the_rendezvous_port(start_group):
    group = start_group("actor", 2)
    assert wait(group.call("meet"), [group], timeout=20) == [b"1", b"0"]


def test_groups_share_devices_and_start_at_the_same_time(pool, tmp_path):
    """Two groups on all devices of one pool; the second is made while the constructors of the first run."""
    groups = []
    try:
        for role in ("actor", "critic"):
            options = {"start_seconds": 3.0}
            groups.append(WorkerGroup(role, "tests.cluster.workers:Rank", pool, len(pool), options, tmp_path))
            assert ray.wait(groups[-1].started, timeout=0)[0] == []
        ports = {info.master_port for group in groups for info in wait(group.call("get_info"), groups)}
        assert len(ports) == 2
    finally:
        for group in groups:
            group.shutdown()


def test_shutdown_kills_the_whole_tree(start_group):
    group = start_group("engine", 1)
    (children,) = wait(group.call("start_children"), [group])
    assert len(alive(children)) == 4
    ((guard, (scratch,)),) = guards_of(group.pids).items()
    assert os.path.isdir(scratch)
    group.call("hang_if", 0)
    begin = time.monotonic()
    group.shutdown()
    assert time.monotonic() - begin < 5
    assert alive(children + group.pids) == []
    assert carrying(group.processes[0].mark.partition("=")[2]) == []
    assert not os.path.exists(scratch)
    assert alive_after([guard], 5) == []
    group.shutdown()


def test_a_constructor_that_raises_is_reported(start_group):
    with pytest.raises(WorkerFailed, match=r"critic rank 1 .*ValueError: no weights for rank 1"):
        start_group("critic", 2, init_kwargs={"fail_rank": 1})


def test_a_class_that_cannot_be_imported_is_reported(start_group):
    with pytest.raises(WorkerFailed, match="ModuleNotFoundError: No module named 'nosuch'"):
        start_group("actor", 1, worker_class="nosuch.module:Class")
    with pytest.raises(
        ValueError, match=r"must look like 'package.module:Class', found 'tests.cluster.workers'"
    ):
        start_group("actor", 1, worker_class="tests.cluster.workers")


def test_too_few_devices_are_refused(start_group, pool):
    with pytest.raises(ValueError, match="actor needs 3 x 2 = 6 devices, resource pool 'test' has 4"):
        start_group("actor", 3, devices_per_rank=2)


def test_ranks_take_devices_in_the_order_given(start_group, pool):
    group = start_group("engine", 2, devices_per_rank=2, device_order=[1, 0, 3, 2])
    taken = [device for rank in group.devices for device in rank]
    assert taken == [pool.devices[number] for number in (1, 0, 3, 2)]


def test_a_pool_says_what_the_cluster_lacks(pool):
    with pytest.raises(ValueError, match="at least 1 node and 1 device a node, found 0 x 8"):
        ResourcePool("none", 0, 8)
    with pytest.raises(ValueError, match="'big' asks for 2 node") as error:
        ResourcePool("big", 2, 8, timeout=0.5)
    assert "8 process slots" in str(error.value)
    assert "127.0.0.1: 6; now free: 2" in str(error.value)
    assert "Ask for less (trainer.nnodes, trainer.n_gpus_per_node, resource_pools)" in str(error.value)
    # What it had asked for is not held; what another pool has is not given twice.
    spare = ResourcePool("spare", 1, SPARE_SLOTS, timeout=10)
    with pytest.raises(ValueError, match="now free: 0"):
        ResourcePool("second", 1, 1, timeout=2)
    spare.close()


def test_a_pool_says_soon_that_it_waits(pool):
    """Nodes may still join a cluster, so that it waits; whoever looks on is told at once what is not there."""
    said = []
    begun = time.monotonic()

    def say(text: str) -> None:
        said.append((text, time.monotonic() - begun))

    with pytest.raises(
        ValueError, match=r"'big' asks for 1 node.* could not give them within 5 s\. Ask for less"
    ):
        ResourcePool("big", 1, 8, timeout=5, say=say)
    ((text, seconds),) = said
    assert (
        "1 node(s) with 8 process slots (Ray CPUs) each; the cluster has by node: 127.0.0.1: 6; now free: 2"
        in text
    )
    assert text.endswith("Waiting for them, 5 s at most.") and seconds < 4.5


def test_devices_are_sorted_as_numbers():
    class Placement:
        pass

    found = [
        Device(host, "n", gpu, Placement(), 0)
        for host in ("10.0.0.10", "10.0.0.9")
        for gpu in ("10", "GPU-b", "2", "GPU-a", "0")
    ]
    order = [(device.host, device.gpu_id) for device in sort_devices(found)]
    assert order == [
        (host, g) for host in ("10.0.0.9", "10.0.0.10") for g in ("0", "2", "10", "GPU-a", "GPU-b")
    ]


def test_two_machines_are_node_major(controller, tmp_path):
    """Two raylets with 12 made-up GPUs each; a rank dies on the one where the controller is not."""
    process, report = controller("two_nodes", tmp_path)
    assert process.wait(60) == 0
    hosts = ["127.0.0.2", "127.0.0.3"]
    numbers = [str(number) for number in range(12)]
    assert report["devices"] == [[host, number] for host in hosts for number in numbers]
    assert report["hosts"] == hosts
    assert [info["device_ids"] for info in report["infos"]] == [numbers, numbers]
    assert [info["local_rank"] for info in report["infos"]] == [0, 0]
    assert {info["master_addr"] for info in report["infos"]} == {"127.0.0.2"}
    assert report["environment"] == [[",".join(numbers), None]] * 2
    assert report["shared_hosts"] == ["127.0.0.2", "127.0.0.2"]
    assert report["death"].startswith("engine rank 1 (process")
    assert "on 127.0.0.3) died: killed" in report["death"]
    assert "I hang now" in report["death"]


def test_stop_cluster_leaves_nothing(controller, tmp_path):
    """No process, no directory, no variable; and until then nobody outside this machine could connect."""
    _, report = controller("stop", tmp_path)
    for run in report["runs"]:
        assert len(run["started"]) > 6
        assert alive_after(run["started"], 2) == []
        assert carrying(run["mark"].partition("=")[2]) == []
        assert run["addresses"] == ["127.0.0.1"]
        assert run["variables"] == []
        assert not run["temp_dir_exists"]


def test_a_cluster_that_asks_for_a_token_gets_it(controller, tmp_path, monkeypatch):
    """The controller has the token and is not told that it is wanted."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", 16 * "feed")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    _, cluster = controller("serve")
    monkeypatch.delenv("RAY_AUTH_MODE")
    _, report = controller("hang", tmp_path, cluster["address"])
    assert len(alive(report["workers"])) == 3
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConnectionError, match="asks for a token, and RAY_AUTH_MODE=disabled forbids"):
        start_cluster(cluster["address"], 1, tmp_path)


def test_a_cluster_that_knows_no_tokens_gets_none(controller, tmp_path, monkeypatch):
    """To send one would not only be useless: Ray's workers could then not answer the controller."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", 16 * "feed")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    _, cluster = controller("serve")
    monkeypatch.delenv("RAY_AUTH_MODE")
    _, report = controller("hang", tmp_path, cluster["address"])
    assert len(alive(report["workers"])) == 3


def test_a_cluster_that_is_not_there(tmp_path):
    with reserve_port() as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(ConnectionError, match=f"no Ray cluster answers at {address}"):
            start_cluster(address, 1, tmp_path)
        assert time.monotonic() - begin < 15


def test_reserved_ports_are_exclusive():
    first, second = reserve_port(), reserve_port()
    assert first.getsockname()[1] != second.getsockname()[1]
    assert 20000 <= first.getsockname()[1] < 32768
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("memory", "shared", "expected"),
    [
        (8 * GIB, 4 * GIB, GIB // 4),
        (8 * GIB, GIB // 4, GIB // 8),
        (GIB, 64 * 2**20, GIB // 8),
        (2048 * GIB, 1024 * GIB, 16 * GIB),
    ],
)
def test_object_store_size_follows_the_machine(memory, shared, expected):
    assert object_store_bytes(memory, shared) == expected


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


def test_shares_are_of_one_node_and_even():
    assert shares_of(["a"] * 3, 2) == [[0], [1, 2]]
    assert shares_of(["a", "b", "a", "b", "b"], 16) == [[0, 2], [1, 3, 4]]
    nodes = [f"n{rank // 8}" for rank in range(1024)]
    shares = shares_of(nodes, 16)
    assert len(shares) == 128 and all(len({nodes[rank] for rank in share}) == 1 for share in shares)
    assert sorted(rank for share in shares for rank in share) == list(range(1024))
    assert [len(share) for share in shares_of(["a"] * 40, 16)] == [13, 13, 14]


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
    """Which shares its relay, and has answered."""
    group = start_relayed()
    refs = group.call("hang_if", 1)
    time.sleep(0.3)
    begin = time.monotonic()
    os.kill(group.pids[2], signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        wait(refs, [group])
    assert time.monotonic() - begin < 5
    assert (caught.value.role, caught.value.rank, caught.value.pid) == ("actor", 2, group.pids[2])


def test_a_killed_relay_is_named(start_relayed, tmp_path):
    group = start_relayed()
    refs = group.call("hang_if", 1)
    time.sleep(0.3)
    relay = group.watched[4]
    os.kill(relay.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        wait(refs, [group])
    assert (caught.value.role, caught.value.rank, caught.value.pid) == ("actor-relay", 1, relay.pid)
    assert caught.value.log_path == str(tmp_path / "actor-relay-rank1.log")


def test_an_exception_ends_the_call_although_others_hang(start_relayed):
    """Those of its own share, and those of another; the group works on with the ranks that do not hang."""
    group = start_relayed()
    begin = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        wait(group.call("fail_if", 1), [group])
    assert time.monotonic() - begin < 8
    error = caught.value
    assert (error.role, error.rank, error.kind, error.message) == ("actor", 1, "LocalError", "3 is not 4")
    assert "raise LocalError(3, 4)" in error.remote_traceback
    assert error.log_tail.endswith("I shall raise")


def test_a_group_works_on_after_an_exception(relayed):
    with pytest.raises(WorkerFailed, match="no_such_method"):
        wait(relayed.call("no_such_method"), [relayed])
    assert wait(relayed.call("hang_if", 5), [relayed]) == [0, 1, 2]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_earliest_exception_is_reported(relayed, first):
    """Whichever relay it comes by."""
    seconds = [0.1 if rank == first else 0.6 for rank in range(3)]
    with pytest.raises(WorkerFailed, match=r"RuntimeError: failed after 0\.1") as caught:
        wait(relayed.call("fail_after", *seconds), [relayed])
    assert caught.value.rank == first
    others = str(caught.value).partition("also: ")[2]
    assert all(f"actor rank {rank} " in others for rank in {0, 1, 2} - {first})


def test_a_result_that_cannot_be_sent_is_reported(relayed):
    with pytest.raises(WorkerFailed, match=r"cannot pickle '_thread.lock' object"):
        wait(relayed.call("return_lock"), [relayed])


def test_the_death_is_reported_not_what_it_caused(start_relayed):
    """Its peers raise "Connection closed by peer" because rank 1 was killed."""
    group = start_relayed()
    refs = group.call("lose_peer", 1.0)
    with pytest.raises(WorkerDied, match=r"actor rank [12]"):
        wait(refs, [group])


def test_who_is_missing_in_a_collective_is_named(start_relayed):
    group = start_relayed()
    with pytest.raises(WorkerFailed, match=r"missing in the collective: actor rank 2 ") as caught:
        wait(group.call("reduce_unless", 2, 2.0), [group])
    assert caught.value.rank in (0, 1)


def test_a_timeout_names_the_silent_rank_alone(start_relayed, tmp_path):
    group = start_relayed(most=3)
    with pytest.raises(WaitTimeout, match=r"no answer within 1 s") as caught:
        wait(group.call("hang_if", 2), [group], timeout=1)
    assert caught.value.silent == ["actor rank 2"]
    time.sleep(0.3)
    assert "in hang_if" in (tmp_path / "actor-rank2.log").read_text()


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
    assert len(pids) == 5 and alive(pids) == []


def test_relays_on_two_machines(controller, tmp_path):
    """Two raylets: each has the relay of its own ranks, and deaths on the one where the controller is not are told."""
    process, report = controller("relays_on_two_nodes", tmp_path)
    assert process.wait(60) == 0
    hosts = ["127.0.0.2", "127.0.0.3"]
    assert report["hosts"] == [hosts[0]] * 2 + [hosts[1]] * 2
    assert report["relays"] == [[hosts[0], [0, 1]], [hosts[1], [2, 3]]]
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
