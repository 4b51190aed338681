"""Calls that are spread over the machines of a cluster."""

import os
from pathlib import Path

import ray

from megarl.cluster.hosts import living_nodes, spread


def _note(folder: str, number: int) -> int:
    if number == 2:
        raise ValueError("told to")
    Path(folder, str(number)).write_text(str(os.getpid()))
    return number * number


def test_each_call_is_made_once(ray_cluster, tmp_path):
    [node] = [node["NodeID"] for node in living_nodes()]
    calls = [(str(tmp_path), number) for number in (0, 1, 5, 7)]
    assert list(spread([node], _note, calls)) == [(0, node, 0), (1, node, 1), (2, node, 25), (3, node, 49)]
    assert {path.read_text() for path in tmp_path.iterdir()}.isdisjoint({str(os.getpid())})
    assert list(spread([node], _note, [])) == []


def test_a_node_that_fails_is_given_nothing_more(ray_cluster, tmp_path):
    """The same one twice here, as if they were two: the other makes the calls that are left."""
    [node] = [node["NodeID"] for node in living_nodes()]
    calls = [(str(tmp_path), number) for number in (0, 2, 3)]
    assert list(spread([node], _note, calls)) == [(0, node, 0), (1, None, None), (2, None, None)]
    found = sorted(spread([node, node], _note, calls), key=lambda call: call[0])
    assert found == [(0, node, 0), (1, None, None), (2, node, 9)]


def test_a_node_that_is_gone_makes_no_call(ray_cluster, tmp_path):
    gone = ray.NodeID.from_random().hex()
    assert list(spread([gone], _note, [(str(tmp_path), 1)])) == [(0, None, None)]
    assert list(tmp_path.iterdir()) == []
