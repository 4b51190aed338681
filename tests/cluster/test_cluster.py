"""Clusters: started, joined, stopped, and not started; the messages of their servers go into a file."""

import os
import subprocess
import sys
import time

import pytest
import ray
import ray._private.worker

from megarl.cluster import (
    RayFailed,
    cluster,
    ray_messages_in,
    start_cluster,
)
from megarl.cluster.cluster import object_store_bytes
from megarl.cluster.hosts import reserve_port
from megarl.trainer.run.preemption import REQUEUE
from tests.cluster.processes import alive, alive_after, carrying

GIB = 2**30


def test_words_of_ray_are_appended_to_a_file_and_not_printed(tmp_path, capsys):
    path, printed = tmp_path / "logs" / "ray.log", ray._private.worker.print_to_stdstream
    for word in ("first", "second"):
        with ray_messages_in(path):
            # Called by the name in its module, as Ray's thread does (listen_error_messages of Ray 2.60).
            data = {"lines": [f"A worker died: {word}\n"], "pid": "raylet", "is_err": False}
            ray._private.worker.print_to_stdstream(data, ignore_prefix=False)
        assert ray._private.worker.print_to_stdstream is printed
    assert capsys.readouterr() == ("", "")
    lines = path.read_text().splitlines()
    assert [line.partition(" raylet: ")[2] for line in lines] == [
        "A worker died: first",
        "A worker died: second",
    ]


def test_a_server_that_does_not_come_up_is_a_failure_of_rays_and_leaves_nothing(monkeypatch, tmp_path):
    """Ray raises a plain Exception, for example when its raylet was stopped."""
    folders = []

    def init(**arguments):
        folders.append(arguments["_temp_dir"])
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(cluster, "start_guard", lambda *arguments, **options: None)
    monkeypatch.setattr("ray.init", init)
    # Other tests have connected this process to a cluster.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with pytest.raises(RayFailed, match="Ray did not start on this machine: The current node timed out"):
        cluster.start_cluster(None, 1, tmp_path)
    assert len(folders) == 1 and not os.path.exists(folders[0])


TOLD_AS_RAY_STARTS = """
import os, signal, sys, threading, time
from megarl.cluster import start_cluster
from megarl.trainer.run.preemption import ending_at_once

def tell() -> None:
    while signal.getsignal(signal.SIGTERM).__module__ != "ray._private.worker":
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

with ending_at_once():
    threading.Thread(target=tell, daemon=True).start()
    start_cluster(None, 1, sys.argv[1])
"""


def test_a_job_that_is_told_to_end_as_ray_starts_is_to_be_started_again(tmp_path):
    """Ray handles SIGTERM itself while it starts: another thread, which does not block the signal, gets it."""
    command = [sys.executable, "-c", TOLD_AS_RAY_STARTS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == REQUEUE, result.stderr
    assert "SIGTERM: ending before the first step, to be started again" in result.stderr


def test_a_cluster_that_this_process_is_connected_to_is_left_alone(ray_cluster, tmp_path):
    with pytest.raises(ValueError, match=r"connected to a Ray cluster already: call ray\.shutdown\(\) first"):
        cluster.start_cluster(None, 1, tmp_path)
    assert ray.is_initialized() and ray.cluster_resources()["CPU"] > 0


def test_a_cluster_has_no_servers_that_nobody_asks(ray_cluster):
    node = ray._private.worker._global_node
    assert set(node.all_processes) == set(ray_cluster.servers) == {"gcs_server", "raylet"}
    assert type(node).start_monitor.__module__ == type(node).__module__  # Ray's own method again


def test_stop_cluster_leaves_nothing(controller, tmp_path):
    """No process, no directory, no variable is left; and until then no other machine could connect."""
    _, report = controller("stop", tmp_path)
    for run in report["runs"]:
        assert len(run["started"]) > 6
        assert alive_after(run["started"], 30) == []
        assert alive_after(carrying(run["mark"].partition("=")[2]), 30) == []
        assert run["addresses"] == ["127.0.0.1"]
        assert run["variables"] == []
        assert not run["temp_dir_exists"]


def test_a_cluster_that_asks_for_a_token_gets_it(controller, tmp_path, monkeypatch):
    """The controller has the token, and no variable tells it that the cluster wants one."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", 16 * "feed")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    _, cluster = controller("serve")
    monkeypatch.delenv("RAY_AUTH_MODE")
    _, report = controller("hang", tmp_path, cluster["address"])
    assert len(alive(report["workers"])) == 3
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConnectionError, match="asks for a token, and RAY_AUTH_MODE=disabled forbids"):
        start_cluster(cluster["address"], 1, tmp_path)


@pytest.mark.slow
def test_a_cluster_that_knows_no_tokens_gets_none(controller, tmp_path, monkeypatch):
    """Sending a token would not only be useless: Ray's workers could then not answer the controller."""
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
        assert time.monotonic() - begin < 60


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
