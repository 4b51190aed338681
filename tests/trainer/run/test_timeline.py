"""The timeline: a file of bounded size that can be read at any time, also after a kill; and its contents."""

import json
import threading

import pytest
from rich.console import Console

from megarl.cluster.ranks import RankProcess
from megarl.trainer.run import timeline as module
from megarl.trainer.run.run import Run
from megarl.trainer.run.timeline import EARLIER, LOOP, STEP, TIMELINE, Timeline, TraceFile, read_events
from megarl.util.spans import Span, Spans

EVENT = {"name": "update", "ph": "X", "pid": 1, "tid": 0, "ts": 10, "dur": 5, "args": {"what": "ü, ]"}}


def events(folder, **wanted):
    return [event for event in read_events(folder) if wanted.items() <= event.items()]


def test_the_file_is_json_after_every_write(tmp_path):
    file = TraceFile(tmp_path, 1 << 20, goes_on=False)
    assert json.loads((tmp_path / TIMELINE).read_text()) == []
    for count in (1, 2, 3):
        file.write([EVENT | {"ts": count}] * count)
        found = json.loads((tmp_path / TIMELINE).read_text())
    assert [event["ts"] for event in found] == [1, 2, 2, 3, 3, 3] and found[0]["args"] == EVENT["args"]
    file.write([])
    assert read_events(tmp_path) == found


@pytest.mark.parametrize("lost", range(1, 75))
def test_what_a_killed_run_has_left_is_mended(tmp_path, lost):
    """Wherever the last write was cut off, the complete events stay, and the resumed run appends to them."""
    TraceFile(tmp_path, 1 << 20, goes_on=False).write([EVENT | {"ts": 1}, EVENT | {"ts": 2}])
    path = tmp_path / TIMELINE
    path.write_bytes(path.read_bytes()[:-lost])
    kept = [1, 2] if lost <= 3 else [1]
    assert [event["ts"] for event in read_events(tmp_path)] == kept
    TraceFile(tmp_path, 1 << 20, goes_on=True).write([EVENT | {"ts": 3}])
    assert [event["ts"] for event in json.loads(path.read_text())] == [*kept, 3]


def test_a_new_run_begins_anew(tmp_path):
    TraceFile(tmp_path, 1 << 20, goes_on=False).write([EVENT])
    (tmp_path / EARLIER).write_text("[\n]\n")
    TraceFile(tmp_path, 1 << 20, goes_on=False)
    assert read_events(tmp_path) == [] and not (tmp_path / EARLIER).exists()


def test_a_long_run_keeps_the_newest_within_its_space(tmp_path):
    file, limit = TraceFile(tmp_path, 8000, goes_on=False), 8000
    file.name([{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "actor"}}])
    for number in range(500):
        file.write([EVENT | {"ts": number}])
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit + 10
    found = [event["ts"] for event in events(tmp_path, name="update")]
    assert found == list(range(found[0], 500)) and len(found) > 40
    for name in (TIMELINE, EARLIER):  # each of the two files can be opened without the other
        first = json.loads((tmp_path / name).read_text())[0]
        assert first["args"] == {"name": "actor"}


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / TIMELINE).write_text("nothing\nof ours\n]\n")
    with pytest.raises(ValueError, match=r"timeline\.json is no timeline"):
        read_events(tmp_path)


class FakeCollector:
    """A collector whose next answers are the spans that a test has set in `spans`."""

    def __init__(self) -> None:
        self.asked, self.spans = [], {}

    def ask(self, groups) -> None:
        self.asked.append(groups)

    def answers(self, seconds: float = 0.0):
        spans, self.spans = self.spans, {}
        for (role, rank, part), theirs in spans.items():
            yield RankProcess(None, role, rank, "host", "node", "log", part=part), theirs


@pytest.fixture
def timeline(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SpanCollector", FakeCollector)
    return Timeline(tmp_path, 1, goes_on=False)


def test_every_process_and_rank_has_its_name_and_place(timeline, tmp_path):
    span = Span("update_policy", 5_000_000, 9_000_999, {"table_rows": 8})
    timeline._collector.spans = {
        ("actor", 3, 0): [span], ("rollout", 1, 2): [span], ("sft", 0, 0): [span],
    }  # fmt: skip
    timeline.collect([])
    names = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events(tmp_path, name="thread_name")
    }
    roles = {event["pid"]: event["args"]["name"] for event in events(tmp_path, name="process_name")}
    assert set(roles.values()) == {"rollout", "actor", "sft"}
    assert {(roles[pid], name) for (pid, _), name in names.items()} == {
        ("actor", "rank 3"), ("rollout", "rank 1 part 2"), ("sft", "rank 0"),
    }  # fmt: skip
    order = {
        event["args"]["sort_index"]: event["pid"] for event in events(tmp_path, name="process_sort_index")
    }
    assert [roles[order[place]] for place in sorted(order)] == ["rollout", "actor", "sft"]
    found = events(tmp_path, name="update_policy")
    assert len(found) == 3
    assert all((event["ts"], event["dur"], event["ph"]) == (5000, 4000, "X") for event in found)
    assert all(event["args"] == {"table_rows": 8} for event in found)


