"""Controllers in processes of their own, for tests that kill them or need a cluster of another shape."""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from megarl.cluster import ResourcePool, RunFailure, WorkerGroup, start_cluster, stop_cluster, wait
from megarl.cluster.guard import KEEP_ENVIRON
from megarl.cluster.hosts import start_guard
from megarl.cluster.ranks import RankProcess
from megarl.cluster.relays import RelayedGroup
from tests.cluster.processes import wait_until_it_hangs

if TYPE_CHECKING:  # the imports of a run take seconds, and most of these controllers have no run
    from megarl.trainer.run.run import Run


def hang(run_dir: str, address: str) -> None:
    """A group with children, ranks 0 and 1 hung in C, 2 stopped; the controller sleeps until it is killed."""
    cluster = start_cluster(address or None, 4, run_dir)
    pool = ResourcePool("hang", 1, 4, timeout=100)
    group = _group("hang", pool, 3, run_dir)
    children = wait(group.call("start_children"), [group], timeout=100)
    group.call("hold_the_interpreter")
    os.kill(group.pids[2], signal.SIGSTOP)
    time.sleep(0.5)
    _report(
        workers=group.pids,
        children=[pid for pids in children for pid in pids],
        started=[process.pid for process in psutil.Process().children(recursive=True)],
        mark=cluster.mark,
        temp_dir=cluster.temp_dir,
    )
    time.sleep(1000)


def run(run_dir: str, method: str, address: str = "") -> None:
    """A run whose ranks are called again and again; after a signal to end it calls them once more, for a last result."""
    from megarl.trainer.run.preemption import REQUEUE, noting_signals
    from megarl.trainer.run.start import open_engine_run

    with open_engine_run(address or None, 4, Path(run_dir)) as run, noting_signals() as preemption:
        run.pools["all"] = ResourcePool("all", 1, 4, timeout=100)
        group = run.start(_group("rank", run.pools["all"], 2, run_dir))
        children = run.wait(group.call("start_children"))
        _report(
            workers=group.pids,
            children=[pid for pids in children for pid in pids],
            servers=run.watch.cluster.servers,
            started=[process.pid for process in psutil.Process().children(recursive=True)],
            marks=_marks(run, group),
        )
        try:
            while preemption.requested is None:
                run.wait(group.call(method, 1))
        except RunFailure as failure:
            sys.exit(f"error: {failure}")
        _report(saved=run.wait(group.call("echo", preemption.requested)), pids=group.pids)
        sys.exit(REQUEUE)


def calls(run_dir: str, what: str) -> None:
    """A run that makes one call of Ray after the other ("init", "pool" or "group"), and does not wait for the ranks that it has."""
    from megarl.trainer.run.start import open_engine_run

    if what == "init":
        while True:
            with open_engine_run(None, 4, Path(run_dir)):
                pass
    with open_engine_run(None, 5, Path(run_dir)) as run:
        pool = run.pools["all"] = ResourcePool("all", 1, 4, timeout=100)
        group = run.start(_group("rank", pool, 2, run_dir))
        _report(
            workers=group.pids,
            servers=run.watch.cluster.servers,
            started=[process.pid for process in psutil.Process().children(recursive=True)],
            marks=_marks(run, group),
            children=[],
        )
        while True:
            if what == "pool":
                ResourcePool("more", 1, 1, timeout=30).close()
            else:  # the new group gets no device, and the controller waits for it
                _group("more", pool, 1, run_dir, gpu_fraction=1.0, watched_groups=run.groups, watch=run.watch)


