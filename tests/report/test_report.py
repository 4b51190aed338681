"""`megarl report`: run folders as one page that shows everything and runs no code from the folders."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.report.data import read_run
from megarl.report.phases import phase_of
from megarl.report.summary import tiles_of
from megarl.report.timeline import nested, read_timeline
from megarl.trainer.run.facts import RunFacts
from megarl.util.spans import Span
from tests.report.folders import EVIL, Page, hash_of, step_line, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def report(*folders: Path, output: Path | None = None) -> Page:
    place = folders[0] / "report.html" if output is None else output
    assert main(["report", *map(str, folders), "--output", str(place)]) == 0
    page = Page(place.read_text(encoding="utf-8"))
    assert page.open == []
    return page


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        ("land", "generate"),
        ("judge", "evaluate_models"),
        ("compute_values", "evaluate_models"),
        ("start", "other"),
    ],
)
def test_a_ranks_calls_belong_to_phases(call: str, phase: str) -> None:
    """`judge` is the call of engines that serve a reference or teachers."""
    assert phase_of(Span(call, 2, 4, {}), [(5, 9)]) == phase
    assert phase_of(Span(call, 2, 4, {}), [(1, 9)]) == "validate"


def test_the_page_says_everything_and_fetches_nothing(folder, tmp_path, capsys):
    page = report(folder, output=tmp_path / "deep" / "page.html")
    assert str(tmp_path / "deep" / "page.html") in capsys.readouterr().out
    for words in (
        "Validation score", "86.7%", "12.5% → 86.7%", "2,500 tokens in all", "actor rank 1 died", "step / update",
        "starting it anew, 1 of 3 times: 3.0 s", "Steps made again after a failure: 1", f"entropy is low {EVIL}", "Do: this", f"{EVIL} 5",
        "token ids: ", "score 2.5", "critic/score/mean", "KL coefficient", "0.001", "Truncated responses", "actor/entropy",
    ):  # fmt: skip
        assert words in page.text, words
    # bytes by link: local, within nodes, between nodes, all
    rows = re.sub(r"\s+", "", (tmp_path / "deep" / "page.html").read_text())
    assert "<td>1</td><td>2.00</td><td>1.00</td><td>0.00</td><td>3.00</td>" in rows
    assert page.chart("Seconds of each step")["parts"][-1]["values"] == [0.5] * 5  # other
    assert page.chart("Device memory in step 5")["parts"][0]["values"] == [5.0]
    assert page.chart("Length of responses")["parts"][0]["values"] == [1, 1, 1, 1]


def test_nothing_is_fetched_and_only_the_pages_own_scripts_run(folder):
    page = report(folder)
    text = (folder / "report.html").read_text()
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"url\(|@import", text) and EVIL not in text and "img" not in page.tags
    data, packed, *own = [script for script in page.scripts if script.strip()]
    assert "<" not in data and "<" not in packed
    allowed = set(re.search(r"script-src ([^;]*);", page.policy)[1].split())
    assert allowed == {hash_of(page.plotly), *(hash_of(script.encode()) for script in own)} and len(own) == 2
    assert page.policy.startswith("default-src 'none';")


def test_points_are_those_of_the_metrics(folder):
    """Of the points of step 3, which was logged twice, the later ones count; NaN is a gap; a line that was cut off is left out."""
    page = report(folder)
    assert page.points("critic/score/mean") == [(1, 0.35), (2, 0.45), (3, 0.55), (4, 0.65), (5, 0.75)]
    assert page.points("val/score/mean") == [(1, 0.125), (5, 0.867188)]
    assert page.points("actor/entropy") == [(1, None), (2, 0.25), (3, 0.166667), (4, 0.125), (5, 0.1)]
    titles = [chart["title"] for chart in page.data["charts"]]
    assert "Entropy" in titles and not {"KL coefficient", "Learning rate", "Truncated responses"} & set(
        titles
    )
    assert "Numbers that are not finite" in page.text


def test_the_page_is_in_the_run_folder_unless_it_is_told_otherwise(folder):
    assert main(["report", str(folder)]) == 0
    first = (folder / "report.html").read_text()
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == first


def test_two_runs_share_their_charts(folder, tmp_path):
    """Runs of the same name are distinguished by their paths; differences between their configurations are listed, except for folders."""
    other = write_run(tmp_path / "later" / "run", more=0.03125)
    page = report(folder, other, output=tmp_path / "both.html")
    assert page.data["runs"] == [f"{tmp_path.name}/run", "later/run"]
    assert page.points("val/score/mean", 1)[-1] == (5, 0.898438)
    assert page.chart("Learning rate")["series"] == [
        {"metric": "actor/lr", "label": "actor"}
    ]  # differs between runs
    text = re.sub(r"\s+", " ", page.text)
    assert "actor_rollout_ref.actor.optim.lr0.00010.03135" in text
    assert (
        "trainer.default_local_dir"
        not in text.partition("Configuration that differs")[2].partition("Problems")[0]
    )
    assert "86.7%" in text and "89.8%" in text


def test_scores_that_are_no_shares_are_numbers_beside_each_other(tmp_path):
    """A reward model's scores; shares stay percentages."""
    runs = [tmp_path / "one", tmp_path / "two"]
    for run, score in zip(runs, (2.75, -1.25), strict=True):
        run.mkdir()
        line = step_line(1, critic__score__mean=score, actor__pg_clipfrac=0.125)
        (run / "metrics.jsonl").write_text(line)
    text = re.sub(r"\s+", " ", report(*runs, output=tmp_path / "both.html").text)
    last = text.partition("Last value of every curve")[2]
    assert "Training score2.75-1.25" in last and "Clip fraction: policy12.5%12.5%" in last


