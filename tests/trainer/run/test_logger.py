"""The metrics of a run on the console, in TensorBoard, in trackers and in `metrics.jsonl`, and the estimate of the time left."""

import importlib
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.config.schema.run import DEFAULT_LOGGERS, LOGGERS
from megarl.config.schema.run import TRACKERS as INSTALLED_BY
from megarl.trainer.run.endpoint import Endpoint
from megarl.trainer.run.logger import (
    RECENT,
    TRACKERS,
    Pace,
    RunLogger,
    TrackedRun,
    flatten,
    mlflow_name,
    open_trackers,
    read_metrics,
)


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=60, color_system=None), text


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The steps and values of a metric, as TensorBoard reads them."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_step_goes_to_all_places(tmp_path: Path) -> None:
    out, text = console()
    metrics = {
        "critic/score/mean": 0.5,
        "actor/ppo_kl": 1.25e-3,
        "actor/entropy": 1.5,
        "actor/lr": 1e-6,
        "perf/tokens_per_s": 12345.6,
        "timing_s/step": 2.5,
        "other": 7,
    }
    with RunLogger(tmp_path, DEFAULT_LOGGERS, 10, console=out) as logger:
        logger.log(1, metrics)
        # The metrics are on disk before the run ends.
        assert scalars(tmp_path, "other") == [(1, 7.0)]
        (row,) = read_metrics(tmp_path)
    assert {name: row[name] for name in metrics} == metrics and row["step"] == 1
    assert text.getvalue() == (
        "step 1/10  reward 0.500  kl 1.25e-03  entropy 1.500  lr 1.00e-06  tokens/s 12,346  seconds 2.5  left 0:22\n"
    )


def test_validation_and_fine_tuning_show_what_they_have(tmp_path: Path) -> None:
    out, text = console()
    with RunLogger(tmp_path, ["console"], console=out) as logger:
        logger.log(0, {"val/score/mean": 0.25, "timing_s/step": 1.0})
        logger.log(1, {"train/loss": 2.5, "train/lr": 1e-3, "timing_s/step": 1.0})
    assert text.getvalue().splitlines() == [
        "step 0  accuracy 0.250  seconds 1.0",
        "step 1  loss 2.5000  lr 1.00e-03  seconds 1.0",
    ]


def test_only_the_sinks_that_are_asked_for(tmp_path: Path) -> None:
    out, text = console(terminal=True)
    with RunLogger(tmp_path, [], 3, console=out) as logger:
        logger.log(1, {"a": 1.0})
    assert text.getvalue() == ""
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_file_is_written_in_any_case(tmp_path: Path) -> None:
    for sinks in ([], ["file"]):
        with RunLogger(tmp_path, sinks) as logger:
            logger.log(1, {"a": 1.0})
        assert [row["a"] for row in read_metrics(tmp_path)] == [1.0]


def test_the_console_shows_one_answer_in_a_few_lines(tmp_path: Path) -> None:
    out, text = console()
    rows = [
        {"prompt": "1+1\n=", "response": "a" * 1000 + "z", "score": 1.0},
        {"prompt": "b", "response": "c", "score": 0.0},
    ]
    with RunLogger(tmp_path, ["console"], console=out) as logger:
        logger.log_samples(2, "val/generations", rows)
        logger.log_samples(2, "val/generations", [])
    first, prompt, response, score = text.getvalue().splitlines()
    assert (first, prompt, score) == (
        "step 2: val/generations, one of them:",
        "  prompt: 1+1\\n=",
        "  score: 1.0",
    )
    assert response.startswith("  response: aaa") and response.endswith("aaaz") and len(response) <= 12 + 300
    out, text = console()
    with RunLogger(tmp_path, ["file"], console=out) as logger:
        logger.log_samples(2, "val/generations", rows)
    assert text.getvalue() == ""


