"""Placement, calls and the environment of worker groups, also of ranks with several processes, on a real Ray cluster."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import ray
import ray._private.worker

from megarl.cluster import (
    Device,
    ResourcePool,
    WorkerDied,
    WorkerFailed,
    WorkerGroup,
    wait,
)
from megarl.cluster.group import _devices_of_processes
from megarl.cluster.hosts import reserve_port
from megarl.cluster.pool import sort_devices
from tests.cluster.conftest import SPARE_SLOTS
from tests.cluster.processes import alive, alive_after, carrying, guards_of


def test_ranks_know_who_they_are(trio):
    infos = wait(trio.call("get_info"), [trio])
    assert [info.rank for info in infos] == [0, 1, 2]
    assert [info.local_rank for info in infos] == [0, 1, 2]
    assert {(info.world_size, info.role, info.master_addr, info.device_ids) for info in infos} == {
        (3, "trio", "127.0.0.1", ())
    }
    assert len({info.master_port for info in infos}) == 1
    assert [Path(info.log_path).name for info in infos] == [f"trio-rank{rank}.log" for rank in range(3)]
    assert [process.name for process in trio.processes] == ["trio rank 0", "trio rank 1", "trio rank 2"]
    assert trio.hosts == ["127.0.0.1"] * 3
    assert len(set(trio.pids)) == 3
    assert alive(trio.pids) == trio.pids


def test_the_process_is_ready_for_heavy_libraries(start_group):
    """Methods run in the main thread (SGLang installs signal handlers), at normal priority; torch is not imported yet."""
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
    # The check itself can fail: a small array that was not put into the object store lies elsewhere.
    assert wait(trio.call("where", numpy.arange(4)), [trio])[0][1] is False


def test_results_can_stay_in_the_object_store(trio):
    inner = wait(trio.call("put", 5), [trio])
    assert [ray.get(ref).tolist() for ref in inner] == [[0] * 5, [1] * 5, [2] * 5]
    large = [(ref,) for ref in wait(trio.call("put", 2**18), [trio])]
    assert wait(trio.call_each("where", large), [trio]) == [(False, True)] * 3


def test_rank_0_can_listen_on_the_rendezvous_port(start_group):
    group = start_group("actor", 2)
    assert wait(group.call("meet"), [group], timeout=60) == [b"1", b"0"]


def test_groups_share_devices_and_start_at_the_same_time(pool, tmp_path):
    """Two groups on the same devices of one pool; the second is made while the constructors of the first run."""
    groups, both = [], tmp_path / "both"
    try:
        for role in ("actor", "critic"):
            options = {"start_with": str(both)}
            groups.append(WorkerGroup(role, "tests.cluster.workers:Rank", pool, 2, options, tmp_path))
        assert ray.wait(groups[0].started + groups[1].started, timeout=0)[0] == []
        both.touch()
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
    assert time.monotonic() - begin < 30
    # The kernel may still be taking down a process that was killed.
    assert alive_after(children + group.pids, 30) == []
    assert carrying(group.processes[0].mark.partition("=")[2]) == []
    assert not os.path.exists(scratch)
    assert alive_after([guard], 30) == []
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
    # The refused devices are not held; another pool's devices are not given twice.
    spare = ResourcePool("spare", 1, SPARE_SLOTS, timeout=10)
    with pytest.raises(ValueError, match="now free: 0"):
        ResourcePool("second", 1, 1, timeout=2)
    spare.close()


def test_a_pool_says_soon_that_it_waits(pool):
    """The pool waits because nodes may still join a cluster; a message says at once which devices are missing."""
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
    """Two raylets with 12 made-up GPUs each; a rank dies on the machine without the controller."""
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


def test_reserved_ports_are_exclusive():
    first, second = reserve_port(), reserve_port()
    assert first.getsockname()[1] != second.getsockname()[1]
    assert 20000 <= first.getsockname()[1] < 32768
    first.close()
    second.close()


class Devices(SimpleNamespace):
    """The devices of a pool, without a cluster."""

    def __len__(self) -> int:
        return len(self.devices)


def test_calls_come_to_the_first_part_and_restarts_to_all(start_group, pool) -> None:
    group = start_group("engine", 2, devices_per_rank=2, parts=2, device_order=[1, 0, 3, 2])
    assert len(group.processes) == len(group.started) == 4 and group.world_size == 2
    infos = wait(group.call_parts("get_info", [()] * 4), [group])
    assert [(info.rank, info.part, info.parts, info.world_size) for info in infos] == [
        (0, 0, 2, 2), (0, 1, 2, 2), (1, 0, 2, 2), (1, 1, 2, 2)
    ]  # fmt: skip
    ports = [info.master_port for info in infos]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert len({info.scratch for info in infos}) == 4
    assert [info.master_addr for info in infos] == ["127.0.0.1"] * 4
    assert group.devices == [(pool.devices[number],) for number in (1, 0, 3, 2)]
    assert [process.name for process in group.processes] == [
        "engine rank 0",
        "engine rank 0 part 1",
        "engine rank 1",
        "engine rank 1 part 1",
    ]
    assert [Path(process.log_path).name for process in group.processes[:2]] == [
        "engine-rank0.log",
        "engine-rank0.part1.log",
    ]
    assert wait(group.call("echo", 5), [group]) == [(0, (5,), {}), (1, (5,), {})]
    assert wait(group.call_each("echo", [(1,), (2,)]), [group]) == [(0, (1,), {}), (1, (2,), {})]
    assert wait([group.call_rank(1, "echo")], [group]) == [(1, (), {})]

    pids = group.pids
    os.kill(pids[3], signal.SIGSTOP)
    wait(group.restart(1), [group], 60)
    assert group.pids[:2] == pids[:2] and not set(group.pids[2:]) & set(pids)
    assert alive_after(pids[2:], 30) == [] and alive(group.pids) == group.pids
    again = wait(group.call_parts("get_info", [()] * 4), [group])
    assert [(info.rank, info.part) for info in again] == [(info.rank, info.part) for info in infos]
    assert again[2].master_port == again[3].master_port
    assert Path(again[3].log_path).name == "engine-rank1.part1.restart1.log"


def test_a_rank_is_lost_with_any_of_its_parts(start_group) -> None:
    """Also in a spared group, whose other ranks go on."""
    group = start_group("engine", 2, devices_per_rank=2, parts=2)
    os.kill(group.pids[3], signal.SIGKILL)
    assert wait([group.call_rank(0, "echo")], [group], spares=[group]) == [(0, (), {})]
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match=r"engine rank 1 part 1 .* died") as caught:
        wait([group.call_rank(1, "hang_if", 1)], [group], spares=[group])
    assert caught.value.rank == 1 and time.monotonic() - begun < 60


def test_a_rank_is_restarted_while_one_of_a_spared_group_is_dead(start_group) -> None:
    """Like engines of two roles, each of which is restarted in its own time."""
    first, both = start_group("eval", 1), []
    second = start_group("engine", 1, watched_groups=both, spared_groups=both)
    both += [first, second]
    os.kill(first.pids[0], signal.SIGKILL)
    assert alive_after(first.pids, 30) == []
    wait(second.restart(0), both, 60, spares=[first])
    assert wait(second.call("echo", 5), both, spares=[first]) == [(0, (5,), {})]


def test_a_part_is_on_one_machine() -> None:
    devices = [
        SimpleNamespace(node_id=f"node{number // 4}", host=f"host{number // 4}") for number in range(8)
    ]
    pool = Devices(name="pool", devices=devices)
    found = _devices_of_processes("rollout", pool, 1, 8, 2)
    assert [{device.host for device in part} for part in found] == [{"host0"}, {"host1"}]
    with pytest.raises(
        ValueError, match=r"the 8 devices of rollout rank 0 in resource pool 'pool' are on several"
    ):
        _devices_of_processes("rollout", pool, 1, 8, 1)
    with pytest.raises(ValueError, match="the 3 devices of rollout rank 0"):
        _devices_of_processes("rollout", pool, 1, 6, 2)
