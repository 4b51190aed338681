"""The loop of fine-tuning: which validation is the best, when a run ends, and when models and checkpoints are written."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from megarl.checkpoints import CheckpointStore, seal_file
from megarl.config import SFTConfig, TuningTrainerConfig, load_config, resolve, save_config
from megarl.data.loader import TableLoader
from megarl.data.sft import trained_tokens
from megarl.trainer.loops.sft import with_idle_rows
from megarl.trainer.loops.supervised import Progress, Ranks, check_tokens, end_notes, run_steps
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.run.checkpoints import find_resumed, open_store
from megarl.trainer.run.run import Run

RECIPE = [
    "data.train_files=a.parquet", "data.max_length=8", "data.train_batch_size=2", "model.path=m", "optim.lr=1",
    "max_token_len_per_gpu=8",
]  # fmt: skip
LOSSES = [3.0, 2.0, 1.95, 1.99, 1.0, 1.2, 1.1]


class QuietRun(Run):
    """A run that keeps the metrics of its steps instead of logging them."""

    def __init__(self, folder: Path, store: CheckpointStore) -> None:
        super().__init__(folder, console=None, store=store)
        self.said: list[str] = []
        self.steps: list[dict[str, float]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def step(self, step: int):
        metrics: dict[str, float] = {}
        yield metrics
        self.steps.append(metrics)
        self.seconds["step"] = 1.0

    def wait(self, refs: list[Any]) -> list[Any]:
        return refs

    @contextmanager
    def status(self, what: str):
        yield


class Group:
    """A worker group of one rank, whose state is its number of updates."""

    def __init__(self, done: list[Any]) -> None:
        self.done = done

    def call(self, method: str, *arguments: Any, background: bool = False) -> list[Any]:
        if method == "begin_save":
            self.saving = Path(arguments[0], "updates")
            return [None]
        if method == "load_checkpoint":
            self.done[:] = [None] * int(Path(arguments[0], "updates").read_text())
            return [None]
        assert method == "finish_save"
        self.saving.write_text(str(len(self.done)))
        return [{self.saving.name: seal_file(self.saving)}]


def play(folder: Path, num_steps: int = 7, **keys):
    """Run steps whose validation losses are `LOSSES`; a written model consists of its number of updates."""
    trainer = TuningTrainerConfig(default_local_dir=str(folder), test_freq=1, **keys)
    config = resolve(load_config(SFTConfig, None, RECIPE))
    done: list[Any] = []

    def update(batch: pa.Table) -> dict[str, float]:
        done.append(batch)
        return {"train/loss": 0.0}

    def export(target: Path) -> str:
        target.mkdir(parents=True, exist_ok=True)
        (target / "model").write_text(str(len(done)))
        return str(target)

    rows = SimpleNamespace(table=pa.table({"row": [0, 1, 2], "uid": ["a", "b", "c"]}))
    loader = TableLoader(rows, 1, shuffle=False, seed=1)
    with open_store(trainer, folder / "checkpoints", print) as store:
        run = QuietRun(folder, store)
        run.resumed = find_resumed(replace(config, trainer=trainer), store, run.say)
        save_config(replace(config, trainer=trainer), folder / "config.yaml")
        ranks = Ranks(SimpleNamespace(trainer=trainer), run, Role(Group(done), None, None), num_steps)
        validate = lambda: {"val/loss": LOSSES[len(done) - 1], "val/accuracy": 0.5}  # noqa: E731
        written = run_steps(ranks, loader, update, validate, export)
    assert written == str(folder / "hf")
    models = {
        str(path.relative_to(folder).parent): path.read_text()
        for path in folder.rglob("model")
        if path.is_file()
    }
    rows_seen = [batch["row"][0].as_py() for batch in done if batch is not None]
    return run, len(done), models, rows_seen


def test_the_last_model_is_written_and_no_other(tmp_path: Path) -> None:
    run, num_steps, models, _ = play(tmp_path)
    assert num_steps == len(run.steps) == 7 and models == {"hf": "7"}


def test_the_best_model_is_that_of_the_lowest_validation_loss(tmp_path: Path) -> None:
    run, _, models, _ = play(tmp_path, save_best=True)
    assert models == {"hf": "7", "best/hf": "5"}
    assert json.loads((tmp_path / "best/best.json").read_text()) == {
        "step": 5, "val/loss": 1.0, "val/accuracy": 0.5
    }  # fmt: skip
    best = [text for text in run.said if "the lowest val/loss so far" in text]
    assert [text.split(":")[0] for text in best] == ["step 1", "step 2", "step 3", "step 5"]


def test_a_run_ends_when_validations_no_longer_improve(tmp_path: Path) -> None:
    """The losses of steps 3 and 4 are lower than step 2's 2.0, but by less than 0.1."""
    run, num_steps, models, _ = play(
        tmp_path, early_stop_patience=2, early_stop_min_delta=0.1, save_best=True
    )
    assert num_steps == 4 and models == {"hf": "4", "best/hf": "3"}
    assert "step 4: the last 2 validations had no val/loss under 2 by" in run.said[-1]
    assert play(tmp_path / "patient", early_stop_patience=3, early_stop_min_delta=0.1)[1] == 7
    assert play(tmp_path / "exact", early_stop_patience=2)[1] == 7