def test_the_time_left_is_in_the_line_and_next_to_the_bar(tmp_path: Path) -> None:
    (out, lines), (terminal, bar) = console(), console(terminal=True)
    for printed in (out, terminal):
        with RunLogger(tmp_path, ["console"], 3, console=printed) as logger:
            logger.log(0, {"timing_s/step": 50.0})  # the validation before the first step
            logger.log(1, {"timing_s/step": 60.0})
            logger._progress.refresh()
            assert "2:00 left" in bar.getvalue() or printed is out
            logger.log(3, {"timing_s/step": 60.0})
    assert lines.getvalue().splitlines() == [
        "step 0/3  seconds 50.0",
        "step 1/3  seconds 60.0  left 2:00",
        "step 3/3  seconds 60.0",
    ]


def test_tensorboard_shows_answers_of_a_validation(tmp_path: Path) -> None:
    with RunLogger(tmp_path, ["tensorboard"]) as logger:
        logger.log_samples(
            2, "val/generations", [{"prompt": "1+1", "score": 1.0}, {"prompt": "a|b\nc", "score": 0.0}]
        )
        logger.log(2, {"a": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("val/generations")
    assert event.step == 2
    assert event.tensor_proto.string_val[0].decode().splitlines() == [
        "| prompt | score |",
        "| --- | --- |",
        "| 1+1 | 1.0 |",
        "| a\\|b<br>c | 0.0 |",
    ]
    assert "val/generations" in events.PluginTagToContent("text")


def test_a_terminal_has_a_progress_bar(tmp_path: Path) -> None:
    out, text = console(terminal=True)
    with RunLogger(tmp_path, ["console"], 4, console=out) as logger:
        logger.log(1, {"critic/score/mean": 0.5})
        logger.log(2, {"critic/score/mean": 0.5})
    assert "train" in text.getvalue() and "2/4" in text.getvalue()
    assert "step 2/4  reward 0.500" in text.getvalue()


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    with RunLogger(tmp_path, []) as logger:
        logger.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    raw = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (raw["a"], raw["b"], raw["c"]) == ("nan", "inf", "-inf")
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    with RunLogger(tmp_path, ["tensorboard"]) as logger:
        for step in (1, 2, 3):
            logger.log(step, {"a": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ti')  # as if killed while writing
    with RunLogger(tmp_path, ["tensorboard"], resumed_step=2) as logger:
        logger.log(3, {"a": 30.0})
    assert [(row["step"], row["a"]) for row in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert scalars(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_new_run_in_an_old_folder_starts_anew(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with RunLogger(tmp_path, ["tensorboard"]) as logger:
            logger.log(0, {"a": value})
    assert [row["a"] for row in read_metrics(tmp_path)] == [2.0]
    assert scalars(tmp_path, "a") == [(0, 2.0)]


def test_metrics_that_are_broken_are_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no metrics at"):
        read_metrics(tmp_path / "gone")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 1: not valid JSON"):
        read_metrics(tmp_path)


def test_a_run_that_fails_leaves_its_metrics(tmp_path: Path) -> None:
    def run() -> None:
        with RunLogger(tmp_path, ["tensorboard"]) as logger:
            logger.log(1, {"a": 1.0})
            raise RuntimeError("rank 3 died")

    with pytest.raises(RuntimeError, match="rank 3 died"):
        run()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    assert scalars(tmp_path, "a") == [(1, 1.0)]


def after(seconds: list[float]) -> Pace:
    """The pace of a run whose steps ended these numbers of seconds after the step before."""
    pace, now = Pace(), 1000.0
    for number, taken in enumerate(seconds):
        now += taken
        pace.ended(now, taken if number == 0 else None)
    return pace


def test_the_median_of_recent_steps_times_those_that_are_left() -> None:
    assert after([2.0]).left(10) == "0:20"
    assert after([2.0, 4.0, 90.0]).left(10) == "0:40"  # one step waited for a checkpoint
    assert after([100.0] * 50 + [1.0] * RECENT).left(61) == "1:01"
    assert after([3600.0]).left(26) == "26:00:00" and after([0.5]).left(7325) == "1:01:02"


def test_nothing_is_said_before_the_first_and_after_the_last_step() -> None:
    assert Pace().left(10) is None
    pace = Pace()
    pace.ended(5.0, None)  # the step's duration is not known, and no earlier step ended
    assert pace.left(10) is None
    assert after([2.0]).left(0) is None


RUN = TrackedRun("project", "experiment", {"data": {"train_batch_size": 8}, "trainer": {"logger": ["file"]}})
METRICS = {"critic/score/mean": 0.5, "val/pass@4": 0.75}
ROWS = [
    {"prompt": "1+1", "response": "2", "score": 1.0},
    {"prompt": "1+2", "response": "4|\n5", "score": 0.0},
]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The stand-ins, importable by the real names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "trackers"))
    for name in TRACKERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    yield {name: importlib.import_module(name) for name in TRACKERS}
    for name in TRACKERS:
        sys.modules.pop(name, None)


def run(folder: Path, fails: bool = False) -> None:
    with RunLogger(folder, ["file", *TRACKERS], tracked=RUN) as logger:
        logger.log_samples(3, "val/generations", ROWS)
        logger.log(3, METRICS)
        if fails:
            raise RuntimeError("rank 3 died")


def test_wandb(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    run(tmp_path)
    init, samples, log, finish = packages["wandb"].calls
    assert init == (
        "init",
        {"project": "project", "name": "experiment", "dir": str(tmp_path), "config": RUN.config},
    )
    table = samples[1]["data"]["val/generations"]
    assert samples[1]["step"] == 3
    assert table.columns == ["prompt", "response", "score"]
    assert table.data == [["1+1", "2", 1.0], ["1+2", "4|\n5", 0.0]]
    assert log == ("log", {"data": METRICS, "step": 3})
    assert finish == ("finish", {"exit_code": 0})


def test_late_results_belong_to_their_step(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    """This holds for every logger; wandb, which accepts no earlier step, plots late results over a step metric of their own."""
    out, text = console()
    endpoint = Endpoint("project", "experiment")
    with RunLogger(
        tmp_path, ["console", "tensorboard", *TRACKERS], 4, tracked=RUN, trackers=[endpoint], console=out
    ) as logger:
        for step in (2, 3):
            logger.log(step, {"critic/score/mean": 0.5})
        logger.log_late(
            2, {"val/score/mean": 0.25, "timing_s/eval": 9.0}, {"val/generations": ROWS, "none": []}
        )
        logger.log(4, {"critic/score/mean": 0.75})
        logger.log_late(4, {"val/score/mean": 0.5, "timing_s/eval": 8.0}, {})
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["critic/score/mean"], row.get("val/score/mean")) for row in rows] == [
        (2, 0.5, 0.25), (3, 0.5, None), (4, 0.75, 0.5),
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("late")) for line in lines] == [
        (2, None), (3, None), (2, True), (4, None), (4, True),
    ]  # fmt: skip
    assert [row["time"] for row in rows] == [line["time"] for line in lines if "late" not in line]
    assert scalars(tmp_path, "val/score/mean") == [(2, 0.25), (4, 0.5)]
    assert scalars(tmp_path, "critic/score/mean") == [(2, 0.5), (3, 0.5), (4, 0.75)]
    printed = text.getvalue().splitlines()
    assert "validation after step 2  accuracy 0.250  seconds 9.0" in printed
    assert "step 2: val/generations, one of them:" in printed
    found = packages["wandb"].calls[1:-1]
    assert found[2:5] == [
        ("define_metric", {"name": "val/step", "step_metric": None}),
        ("define_metric", {"name": "val/score/mean", "step_metric": "val/step"}),
        ("define_metric", {"name": "timing_s/eval", "step_metric": "val/step"}),
    ]
    assert [call["step"] for kind, call in found if kind == "log"] == [2, 3, 3, 4, 4]
    late = found[5][1]["data"]
    assert late.pop("val/generations").columns == ["prompt", "response", "score"]
    assert late == {"val/score/mean": 0.25, "timing_s/eval": 9.0, "val/step": 2.0}
    logged = [call for name, call in packages["mlflow"].calls if name == "log_metrics"]
    assert [call["step"] for call in logged] == [2, 3, 2, 4, 4]
    assert endpoint._values["step"] == 4 and endpoint._values["val/score/mean"] == 0.5


def test_mlflow(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    run(tmp_path)
    columns = {"prompt": ["1+1", "1+2"], "response": ["2", "4|\n5"], "score": [1.0, 0.0]}
    assert packages["mlflow"].calls == [
        ("set_experiment", {"experiment_name": "project"}),
        ("start_run", {"run_name": "experiment"}),
        ("log_params", {"params": {"data.train_batch_size": 8, "trainer.logger": ["file"]}}),
        ("log_dict", {"dictionary": columns, "artifact_file": "val/generations/step-000003.json"}),
        ("log_metrics", {"metrics": {"critic/score/mean": 0.5, "val/pass_at_4": 0.75}, "step": 3}),
        ("end_run", {"status": "FINISHED"}),
    ]


def test_swanlab(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    run(tmp_path)
    init, samples, log, finish = packages["swanlab"].calls
    where = {"project": "project", "name": "experiment", "log_dir": str(tmp_path / "swanlog")}
    assert init == ("init", {**where, "config": RUN.config})
    table = samples[1]["data"]["val/generations"]
    assert samples[1]["step"] == 3
    assert table.headers == ["prompt", "response", "score"]
    assert table.rows == [["1+1", "2", 1.0], ["1+2", "4|\n5", 0.0]]
    assert log == ("log", {"data": METRICS, "step": 3})
    assert finish == ("finish", {"state": "success", "error": None})


def test_trackio(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    run(tmp_path)
    init, samples, log, finish = packages["trackio"].calls
    assert init == ("init", {"project": "project", "name": "experiment", "config": RUN.config})
    table = samples[1]["metrics"]["val/generations"]
    assert samples[1]["step"] == 3
    assert table.columns == ["prompt", "response", "score"]
    assert table.data == [["1+1", "2", 1.0], ["1+2", "4|\n5", 0.0]]
    assert log == ("log", {"metrics": METRICS, "step": 3})
    assert finish == ("finish", {})


def test_a_run_that_fails_is_marked_everywhere(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 3 died"):
        run(tmp_path, fails=True)
    endings = {name: package.calls[-1] for name, package in packages.items()}
    assert endings == {
        "wandb": ("finish", {"exit_code": 1}),
        "mlflow": ("end_run", {"status": "FAILED"}),
        "swanlab": ("finish", {"state": "crashed", "error": "RuntimeError: rank 3 died"}),
        "trackio": ("finish", {}),
    }
    told = {"title": "the run failed", "text": "RuntimeError: rank 3 died", "level": "error"}
    assert packages["trackio"].calls[-2] == ("alert", told)


def test_a_tracker_whose_server_is_away_does_not_end_the_run(
    packages: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*arguments: Any, **named: Any) -> None:
        raise ConnectionError("no answer")

    for function in ("log_metrics", "log_dict", "end_run"):
        monkeypatch.setattr(packages["mlflow"], function, away)
    out, text = console()
    with RunLogger(tmp_path, ["mlflow", "wandb"], tracked=RUN, console=out) as logger:
        logger.log_samples(3, "val/generations", ROWS)
        logger.log(3, METRICS)
        logger.log_late(3, {"val/score/mean": 0.5}, {"val/generations": ROWS})
    assert {**METRICS, "val/score/mean": 0.5}.items() <= read_metrics(tmp_path)[0].items()
    warning = "Warning: MlflowTracker: ConnectionError: no answer; metrics.jsonl has all metrics"
    assert [line for line in text.getvalue().splitlines() if line] == [warning] * 4
    assert packages["wandb"].calls[-1] == ("finish", {"exit_code": 0})


def test_a_tracker_that_cannot_begin_leaves_no_open_run(
    packages: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**arguments: Any) -> None:
        raise PermissionError("no key")

    monkeypatch.setattr(packages["swanlab"], "init", refuse)
    with pytest.raises(PermissionError, match="no key"):
        open_trackers(["wandb", "swanlab"], RUN, tmp_path)
    assert packages["wandb"].calls[-1] == ("finish", {"exit_code": 1})


def test_the_configuration_knows_the_same_trackers() -> None:
    assert list(INSTALLED_BY) == list(TRACKERS) == list(LOGGERS[3:])


def test_names() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": None}, "e": [1]}) == {"a.b.c": 1, "a.d": None, "e": [1]}
    assert mlflow_name("val/set one/maj@8 (x)") == "val/set one/maj_at_8 _x_"
