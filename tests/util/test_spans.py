"""Spans: recorded however a block ends, taken once, and counted as time."""

import threading
import time

import pytest

from megarl.util.spans import Span, Spans, busy, joined

MS = 1_000_000


def test_a_span_has_the_time_of_day_and_what_was_told_of_it():
    spans, before = Spans(), time.time_ns()
    with spans.span("outer", {"step": 3}) as facts:
        with spans.span("inner"):
            time.sleep(0.01)
        facts["tokens"] = 7
    inner, outer = spans.take()
    assert (inner.name, outer.name, outer.facts) == ("inner", "outer", {"step": 3, "tokens": 7})
    assert outer.begin <= inner.begin < inner.end <= outer.end
    assert inner.end - inner.begin >= 10 * MS and abs(outer.begin - before) < 1000 * MS
    assert spans.take() == []


def test_an_interruption_between_two_clocks_shifts_no_span(monkeypatch):
    original, readings = time.time_ns, []

    def interrupted():
        readings.append(original())
        if len(readings) == 1:
            time.sleep(0.1)
        return readings[-1]

    monkeypatch.setattr(time, "time_ns", interrupted)
    spans = Spans()
    before, now, after = original(), spans.now(), original()
    assert before - 10 * MS <= now <= after + 10 * MS


def test_a_block_that_raises_is_noted():
    spans = Spans()
    with pytest.raises(KeyError), spans.span("broken"):
        raise KeyError("x")
    assert [span.name for span in spans.take()] == ["broken"]


def test_the_newest_are_kept_where_nobody_asks():
    spans = Spans(most=3)
    for number in range(5):
        spans.add(str(number), seconds=0.5)
    found = spans.take()
    assert [span.name for span in found] == ["2", "3", "4"]
    assert all(span.end - span.begin == 500 * MS for span in found)


def test_threads_may_note_while_another_takes():
    spans, found = Spans(), []
    threads = [
        threading.Thread(target=lambda: [spans.add("x") for _ in range(2000)], name=str(i)) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found += spans.take()
    assert len(found + spans.take()) == 6000


def test_what_overlaps_is_joined():
    spans = [
        Span("score", 10, 20, {}),
        Span("score", 0, 12, {}),
        Span("score", 23, 30, {}),
        Span("score", 50, 51, {}),
    ]
    assert joined(spans, 3, "samples") == [
        Span("score", 0, 30, {"samples": 3}),
        Span("score", 50, 51, {"samples": 1}),
    ]


def test_busy_counts_no_moment_twice_and_none_outside():
    spans = [Span("a", 0, 10, {}), Span("b", 5, 20, {}), Span("c", 30, 40, {}), Span("d", 6, 7, {})]
    assert busy(spans, 0, 100) == 30
    assert busy(spans, 8, 35) == 12 + 5
    assert busy([], 0, 10) == 0