def stop(run_dir: str) -> None:
    """Starts and stops a cluster twice; reports what is left of it each time."""
    reports = []
    # Ray sets these itself.
    before = os.environ.keys() | {"RAY_CLIENT_MODE", "RAY_AUTH_MODE", "PYTHONBREAKPOINT"}
    for _ in range(2):
        cluster = start_cluster(None, 2, run_dir)
        group = _group("stop", ResourcePool("stop", 1, 2, timeout=100), 1, run_dir)
        children = wait(group.call("start_children"), [group], timeout=100)[0]
        started = [process.pid for process in psutil.Process().children(recursive=True)]
        addresses = {
            connection.laddr.ip.removeprefix("::ffff:")
            for pid in started
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        stop_cluster(cluster)
        reports.append(
            {
                "mark": cluster.mark,
                "started": started + children + group.pids,
                "addresses": sorted(addresses),
                "variables": sorted(os.environ.keys() - before),
                "temp_dir_exists": os.path.exists(cluster.temp_dir),
            }
        )
    _report(runs=reports)
    time.sleep(1000)


def serve(*others: str) -> None:
    """A cluster of machines with 4 devices each, the addresses of `others` among them, that other processes join, until it is killed."""
    temp_dir = _guarded_temp_dir()
    nodes = RayCluster(initialize_head=True, head_node_args=_node(temp_dir, "127.0.0.2", 4))
    for address in others:
        nodes.add_node(**_node(temp_dir, address, 4))
    _report(address=nodes.address)
    time.sleep(1000)


def two_nodes(run_dir: str) -> None:
    """Two machines with 12 made-up GPUs each, joined by address: who gets which device."""
    with _two_machines(run_dir, 12) as pool:
        engines = _group("engine", pool, 2, run_dir, devices_per_rank=12)
        infos = [asdict(info) for info in wait(engines.call("get_info"), [engines], timeout=100)]
        shared = _group("actor", pool, 2, run_dir)
        wait(shared.call("get_info"), [engines, shared], timeout=100)
        names = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
        environment = wait(engines.call("environment", *names), [engines])
        _report(
            devices=[(device.host, device.gpu_id) for device in pool.devices],
            infos=infos,
            hosts=engines.hosts,
            shared_hosts=shared.hosts,
            environment=environment,
            death=_death_of(engines.processes[1], engines, hung=1),
        )


def relays_on_two_nodes(run_dir: str) -> None:
    """Two machines with 2 made-up GPUs each: where relays are, what calls through them return, and the deaths of a rank and of a relay."""
    with _two_machines(run_dir, 2) as pool:
        actor = _group("actor", pool, 4, run_dir, kind=RelayedGroup)
        critic = _group("critic", pool, 4, run_dir, kind=RelayedGroup, most=2)
        groups = [actor, critic]
        table = ray.put(numpy.arange(1_000_000))
        answers = [wait(actor.call(*call), groups, timeout=100) for call in (("echo", "a"), ("where", table))]
        _report(
            hosts=actor.hosts,
            relays=[
                (relay.host, [rank.rank for rank in relay.share])
                for group in groups
                for relay in group.watched[4:]
            ],
            answers=answers,
            rank_death=_death_of(actor.processes[3], actor, hung=3),
            relay_death=_death_of(critic.watched[5], critic, hung=3),
        )


@contextmanager
def _two_machines(run_dir: str, num_devices: int) -> Iterator[ResourcePool]:
    """The devices of two machines with `num_devices` made-up GPUs each, joined by address."""
    temp_dir = _guarded_temp_dir()
    # Not 127.0.0.1: a controller that joins takes that for the machine's outer address.
    nodes = RayCluster(initialize_head=True, head_node_args=_node(temp_dir, "127.0.0.2", num_devices))
    nodes.add_node(**_node(temp_dir, "127.0.0.3", num_devices))
    cluster = start_cluster(nodes.address, 1, run_dir)
    yield ResourcePool("all", 2, num_devices, timeout=60)
    stop_cluster(cluster)
    nodes.shutdown()


def _death_of(process: RankProcess, group: WorkerGroup, hung: int) -> str:
    """The error when `process` is killed while the controller waits for rank `hung`."""
    refs = group.call("hang_if", hung)
    wait_until_it_hangs(group.processes[hung])
    os.kill(process.pid, signal.SIGKILL)
    try:
        wait(refs, [group], timeout=100)
    except RuntimeError as error:
        return str(error)
    return "no error"


def _guarded_temp_dir() -> str:
    """The directory of a cluster that Ray's own utility starts: the cluster and the directory are removed when this process ends."""
    # Ray's utility (2.60) writes the address here, whatever temp_dir is; ray.init would have made the folder.
    Path("/tmp/ray").mkdir(exist_ok=True)
    temp_dir = tempfile.mkdtemp(prefix="megarl-", dir="/tmp")
    os.environ.update(KEEP_ENVIRON, MEGARL_TEST=temp_dir)
    start_guard(f"MEGARL_TEST={temp_dir}", parent=0, directories=[temp_dir])
    return temp_dir


def _node(temp_dir: str, address: str, num_devices: int) -> dict[str, Any]:
    return {
        "num_cpus": num_devices,
        "num_gpus": num_devices,
        "include_dashboard": False,
        "node_ip_address": address,
        "temp_dir": temp_dir,
    }


def _marks(run: "Run", group: WorkerGroup) -> list[str]:
    """The marks in the environment of all processes of a run."""
    cluster = run.watch.cluster.mark
    return [process.mark for process in group.processes] if cluster is None else [cluster]


def _group(
    role: str,
    pool: ResourcePool,
    world_size: int,
    run_dir: str,
    kind: type[WorkerGroup] = WorkerGroup,
    **options: Any,
) -> WorkerGroup:
    group = kind(role, "tests.cluster.workers:Rank", pool, world_size, {}, f"{run_dir}/logs", **options)
    wait(group.started, [group], timeout=150)
    return group


def _report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    names = (hang, run, calls, serve, stop, two_nodes, relays_on_two_nodes)
    {function.__name__: function for function in names}[sys.argv[1]](*sys.argv[2:])