def test_spans_know_the_step_that_had_begun(timeline, tmp_path):
    with timeline.span("starting", {}):
        pass
    for step in (7, 8):
        facts = {"step": step}
        with timeline.span(STEP, facts):
            with timeline.span("generate", {}):
                now = timeline._own[LOOP].now()
            facts["tokens"] = 100 * step
        timeline._collector.spans = {("actor", 0, 0): [Span("memory", now, now + 1000, {})]}
        timeline.collect([])
    assert "args" not in events(tmp_path, name="starting")[0]
    assert [event["args"] for event in events(tmp_path, name="generate")] == [{"step": 7}, {"step": 8}]
    assert [event["args"]["step"] for event in events(tmp_path, name="memory")] == [7, 8]
    steps = events(tmp_path, name=STEP)
    assert [event["args"] for event in steps] == [{"step": 7, "tokens": 700}, {"step": 8, "tokens": 800}]
    within = events(tmp_path, name="generate")
    for outer, inner in zip(steps, within, strict=True):
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_collecting_ahead_is_a_thread_next_to_the_loop(timeline, tmp_path):
    def ahead():
        with timeline.span("generate", {}):
            began.set()
            done.wait(10)

    began, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=ahead, name="collect-ahead")
    thread.start()
    began.wait(10)
    with timeline.span("update", {}):
        pass
    done.set()
    thread.join()
    timeline.collect([])
    (update,), (generate,) = events(tmp_path, name="update"), events(tmp_path, name="generate")
    names = {event["tid"]: event["args"]["name"] for event in events(tmp_path, name="thread_name")}
    assert (names[update["tid"]], names[generate["tid"]]) == ("loop", "collect-ahead")
    assert update["pid"] == generate["pid"]
    assert generate["ts"] <= update["ts"]
    assert update["ts"] + update["dur"] <= generate["ts"] + generate["dur"]


def test_moments_are_shown_across_all(timeline, tmp_path):
    timeline.mark("weights 3")
    timeline.collect([])
    (event,) = events(tmp_path, name="weights 3")
    assert (event["ph"], event["s"]) == ("i", "g") and "dur" not in event


def test_samples_of_a_worker_are_one_where_they_follow_each_other(timeline, tmp_path):

    timeline.rewards = Spans()
    for worker, seconds in ((0, 0.010), (1, 0.020), (0, 0.015)):
        timeline.rewards.add("score", seconds, {"worker": worker})
    timeline.collect([])
    timeline.collect([])
    found = {event["tid"]: event for event in events(tmp_path, name="score")}
    assert {tid: event["args"] for tid, event in found.items()} == {0: {"samples": 2}, 1: {"samples": 1}}
    assert found[1]["dur"] == pytest.approx(20_000, abs=2)


def test_an_engine_that_is_asked_again_and_again_is_shown_once_until_there_is_a_pause(timeline, tmp_path):
    polls = [Span("land", at * 10**6, (at + 190) * 10**6, {}) for at in (0, 200, 400, 900)]
    timeline._collector.spans = {("rollout", 0, 0): [*polls, Span("launch", 5, 9, {"parts": 1})]}
    timeline.collect([])
    found = [(event["ts"], event["dur"], event["args"]["calls"]) for event in events(tmp_path, name="land")]
    assert sorted(found) == [(0, 590_000, 3), (900_000, 190_000, 1)]
    assert len(events(tmp_path, name="launch")) == 1


def test_a_timeline_that_cannot_be_written_ends_alone(timeline, tmp_path, capsys):
    """When the disk is full, the timeline ends and the run continues."""
    run = Run(tmp_path, Console(width=200), timeline=timeline)

    def fail(groups):
        raise OSError(28, "No space left on device", str(tmp_path / TIMELINE))

    run.write_timeline(fail)
    assert (
        run.timeline is None and "the timeline ends here: [Errno 28] No space left" in capsys.readouterr().out
    )
    with run.timed("update"):
        run.mark("weights 3")
    assert run.seconds["update"] >= 0.0
