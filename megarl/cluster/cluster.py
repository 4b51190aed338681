"""Starts a Ray cluster on this machine, or joins one that runs; knows the servers without which it ends.

The cluster on this machine is lean (measured with Ray 2.60 on 2 cores: up in 1.5 to 3.6 s, 5 processes with 205 MiB
of memory in all), listens on the loopback interface only and ends with the process that started it, however
that ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
import ray._private.worker
from ray._private import ray_constants
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray._private.authentication.authentication_token_setup import (
    AUTH_MODE_ENV_VAR,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.node import Node

from megarl.cluster.fork_server import ProcessKind, start_fork_server
from megarl.cluster.guard import KEEP_ENVIRON, MARK_PREFIX, kill_marked, process_state, remove_scratch
from megarl.cluster.hosts import start_guard
from megarl.cluster.ranks import RankProcess, RayFailed
from megarl.util.signals import job_signals_blocked

_MIB = 2**20
_FIRST_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_CONNECT_SECONDS = 10.0
_MARK_NAME = f"{MARK_PREFIX}CLUSTER"


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to. `mark` and `temp_dir` are None if it only joined it.

    `servers`: process ids by name of the servers that the cluster depends on: this machine's raylet, and the GCS server
    if that runs on this machine, too. A GCS server on another machine may be started again there (Ray's fault tolerance): Ray waits
    60 s for it, and so does a run. `fork_servers`: the socket of each fork server, by the name of its process kind (fork_server.py).
    """

    address: str
    mark: str | None
    temp_dir: str | None
    servers: dict[str, int] = field(default_factory=dict)
    fork_servers: dict[str, str] = field(default_factory=dict)

    @property
    def is_broken(self) -> bool:
        """Whether a server is gone or stopped."""
        return self.server_in(None) is not None or self.server_in("T") is not None

    def server_in(self, state: str | None) -> str | None:
        """The first server whose process is in `state` (T: stopped, None: gone), such as "Ray's raylet (process 12)"; None: there is none."""
        for name, pid in self.servers.items():
            if process_state(pid) == state:
                return f"Ray's {name} (process {pid})"
        return None


@dataclass(frozen=True)
class ClusterSetup:
    """The parts of a cluster on this machine that exist before Ray: a folder, a mark, and fork servers.

    Attributes:
        token: the value of the cluster's mark, which all its processes carry.
        temp_dir: Ray's folder.
        fork_servers: as `Cluster.fork_servers`.
        processes: the processes of the fork servers.
    """

    token: str
    temp_dir: str
    fork_servers: dict[str, str]
    processes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def mark(self) -> str:
        return f"{_MARK_NAME}={self.token}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which its processes are started."""
        return {_MARK_NAME: self.token, "RAY_USAGE_STATS_ENABLED": "0"} | KEEP_ENVIRON


@contextmanager
def open_cluster_setup(kinds: Mapping[str, ProcessKind]) -> Iterator[ClusterSetup]:
    """The setup of one cluster on this machine, whose fork servers make their imports while the controller makes its own.

    Args:
        kinds: the process kinds that will be started, by names that the caller chooses. Where there are GPUs they get no fork
            servers.
    """
    cluster_setup = _make_cluster_setup(kinds)
    try:
        yield cluster_setup
    finally:
        _clear(cluster_setup.mark, cluster_setup.temp_dir)
        for process in cluster_setup.processes:
            process.wait()


def gpus_here() -> int:
    """The GPUs of this machine that this process may use, as Ray counts them."""
    found = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    return found if visible is None else min(found, len(visible))


def _make_cluster_setup(kinds: Mapping[str, ProcessKind]) -> ClusterSetup:
    # Not in run_dir: the path of a Unix socket has at most 107 characters.
    temp_dir = tempfile.mkdtemp(prefix="megarl-", dir="/tmp")
    if NvidiaGPUAcceleratorManager.get_current_node_num_accelerators():
        kinds = {}
    paths = {
        kind: f"{temp_dir}/fork-server-{number}" for number, kind in enumerate(dict.fromkeys(kinds.values()))
    }
    fork_servers = {name: paths[kind] for name, kind in kinds.items()}
    cluster_setup = ClusterSetup(secrets.token_hex(8), temp_dir, fork_servers)
    with _environment(cluster_setup.variables), job_signals_blocked():
        start_guard(cluster_setup.mark, parent=0, directories=[temp_dir])
        cluster_setup.processes.extend(start_fork_server(path, kind) for kind, path in paths.items())
    return cluster_setup


