"""Clusters that do not start."""

import os

import pytest
import ray

from megarl.cluster import RayFailed, cluster


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


def test_a_cluster_that_this_process_is_connected_to_is_left_alone(ray_cluster, tmp_path):
    with pytest.raises(ValueError, match=r"connected to a Ray cluster already: call ray\.shutdown\(\) first"):
        cluster.start_cluster(None, 1, tmp_path)
    assert ray.is_initialized() and ray.cluster_resources()["CPU"] > 0
