"""Calls that are spread over the machines of a cluster."""

import os
from pathlib import Path

import pytest
import ray

from megarl.cluster import hosts
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


def test_a_call_that_a_node_fails_is_made_on_another(monkeypatch: pytest.MonkeyPatch):
    """Also on one that had nothing left to do. Nodes are imitated: "a" fails with all calls, all fail with call 9."""
    made: list[tuple[str, int]] = []

    def submit(node, function, number):
        made.append((node, number))
        return node, number, function(number)

    def get(call):
        node, number, result = call
        if node == "a" or number == 9:
            raise ray.exceptions.RayError("told to")
        return result

    monkeypatch.setattr(hosts, "submit", submit)
    # The calls end in the order of their numbers, so that "b" is idle when "a" fails.
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns: ([min(refs, key=lambda ref: ref[1])], []))
    monkeypatch.setattr(ray, "get", get)
    assert list(spread(["a", "b"], abs, [(-1,), (-2,)])) == [(1, "b", 2), (0, "b", 1)]
    assert made == [("a", -1), ("b", -2), ("b", -1)]
    made.clear()
    found = list(spread(["a", "b", "c"], abs, [(9,), (1,), (2,), (3,)]))
    assert found == [(1, "b", 1), (2, "c", 2), (3, "b", 3), (0, None, None)]
    assert [number for _, number in made].count(9) == 3
