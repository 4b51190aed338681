"""Clusters that do not start."""

import os
import subprocess
import sys

import pytest
import ray

from megarl.cluster import RayFailed, cluster
from megarl.trainer.run.preemption import REQUEUE


def test_a_server_that_does_not_come_up_is_a_failure_of_rays_and_leaves_nothing(monkeypatch, tmp_path):
    """Ray raises an Exception of no kind of its own, say when its raylet was stopped."""
    folders = []

    def init(**arguments):
        folders.append(arguments["_temp_dir"])
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(cluster, "start_guard", lambda *arguments, **options: None)
    monkeypatch.setattr("ray.init", init)
    # Of this process, which other tests have connected to a cluster.
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
    """Ray answers SIGTERM itself meanwhile; with another thread there, that does not have it blocked, it comes to that."""
    command = [sys.executable, "-c", TOLD_AS_RAY_STARTS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == REQUEUE, result.stderr
    assert "SIGTERM: ending before the first step, to be started again" in result.stderr


def test_a_cluster_that_this_process_is_connected_to_is_left_alone(ray_cluster, tmp_path):
    with pytest.raises(ValueError, match=r"connected to a Ray cluster already: call ray\.shutdown\(\) first"):
        cluster.start_cluster(None, 1, tmp_path)
    assert ray.is_initialized() and ray.cluster_resources()["CPU"] > 0
