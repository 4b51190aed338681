"""The loop of fine-tuning: which validation is the best, when a run ends, what is written when."""

import json
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from megarl.config import TuningTrainerConfig
from megarl.trainer.run import Run
from megarl.trainer.sft import learnt_tokens, with_idle_rows
from megarl.trainer.tuning import Progress, Stages, run_steps

LOSSES = [3.0, 2.0, 1.95, 1.99, 1.0, 1.2, 1.1]


class QuietRun(Run):
    """A run whose steps are kept instead of logged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, console=None)
        self.said: list[str] = []
        self.steps: list[dict[str, float]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def step(self, step: int):
        metrics: dict[str, float] = {}
        yield metrics
        self.steps.append(metrics)


def play(folder: Path, num_steps: int = 7, **keys):
    """Run steps whose validation losses are `LOSSES`; the model that is written is the number of its step."""
    run, done = QuietRun(folder), []

    def update(batch: pa.Table) -> dict[str, float]:
        done.append(batch)
        return {"train/loss": 0.0}

    def export(target: Path) -> str:
        target.mkdir(parents=True, exist_ok=True)
        (target / "model").write_text(str(len(done)))
        return str(target)

    stages = Stages(update, lambda: {"val/loss": LOSSES[len(done) - 1], "val/accuracy": 0.5}, export)
    loader = [pa.table({"row": [number]}) for number in range(3)]
    written = run_steps(TuningTrainerConfig(test_freq=1, **keys), run, loader, num_steps, stages)
    assert written == str(folder / "hf")
    models = {str(path.relative_to(folder).parent): path.read_text() for path in folder.rglob("model")}
    return run, len(done), models


def test_the_last_model_is_written_and_no_other(tmp_path: Path) -> None:
    run, num_steps, models = play(tmp_path)
    assert num_steps == len(run.steps) == 7 and models == {"hf": "7"}


def test_the_best_model_is_that_of_the_lowest_validation_loss(tmp_path: Path) -> None:
    run, _, models = play(tmp_path, save_best=True)
    assert models == {"hf": "7", "best/hf": "5"}
    assert json.loads((tmp_path / "best/best.json").read_text()) == {
        "step": 5, "val/loss": 1.0, "val/accuracy": 0.5
    }  # fmt: skip
    best = [text for text in run.said if "the lowest val/loss so far" in text]
    assert [text.split(":")[0] for text in best] == ["step 1", "step 2", "step 3", "step 5"]


def test_a_run_ends_when_validations_no_longer_improve(tmp_path: Path) -> None:
    """Steps 3 and 4 are lower than step 2's 2.0, but not by 0.1."""
    run, num_steps, models = play(tmp_path, early_stop_patience=2, early_stop_min_delta=0.1, save_best=True)
    assert num_steps == 4 and models == {"hf": "4", "best/hf": "3"}
    assert "step 4: the last 2 validations had no val/loss under 2 by" in run.said[-1]
    assert play(tmp_path / "patient", early_stop_patience=3, early_stop_min_delta=0.1)[1] == 7
    assert play(tmp_path / "exact", early_stop_patience=2)[1] == 7


def test_models_are_written_every_so_many_steps(tmp_path: Path) -> None:
    _, _, models = play(tmp_path, save_freq=3)
    assert models == {"hf": "7", "checkpoints/step-3/hf": "3", "checkpoints/step-6/hf": "6"}


def test_a_loss_that_is_no_number_is_no_improvement() -> None:
    progress = Progress(patience=1, min_delta=0.0)
    assert progress.observe(1.0) and not progress.stop
    assert not progress.observe(float("nan")) and progress.stop and progress.best == 1.0


@pytest.mark.parametrize("num_rows", [2, 5])
def test_idle_rows_teach_nothing(num_rows: int) -> None:
    examples = pa.table({"input_ids": [[1, 2, 3], [4, 5]], "loss_mask": [[False, True, True], [True, True]]})
    shared = with_idle_rows(examples, num_rows)
    assert shared.num_rows == num_rows and shared.slice(0, 2).equals(examples)
    assert shared["input_ids"].to_pylist()[2:] == [[4, 5]] * (num_rows - 2)
    assert learnt_tokens(shared) == learnt_tokens(examples) == 3
