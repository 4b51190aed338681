"""An evaluation in a folder that another run writes to."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from megarl.checkpoints.writer_lock import WriterLock
from megarl.config import EvalConfig, load_config, resolve
from megarl.trainer.loops import evaluate as evaluation

FILES = {"config.yaml": "of the first run", "metrics.jsonl": "", "scores.json": "{}"}


class Started(Exception):
    pass


@pytest.mark.parametrize("held", ["", "checkpoints"])
def test_a_folder_that_is_written_to_is_refused_and_left_as_it_is(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another evaluation, such as of a second model into the default folder, or by a training run."""

    def start(*arguments: object) -> None:
        raise Started

    monkeypatch.setattr(evaluation, "open_engine_run", start)
    monkeypatch.setattr(evaluation, "make_scorer", lambda config: nullcontext())
    for name in ("read_model_config", "check_models", "check_hf_weights", "load_tokenizer"):
        monkeypatch.setattr(evaluation, name, lambda *arguments: None)
    monkeypatch.setattr(evaluation, "load_problems", lambda *arguments: [])
    folder = tmp_path / "run"
    (folder / held).mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    overrides = [f"model.path={tmp_path}", f"trainer.default_local_dir={folder}"]
    keys = ["data.val_files=f", "data.max_prompt_length=8", "data.max_response_length=8"]
    config = resolve(load_config(EvalConfig, None, [*overrides, *keys]))
    other = WriterLock(folder / held, print)
    with pytest.raises(ValueError, match=r"another run writes to .*: process "):
        evaluation.evaluate(config, None)
    assert {name: (folder / name).read_text() for name in FILES} == FILES
    assert not (folder / "earlier_runs").exists()
    other.release()
    with pytest.raises(Started):
        evaluation.evaluate(config, None)
    assert sorted(path.name for path in (folder / "earlier_runs/1").iterdir()) == sorted(FILES)
    assert not list(folder.rglob(".writer.*"))  # also after an error