def test_nan_hides_no_extremes(tmp_path):
    values = (math.nan, 0.5, 0.25, 0.375)
    lines = [step_line(step, actor__entropy=value) for step, value in enumerate(values, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert "actor/entropynan0.250.50.375" in re.sub(r"\s+", "", report(tmp_path).text)


@pytest.mark.parametrize(
    ("command", "recipe"),
    [
        ("megarl train recipe:quickstart_ppo trainer.seed=7", "recipe:quickstart_ppo"),
        ("megarl train recipes/mine.yaml data.train_files=recipe:other", "mine.yaml"),
        ("python program.py", None),
    ],
)
def test_the_recipe_is_the_one_of_the_command(folder, command, recipe):
    facts = RunFacts(command, 0.0, "host", 1, {})
    tiles = {tile.label: tile.value for tile in tiles_of(replace(read_run(folder), facts=facts))}
    assert tiles.get("Recipe") == recipe


def test_a_run_that_is_given_twice_is_refused(folder, capsys):
    assert main(["report", str(folder), f"{folder}/"]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_shares_are_of_the_time_of_steps(folder):
    """The actor works 4 + 1 s of step 1's 10 s and 2 s of step 2's 20 s; its start was in no step."""
    found = read_timeline(folder)
    assert {step: (end - begin) / 1e9 for step, (begin, end) in found.windows.items()} == {1: 10, 2: 20}
    assert found.again == [1] and [moment.name for moment in found.moments] == ["weights 3"]
    busy = report(folder).chart("How busy each rank was")
    assert busy["rows"] == ["rollout 0", "actor 0"]
    assert {part["label"]: part["values"] for part in busy["parts"]} == {
        "generation": [1.0, 0.0],
        "update": [0.0, 0.2],
        "other": [0.0, 0.033333],
    }


def test_a_phase_has_one_colour_in_every_chart(folder):
    by_phase: dict[str, set[str]] = {}
    for chart in report(folder).data["charts"]:
        if chart["kind"] in ("stack", "gantt") or chart["title"].startswith("How busy"):
            for part in chart["parts"]:
                by_phase.setdefault(part["label"], set()).add(part["colour"])
    assert {"generation", "update", "other"} <= by_phase.keys()
    assert all(len(colours) == 1 for colours in by_phase.values())
    assert len(set.union(*by_phase.values())) == len(by_phase)


def test_a_run_of_little_has_a_page_too(tmp_path):
    """Supervised fine-tuning without a timeline: no engines, no trajectories, no configuration."""
    (tmp_path / "metrics.jsonl").write_text(
        step_line(1, train__loss=2.0) + step_line(2, train__loss=1.0) + step_line(3, train__loss=float("nan"))
    )
    page = report(tmp_path)
    assert "There is no timeline of the ranks" in page.text and "not finite" not in page.chart("Loss")
    assert page.points("train/loss") == [(1, 2.0), (2, 1.0), (3, None)]
    assert not {"Trajectories", "Weight sync", "Memory"} & set(page.text.split("\n"))


def test_a_run_that_failed_before_its_first_step_has_a_page(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "time')
    page = report(folder)
    assert "failed" in page.text and "actor rank 1 died" in page.text and "No step has ended yet" in page.text
    (folder / "metrics.jsonl").unlink()
    assert "before the first step ended" in report(folder).text


def test_an_evaluation_has_a_page(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "scores.json").write_text(
        json.dumps({"score/mean": 0.9375, "score/gsm8k": 0.9375, "num_problems": 300.0})
    )
    page = report(folder)
    assert "93.8%" in page.text and "num_problems" in page.text and page.data["series"]["val/score/mean"]


@pytest.mark.parametrize(
    ("scores", "tiles"),
    [
        ({"aime/score/mean": 0.25, "aime/pass@4": 0.5, "math/score/mean": 0.75, "score/mean": 0.5},
         {"Score": "50.0%", "Score: aime": "25.0%", "Score: math": "75.0%"}),
        ({"aime/score/mean": 0.25, "score/mean": 0.25}, {"Score": "25.0%"}),
        ({"score/mean": 2.5, "score/a": 4.0, "score/b": 1.0}, {"Score": "2.5", "Score: a": "4", "Score: b": "1"}),
    ],
)  # fmt: skip
def test_an_evaluation_has_the_score_of_each_set_and_source(tmp_path, scores, tiles):
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    assert {tile.label: tile.value for tile in tiles_of(read_run(tmp_path))} == tiles


def test_long_runs_have_small_pages(tmp_path):
    """20,000 steps: the size of the page is bounded, and the worst and the best step of each part are there."""
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            score = 9.0 if step == 17_777 else step % 7 / 10
            file.write(step_line(step, critic__score__mean=score, actor__entropy=1 / step))
    page = report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 2_500_000
    points = page.points("critic/score/mean")
    assert len(points) <= 1000 and points[0][0] == 1 and points[-1][0] == 20_000
    assert (17_777, 9.0) in [point[:2] for point in points]
    assert len(page.chart("Seconds of each step")["x"]) <= 150


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder.rmdir(), "there is no folder"),
        (
            lambda folder: None,
            "is not a run folder: it has neither metrics.jsonl (of train, sft, rm and dpo) nor scores.json (of eval)",
        ),
        (lambda folder: (folder / "metrics.jsonl").write_text('{"st\n{"step": 1}\n'), "metrics.jsonl line 1"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, capsys, make, words):
    folder = tmp_path / "run"
    folder.mkdir()
    make(folder)
    assert main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert words in said and str(folder) in said and len(said.splitlines()) == 1


def test_spans_know_how_deep_they_are():
    spans = [Span("a", 0, 10, {}), Span("d", 10, 12, {}), Span("c", 2, 5, {}), Span("b", 1, 6, {})]
    assert [(span.name, depth) for span, depth in nested(spans)] == [("a", 0), ("b", 1), ("c", 2), ("d", 0)]
