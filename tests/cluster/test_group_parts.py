"""Ranks that have several processes, as an engine on several nodes has."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster import WorkerDied, wait
from megarl.cluster.group import _devices_of_processes
from megarl.cluster.waiting import stream
from tests.cluster.processes import alive, alive_after


class Devices(SimpleNamespace):
    """Of a pool, without a cluster."""

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
    assert group.names == ["engine rank 0", "engine rank 0 part 1", "engine rank 1", "engine rank 1 part 1"]
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
    assert alive_after(pids[2:], 5) == [] and alive(group.pids) == group.pids
    again = wait(group.call_parts("get_info", [()] * 4), [group])
    assert [(info.rank, info.part) for info in again] == [(info.rank, info.part) for info in infos]
    assert again[2].master_port == again[3].master_port
    assert Path(again[3].log_path).name == "engine-rank1.part1.restart1.log"


def test_a_rank_is_lost_with_any_of_its_parts(start_group) -> None:
    """Also in a group that can be spared, whose other ranks go on."""
    group = start_group("engine", 2, devices_per_rank=2, parts=2)
    os.kill(group.pids[3], signal.SIGKILL)
    assert wait([group.call_rank(0, "echo")], [group], spare=group) == [(0, (), {})]
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match=r"engine rank 1 part 1 .* died") as caught:
        wait([group.call_rank(1, "hang_if", 1)], [group], spare=group)
    assert caught.value.rank == 1 and time.monotonic() - begun < 10
    group.restart(1)
    streams = group.stream_each("count", [(3, 1, 0.2), (1000, 1, 0.2)])
    came = []
    with pytest.raises(WorkerDied, match=r"engine rank 1 part 1 .* died"):
        for value in stream(streams, [group], spare=group):
            if not came:
                os.kill(group.pids[3], signal.SIGKILL)
            came.append(value)
    assert [number for rank, number, *_ in came if rank == 0] == [0, 1, 2]


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
