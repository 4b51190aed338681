"""`megarl report`: what a run folder tells, as one page that shows everything and runs nothing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megarl.cli import main
from megarl.data.trajectories import append_column, expand_prompts, replace_column, write_trajectories
from megarl.spans import Span
from megarl.trainer.charts import Bar, figure, histogram, lines, rows, stacked, thinned
from megarl.trainer.report_timeline import nested, read_timeline
from megarl.trainer.trace_file import TraceFile
from tests.trainer.trajectories import answer, prompts

SECOND = 1_000_000  # microseconds
EVIL = "</pre><script>alert(1)</script>"


class Page(HTMLParser):
    """Whether every tag is closed, where it points to, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.addresses, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("href", "src", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        self.text += data


def step_line(step: int, **metrics: float) -> str:
    entry = {"step": step, "time": 1.7e9 + step, "timing_s/step": 10.0, "perf/tokens": 500.0}
    return json.dumps(entry | {name.replace("__", "/"): value for name, value in metrics.items()}) + "\n"


def write_timeline(folder: Path) -> None:
    """Step 1 twice (a failure between), step 2; an actor rank that works 5 s of 10, then 2 s of 20, an engine all the time."""
    file = TraceFile(folder, 1 << 20, goes_on=False)
    for pid, role, threads in (
        (1, "controller", ["loop"]),
        (2, "rollout", ["rank 0"]),
        (5, "actor", ["rank 0"]),
    ):
        file.name([{"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": role}}])
        for tid, name in enumerate(threads):
            file.name([{"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}])

    def write(name, pid, begin, seconds, **facts):
        file.write([{"name": name, "ph": "X", "pid": pid, "tid": 0, "ts": begin * SECOND, "dur": seconds * SECOND, "args": facts}])  # fmt: skip

    write("step", 1, 0, 4, step=1)
    write("rollout rank 1 (process 7) is lost: starting it anew, 1 of 3 times", 1, 5, 3)
    for step, begin, seconds in ((1, 100, 10), (2, 200, 20)):
        write("step", 1, begin, seconds, step=step)
        write("update", 1, begin + 1, 6, step=step)
        write("stream", 2, begin, seconds, yielded_rows=8)
    write("start", 5, 50, 40)
    write("update_policy", 5, 101, 4)
    write("inner", 5, 102, 1)
    write("memory", 5, 106, 1)
    write("update_policy", 5, 205, 2)
    file.write([{"name": "weights 3", "ph": "i", "s": "g", "pid": 1, "tid": 0, "ts": 210 * SECOND}])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        step_line(1, critic__score__mean=0.25, timing_s__generate=6.0, timing_s__update=3.0, timing_s__sync=0.5,
                  sync__bytes_total=3 << 20, sync__bytes_local=2 << 20, sync__bytes_intra_node=1 << 20,
                  memory__update__actor_weights=5 << 20, memory__update__total=7 << 20)
        + step_line(2, critic__score__mean=0.75, timing_s__generate=5.0, timing_s__update=4.0)
        + '{"step": 3, "ti'
    )  # fmt: skip
    (run / "config.yaml").write_text(
        f"data:\n  train_files: {EVIL}\nactor_rollout_ref:\n  model:\n    path: {run}/none\n"
    )
    (run / "health.jsonl").write_text(
        json.dumps({"step": 2, "message": f"entropy is low {EVIL}", "advice": "Do: this"}) + '\n{"ste'
    )
    (run / "failures").mkdir()
    head = "time: 2026-11-22 10:30:00 UTC\nstep: 1\nphase: step / update\nrole: actor\nrank: 1\n\n"
    (run / "failures" / "20261122-103000.txt").write_text(
        head + f"{'=' * 9}\nthe error\n{'=' * 9}\nactor rank 1 died\n"
    )
    table = answer(expand_prompts(prompts("a", "b"), 2), lengths=[3, 4, 5, 6])
    table = append_column(table, "score", np.array([0.0, 0.5, 2.5, 1.0]))
    for step in (1, 2):
        named = replace_column(table, "ground_truth", pa.array([f"{EVIL} {step}"] * 4))
        write_trajectories(named, run / "rollouts" / f"step-{step:06d}.parquet")
    write_timeline(run)
    return run


def test_the_page_says_everything_and_runs_nothing(folder, tmp_path, capsys):
    out = tmp_path / "deep" / "page.html"
    assert main(["report", str(folder), "--output", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    text = out.read_text()
    page = Page(text)
    assert page.open == [] and page.addresses == [] and "script" not in page.tags and "<script" not in text
    assert not re.search(r"url\(|@import|https?://", text)
    for words in (
        "Steps 1 to 2", "1,000 tokens in all", "actor rank 1 died", "step / update", "starting it anew, 1 of 3 times: 3.0 s",
        "Made again after a failure: steps 1.", f"step 2: entropy is low {EVIL}. Do: this", f"{EVIL} 2", EVIL,
        "token ids: ", "score 2.5", "MiB on the fullest device in step 1", "critic/score/mean",
    ):  # fmt: skip
        assert words in page.text, words
    # bytes by link: local, within nodes, between nodes, all
    assert re.search(r"<td>1</td><td>2\.00</td><td>1\.00</td><td>0\.00</td><td>3\.00</td>", text)
    assert re.search(r"<td>actor_weights</td><td>5\.0</td>", text)
    assert "training: 0.25 at first, 0.75 at last" in text
    assert "step 1: other 0.5 s" in text and "step 2: generate 5 s" in text
    for name in ("response", "prompt"):
        assert f"step 2: tokens of each {name}" in page.text


def test_the_page_is_in_the_run_folder_unless_it_is_told_otherwise(folder):
    assert main(["report", str(folder)]) == 0
    first = (folder / "report.html").read_text()
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == first


def test_shares_are_of_the_time_of_steps(folder):
    """The actor works 4 + 1 s of step 1's 10 s and 2 s of step 2's 20 s; its start was in none."""
    found = read_timeline(folder)
    assert {step: (end - begin) / 1e9 for step, (begin, end) in found.windows.items()} == {1: 10, 2: 20}
    assert found.again == [1] and [moment.name for moment in found.moments] == ["weights 3"]
    shares = {track.role: track.shares(found.windows) for track in found.tracks}
    assert shares["actor"] == pytest.approx({"update_policy": 6 / 30, "memory": 1 / 30})
    assert shares["rollout"] == {"stream": 1.0}
    page = folder / "report.html"
    assert main(["report", str(folder)]) == 0
    assert re.search(r"<td>actor</td><td>1</td><td>23\.3%</td>", page.read_text())


def test_a_run_of_little_has_a_page_too(tmp_path):
    """Supervised fine-tuning without a timeline: no engines, no trajectories, no configuration."""
    (tmp_path / "metrics.jsonl").write_text(
        step_line(1, train__loss=2.0) + step_line(2, train__loss=float("nan"))
    )
    assert main(["report", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text())
    assert page.open == [] and "There is no timeline of the steps" in page.text
    assert not {"Trajectories", "Weight sync", "Memory", "Configuration"} & set(page.text.split("\n"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder.rmdir(), "there is no folder"),
        (lambda folder: None, "is not the folder of a run that trains: it has no metrics.jsonl"),
        (lambda folder: (folder / "metrics.jsonl").touch(), "has ended yet"),
        (lambda folder: (folder / "metrics.jsonl").write_text('{"step": 1, "time'), "has ended yet"),
        (
            lambda folder: [(folder / "metrics.jsonl").touch(), (folder / "failures").mkdir()],
            "why it ended is in",
        ),
    ],
)
def test_what_is_no_run_is_named(tmp_path, capsys, make, words):
    folder = tmp_path / "run"
    folder.mkdir()
    make(folder)
    assert main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert words in said and str(folder) in said and "Traceback" not in said


def test_spans_know_how_deep_they_are():
    spans = [Span("a", 0, 10, {}), Span("d", 10, 12, {}), Span("c", 2, 5, {}), Span("b", 1, 6, {})]
    assert [(span.name, depth) for span, depth in nested(spans)] == [("a", 0), ("b", 1), ("c", 2), ("d", 0)]


def test_lines_leave_out_what_is_not_finite_and_thin_what_is_long():
    nan = float("nan")
    assert lines("x", {"a": [(1, nan)], "b": []}) == ""
    drawn = lines("x", {"a": [(1, 2.0), (2, nan), (3, 4.0)]})
    (points,) = re.findall(r'points="([^"]*)"', drawn)
    assert len(points.split()) == 2 and "nan" not in drawn
    many = thinned([(x, float(x % 2)) for x in range(1000)], most=100)
    assert len(many) == 100 and all(y == 0.5 for _, y in many)


def test_bars_are_as_long_as_their_parts():
    drawn = stacked("x", [(1.0, {"a": 1.0, "b": 3.0}), (2.0, {"b": 2.0})], "s")
    heights = [float(tall) for tall in re.findall(r'height="([\d.]+)" fill', drawn)]
    assert heights == [49.0, 147.0, 98.0]
    bars = [Bar("a", 0.0, 0.25, "a"), Bar("b", 0.5, 2.0, "too long: ends with the row")]
    widths = re.findall(
        r'x="([\d.]+)" y="2" width="([\d.]+)" height="15" fill', rows("x", [("r", bars)], 1.0, ["a", "b"])
    )
    assert widths == [("150.0", "202.5"), ("555.0", "405.0")]
    assert stacked("x", [], "s") == "" == histogram("x", [])


def test_a_histogram_counts_every_value():
    drawn = histogram("x", [1, 1, 1, 5, 9], bins=4)
    assert [int(count) for count in re.findall(r"<title>(\d+) from", drawn)] == [3, 0, 1, 1]
    assert "5 from" in histogram("x", [7, 7, 7, 7, 7], bins=3)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (1234.5, "1,234"), (1e-5, "1.0e-05"), (25000, "2.5e+04")]
)
def test_figures_are_short(value, text):
    assert figure(value) == text