def test_a_run_goes_on_from_its_checkpoint_with_the_next_rows(tmp_path: Path) -> None:
    """The run stops after step 5, and its last checkpoint is of step 4; the count for early stopping and the best loss are restored."""
    keys = {"save_freq": 2, "save_hf": True, "save_best": True}
    _, _, _, rows = play(tmp_path / "whole", **keys)
    play(tmp_path / "cut", num_steps=5, **keys)
    run, num_steps, models, later = play(tmp_path / "cut", **keys)
    assert rows == [0, 1, 2, 0, 1, 2, 0] and later == rows[4:]
    assert (num_steps, len(run.steps)) == (7, 3) and models["hf"] == "7"
    assert (models["checkpoints/step-4/hf"], models["checkpoints/step-6/hf"]) == ("4", "6")
    assert [text for text in run.said if "lowest" in text] == ["step 5: the lowest val/loss so far, 1"]


def test_a_run_that_has_ended_early_does_not_go_on(tmp_path: Path) -> None:
    keys = {"early_stop_patience": 1, "early_stop_min_delta": 0.1, "save_freq": 1}
    assert play(tmp_path, **keys)[1] == 3
    run, num_steps, _, _ = play(tmp_path, **keys)
    assert num_steps == 3 and run.steps == []


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
    assert trained_tokens(shared) == trained_tokens(examples) == 3


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    """Of texts, and of rankings of texts."""
    config, model = resolve(load_config(SFTConfig, None, RECIPE)), SimpleNamespace(vocab_size=300)
    texts = pa.table({"uid": ["a:0", "a:1"], "input_ids": [[1, 299], [2, 300, 3]]})
    rankings = pa.table({"uid": ["b:0", "b:1"], "input_ids": [[[1], [4, 5]], [[2, 3], [301]]]})
    check_tokens(config, model, texts.slice(0, 1), None, rankings.slice(0, 1))
    with pytest.raises(ValueError, match="example a:1 has the token 300, and the model in m has 300 tokens"):
        check_tokens(config, model, texts)
    with pytest.raises(ValueError, match="example b:1 has the token 301"):
        check_tokens(config, model, texts.slice(0, 1), rankings)


def test_a_learnt_end_at_which_engines_would_not_stop_is_told(tmp_path: Path) -> None:
    """As of a base model whose own end token is not its chat template's; texts of data.max_length tokens may have been cut."""
    config = resolve(load_config(SFTConfig, None, RECIPE))
    config = replace(config, model=replace(config.model, path=str(tmp_path)))
    model = SimpleNamespace(hf={"eos_token_id": 2}, fields={"eos_token_id": 2})
    tokenizer, long = SimpleNamespace(convert_ids_to_tokens="<{}>".format), [1] * 8

    def notes(*texts: list[int]) -> list[str]:
        table = pa.table({"input_ids": pa.array(texts, pa.list_(pa.int32()))})
        return end_notes(config, model, table, tokenizer)

    (note,) = notes([2, 7], [9], [2, 7], long)
    assert "end with token 7 ('<7>')" in note and f"of the model in {tmp_path} (2)" in note
    assert notes([7], [1, 2]) == notes(long) == []
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    assert notes([2, 7], long) == []
