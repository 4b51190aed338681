import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.trainer.run.logger import DEFAULT_SINKS, RunLogger, read_metrics


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=60, color_system=None), text


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard itself reads."""
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
    with RunLogger(tmp_path, DEFAULT_SINKS, 10, console=out) as logger:
        logger.log(1, metrics)
        # On disk before the run ends.
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
    with pytest.raises(ValueError, match=r"trainer\.logger has comet; megarl has console, tensorboard, file"):
        RunLogger(tmp_path, ["comet"])


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


def test_the_time_left_is_in_the_line_and_beside_the_bar(tmp_path: Path) -> None:
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
    with RunLogger(tmp_path, ["console"], 4, description="ppo", console=out) as logger:
        logger.log(1, {"critic/score/mean": 0.5})
        logger.log(2, {"critic/score/mean": 0.5})
    assert "ppo" in text.getvalue() and "2/4" in text.getvalue()
    assert "step 2/4  reward 0.500" in text.getvalue()


def test_tables_are_printed_beside_the_bar(tmp_path: Path) -> None:
    out, text = console()
    table = Table("quantity")
    table.add_row("prompts a step")
    with RunLogger(tmp_path, ["console"], console=out) as logger:
        logger.print(table)
    assert "prompts a step" in text.getvalue()


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
        file.write('{"step": 4, "ti')  # killed while it wrote
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
