"""Spans of ranks reach the controller: every call, its facts, its time; and how clocks are compared."""

import inspect
import os
import signal
import time

import pyarrow as pa
import pytest

from megarl.cluster import SpanCollector, wait
from megarl.cluster import spans as module
from megarl.cluster.spans import clock_ahead
from megarl.util.spans import facts_of_call


def collected(group):
    collector = SpanCollector()
    collector.ask([group])
    return {process.rank: spans for process, spans in collector.answers(10.0)}


def test_every_call_of_every_rank_is_noted(start_group):
    group = start_group("noted", 2)
    begun = time.time_ns()
    wait(group.call("append", 5), [group])
    wait(group.call("echo"), [group])
    found = collected(group)
    assert {rank: [span.name for span in spans] for rank, spans in found.items()} == {
        rank: ["start", "append", "echo"] for rank in (0, 1)
    }
    for start, append, echo in found.values():
        assert append.facts == {"value": 5}
        assert start.begin < start.end <= append.begin < append.end <= echo.begin
        assert begun - 5_000_000 < append.begin and echo.end < time.time_ns() + 5_000_000
    assert collected(group) == {0: [], 1: []}


def test_a_busy_rank_is_not_waited_for_and_tells_later(start_group, tmp_path):
    group, collector = start_group("busy", 2), SpanCollector()
    go = tmp_path / "go"
    (tmp_path / "gone").touch()
    done, busy = group.call_each("wait_for_file", [(str(tmp_path / "gone"),), (str(go),)])
    collector.ask([group])
    assert wait([done], [group]) == [0]
    deadline, first = time.monotonic() + 10, []
    while not first and time.monotonic() < deadline:
        first = list(collector.answers(0.2))
    assert [process.rank for process, _ in first] == [0]
    go.touch()
    assert wait([busy], [group]) == [1]
    (process, spans), *others = collector.answers(10.0)
    assert process.rank == 1 and [span.name for span in spans][-1] == "wait_for_file" and not others


def test_of_a_dead_rank_nothing_comes_and_nothing_is_asked(start_group):
    group, collector = start_group("dead", 2), SpanCollector()
    victim = group.processes[1]
    os.kill(victim.pid, signal.SIGSTOP)
    collector.ask([group])  # Ray does not know yet that the rank will not answer
    os.kill(victim.pid, signal.SIGKILL)
    deadline, found = time.monotonic() + 20, []
    while not victim.is_dead and time.monotonic() < deadline:
        found += collector.answers(0.2)
    assert victim.is_dead
    found += collector.answers(5.0)
    assert [process.rank for process, _ in found] == [0]
    collector.ask([group])
    assert [process.rank for process, _ in collector.answers(5.0)] == [0]


def test_a_node_is_asked_for_its_time_once(start_group, monkeypatch):
    """This node is treated like another one. Its own clock counts as right, or the time of Ray's answer would shift spans."""
    group, collector = start_group("clocked", 1), SpanCollector()
    node = group.processes[0].node_id
    collector._ahead.clear()
    collector.ask([group])
    ahead = collector._ahead[node]
    assert ahead != 0 and abs(ahead) < 200_000_000  # a loaded machine answers late
    ((_, (start,)),) = collector.answers(10.0)
    monkeypatch.setattr(module, "_time_of", lambda node: pytest.fail("asked again"))
    collector._ahead[node] = 3_600_000_000_000
    wait(group.call("echo"), [group])
    collector.ask([group])
    ((_, (echo,)),) = collector.answers(10.0)
    assert 3500 < (start.begin - echo.begin) / 1e9 < 3600


def test_facts_are_numbers_texts_and_the_sizes_of_tables():
    def method(table, number, parts, *rest, name="x" * 100, share=None, limit=1.0):
        pass

    table = pa.table({"a": pa.array([1, 2, 3], pa.int64())})
    found = facts_of_call(
        inspect.signature(method),
        (table, 3, ["weights", "optimizer"], 8),
        {"share": [[1, 2]], "name": "y" * 100, "limit": float("inf")},
    )
    assert found == {
        "table_rows": 3, "table_bytes": 24, "number": 3, "parts": "weights, optimizer", "name": "y" * 80,
    }  # fmt: skip


def test_the_quickest_answer_tells_how_far_a_clock_is_ahead():
    """An answer whose clock was read in the middle of its 2,000 ns, and another that took long on its way back."""
    assert clock_ahead([(0, 50_900, 2000), (10_000, 60_500, 30_000)]) == 49_900
    assert clock_ahead([(100, 40, 120)]) == -70
    assert clock_ahead([]) == 0