@contextmanager
def _paused(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Stop processes within the block: Ray 2.60 gives its servers 30 s to start, and they need seconds of a core."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def _clear(mark: str, temp_dir: str) -> None:
    kill_marked(mark)
    shutil.rmtree(temp_dir, ignore_errors=True)


def start_cluster(
    address: str | None,
    num_devices: int,
    run_dir: str | Path,
    cluster_setup: ClusterSetup | None = None,
) -> Cluster:
    """Connects this process to Ray as its controller.

    Args:
        address: of a running cluster ("10.0.0.1:6379", or "auto"); None starts one on this machine.
        num_devices: process slots that a machine without GPUs offers, whatever number of cores it has.
        run_dir: the run's directory; it is created.
        cluster_setup: the setup of a cluster on this machine; None: it is made now. Only with `address=None`.

    Raises:
        ValueError: `num_devices` < 1, or this process is to start a cluster and is connected to one already.
        ConnectionError: nothing answers at `address`, or it asks for a token and there is none.
        RayFailed: a server of a cluster on this machine did not come up.
    """
    if num_devices < 1:
        raise ValueError(f"a cluster needs at least one device, found num_devices={num_devices}")
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    if address is not None:
        if address != "auto":  # Ray looks "auto" up, and does the same itself
            _send_token_where_asked(address)
        with _own_handlers():
            context = ray.init(address=address, log_to_driver=False, logging_level="error")
        return Cluster(context.address_info["gcs_address"], None, None, _joined_servers())
    if ray.is_initialized():  # somebody else's, which stays as it is
        raise ValueError(
            "this process is connected to a Ray cluster already: call ray.shutdown() first; a run joins a cluster by its "
            "address (trainer.ray_address)"
        )
    # From here on a cluster of this process's own. Its servers inherit the mark, and blocked signals of a job's end; fork servers are
    # paused so that Ray's servers come up in time.
    cluster_setup = cluster_setup or _make_cluster_setup({})
    mark, temp_dir = cluster_setup.mark, cluster_setup.temp_dir
    with (
        _loopback_only(),
        _environment(cluster_setup.variables),
        job_signals_blocked(),
        _own_handlers(),
        _paused(cluster_setup.processes),
        _light_setup(),
        _fewer_servers(),
    ):
        try:
            context = ray.init(
                address="local",  # also where RAY_ADDRESS is set
                num_cpus=num_devices,
                object_store_memory=object_store_bytes(
                    psutil.virtual_memory().available, shutil.disk_usage("/dev/shm").free
                ),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                _node_ip_address="127.0.0.1",
                _temp_dir=temp_dir,
                _system_config={
                    "worker_niceness": 0,  # Ray runs workers at nice 15, behind everything else on the machine
                    # Otherwise Ray keeps one idle Python (60 MiB, 0.5 s of a core) ready per core.
                    "enable_worker_prestart": False,
                    "prestart_worker_first_driver": False,
                    "enable_metrics_collection": False,
                },
            )
        except Exception as error:  # which Ray raises where a server does not come up
            _end_at_once(mark, temp_dir)
            raise RayFailed(f"Ray did not start on this machine: {error}") from error
    servers = {
        name: processes[0].process.pid
        for name, processes in ray._private.worker._global_node.all_processes.items()
        if name in (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
    }
    return Cluster(context.address_info["gcs_address"], mark, temp_dir, servers, cluster_setup.fork_servers)


def stop_cluster(cluster: Cluster) -> None:
    """Disconnects; a cluster that this process started is gone when it returns, with all its processes."""
    node = ray._private.worker._global_node
    if cluster.mark is not None and node is not None:
        # `ray.shutdown` would give each process a second to end by SIGTERM, which none gets.
        for processes in node.all_processes.values():
            for started in processes:
                started.process.terminate = started.process.kill
    ray.shutdown()
    if cluster.mark is not None:
        _clear(cluster.mark, cluster.temp_dir)


def abandon_cluster(cluster: Cluster, ranks: Sequence[RankProcess] = ()) -> None:
    """End a cluster that this process has started, with all of its processes, without asking its servers.

    For a cluster whose servers are gone or stopped, for which Ray would wait. In a cluster that this process has only joined, it ends
    the run's own `ranks` on this machine. The raylets of other machines end the ranks there, once they have missed the GCS server for 60 s.
    """
    if cluster.mark is not None and cluster.temp_dir is not None:
        _end_at_once(cluster.mark, cluster.temp_dir)
        return
    here = ray.get_runtime_context().get_node_id()
    for process in ranks:
        if process.pid and process.node_id == here:
            kill_marked(process.mark, process_group=process.pid)
            remove_scratch(process.scratch)
    ray.shutdown()


def _end_at_once(mark: str, temp_dir: str) -> None:
    """End a cluster of this process; its servers first, since `ray.shutdown` would wait for servers that hang."""
    kill_marked(mark)
    ray.shutdown()
    shutil.rmtree(temp_dir, ignore_errors=True)


def _joined_servers() -> dict[str, int]:
    """The servers on this machine of the cluster that this process has just joined."""
    node = ray._private.worker._global_node
    arguments = {
        ray_constants.PROCESS_TYPE_RAYLET: f"--raylet_socket_name={node.raylet_socket_name}",
        ray_constants.PROCESS_TYPE_GCS_SERVER: f"--session-name={node.session_name}",
    }
    found = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        name = process.info["name"]
        if name in arguments and arguments[name] in (process.info["cmdline"] or ()):
            found[name] = process.pid
    return found


def _send_token_where_asked(address: str) -> None:
    """Makes this process send Ray's token if the cluster at `address` asks for one, unless RAY_AUTH_MODE is set.

    A driver of Ray 2.60 that is given an address sends no token, whatever the cluster wants, and learns after
    20 s that it was refused. One that always sends it cannot work with a cluster that knows of no tokens. So we
    ask first, with the call that every driver begins with; its request and its answer to us are empty messages.
    """
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_FIRST_CALL)(b"", timeout=_CONNECT_SECONDS)
            return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise ConnectionError(
                    f"no Ray cluster answers at {address}: {error.details()} (trainer.ray_address is the "
                    "address and port of the cluster's head)"
                ) from None
    mode = os.environ.get(AUTH_MODE_ENV_VAR)
    if mode not in (None, "token"):
        raise ConnectionError(
            f"the Ray cluster at {address} asks for a token, and {AUTH_MODE_ENV_VAR}={mode} forbids to send it; unset it"
        )
    logging.getLogger("ray").setLevel(logging.ERROR)  # as `ray.init` is told below
    if not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
        raise ConnectionError(
            f"the Ray cluster at {address} asks for a token and there is none on this machine: copy "
            "~/.ray/auth_token of the cluster's head here (same path, mode 600)"
        )


def object_store_bytes(available_memory: int, free_shared_memory: int) -> int:
    """Size of the object store: 1/32 of the memory, at most half of /dev/shm, from 128 MiB to 16 GiB.

    It holds batches of trajectories, never weights. Memory is taken only as objects fill it.
    """
    wanted = min(available_memory // 32, free_shared_memory // 2)
    return max(128 * _MIB, min(wanted, 16 * 1024 * _MIB))


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started within the block, and restore the old values after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Restore this process's own handler of SIGTERM, if it has one: Ray 2.60 replaces it by one that exits with status 15.

    A signal that comes within the block is handled by that handler, too. (To block the signal does not help where there are other
    threads: the kernel delivers it to one of them, and Python runs the handler in the main one.)
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as end:
        if end.code == signal.SIGTERM and callable(before):
            before(signal.SIGTERM, None)
        raise
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Makes Ray keep the address 127.0.0.1, for which its servers listen on the loopback interface only.

    Otherwise Ray 2.60 replaces it by the machine's outer address and listens on all interfaces: anybody on
    the network could run code here, and a laptop that changes networks loses its cluster. The switch for it is
    the one that Ray has for Windows and macOS, read when ray is imported (here) or started (its processes).
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _light_setup() -> Iterator[None]:
    """Lets a raylet that is started within the block begin its workers with setup_worker.py in place of Ray's (2.60): the name is joined to a
    folder of Ray's, which an absolute path replaces."""
    before = ray_constants.SETUP_WORKER_FILENAME
    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("setup_worker.py"))
    try:
        yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = before


@contextmanager
def _fewer_servers() -> Iterator[None]:
    """Lets `ray.init` start, within the block, three servers fewer: the dashboard's, of which `include_dashboard=False` leaves a part and which
    Ray (2.60) waits for; the autoscaler, which could add no machine; and the one that passes on what workers print, though `log_to_driver` is off.
    They take 2.3 s of a core and 175 MiB, and `ray.init` has no argument to leave them out.
    """
    names = ("start_api_server", "start_monitor", "start_log_monitor")
    before = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


@contextmanager
def ray_messages_in(path: Path) -> Iterator[None]:
    """Within the block, append the messages of Ray's servers to `path`, each with its time, instead of printing them.

    A driver of Ray 2.60 has a thread that prints messages such as "A worker died or was killed while executing a task" to standard
    output, whatever `log_to_driver` says. It prints them by `print_to_stdstream`, which is replaced here.
    """
    printed = ray._private.worker.print_to_stdstream

    def write(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{time.ctime()} {data['pid']}: {line.rstrip()}\n" for line in data["lines"])

    ray._private.worker.print_to_stdstream = write
    try:
        yield
    finally:
        ray._private.worker.print_to_stdstream = printed
