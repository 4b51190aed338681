"""The command and the program of docs/api.md, run as they stand there, and the page's statements about them."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from megarl import DataCollector, Trainer
from tests.fixtures.runs import REPOSITORY, steps

PAGE = (REPOSITORY / "docs/api.md").read_text()


@pytest.fixture(scope="module")
def page_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the command and the program of docs/api.md were run as they stand there, and their output."""
    folder = tmp_path_factory.mktemp("page")
    (command,) = re.findall(r"^megarl (.*)$", PAGE, re.MULTILINE)
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (folder / "program.py").write_text(program)
    printed = ""
    for arguments in (["-m", "megarl", *command.split()], ["program.py"]):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        printed += done.stdout
    return folder, printed


def test_the_program_of_the_page(page_run: tuple[Path, str]) -> None:
    """The page's statements: the reward rises, a checkpoint and the policy are written, the metrics are the loop's."""
    folder, printed = page_run
    out = folder / "outputs/api"
    rewards = [
        float(text) for text in re.findall(r"^step \d+: reward (\S+), length \d", printed, re.MULTILINE)
    ]
    assert len(rewards) == 12 and rewards[0] < 0.1 < 0.5 < rewards[-1]
    assert [line["step"] for line in steps(out)] == [*range(1, 13)]
    assert all(line["timing_s/step"] > line["timing_s/generate"] > 0 for line in steps(out))
    assert pq.read_table(out / "rollouts/step-000012.parquet").num_rows == 128
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-6"]
    before = load_file(folder / "outputs/demo/model/model.safetensors")
    after = load_file(out / "policy/model.safetensors")
    assert before.keys() == after.keys() and any((before[name] != after[name]).any() for name in before)


def test_the_page_names_what_there_is(page_run: tuple[Path, str]) -> None:
    names = set(re.findall(r"`trainer\.(\w+)\(?", PAGE)) - {"on_nonfinite", "save_freq", "test_freq", "mode"}
    assert names == {name for name in vars(Trainer) if not name.startswith("_")} | {"step"}
    table = pq.read_table(page_run[0] / "outputs/api/rollouts/step-000001.parquet")
    row = re.search(r"a `pyarrow.Table`: (.*), \.\.\.", PAGE)
    assert row is not None and set(re.findall(r"`(\w+)`", row[1])) <= set(table.column_names)


@pytest.mark.parametrize(("version", "learnt"), [(1, 1), (1, 0), (2, 2)])
def test_data_are_used_once_with_the_weights_that_generated_them(version: int, learnt: int) -> None:
    trainer = SimpleNamespace(collector=SimpleNamespace(version=2, learnt=learnt))
    with pytest.raises(ValueError, match=f"collect_data number {version}, of which there were 2"):
        Trainer.update_policy(trainer, SimpleNamespace(version=version))


def test_data_that_are_only_looked_at_count_as_no_update() -> None:
    """Else steps at which checkpoints are due (trainer.save_freq) might never come."""
    made: list[int] = []
    driver = SimpleNamespace(make=lambda step, work: made.append(step) or {})
    collector = SimpleNamespace(version=0, learnt=0)
    trainer = SimpleNamespace(step=0, collector=collector, _driver=driver, _run=None, _roles=None)
    for version in (1, 3, 5):  # 2 and 4 were not used
        collector.version = version
        Trainer.update_policy(trainer, SimpleNamespace(version=version))
    assert made == [1, 2, 3] and trainer.step == 3


@pytest.mark.parametrize(("version", "learnt", "step"), [(0, 0, 0), (2, 1, 1)])
def test_a_checkpoint_is_saved_after_an_update(version: int, learnt: int, step: int) -> None:
    trainer = SimpleNamespace(step=step, collector=SimpleNamespace(version=version, learnt=learnt))
    with pytest.raises(ValueError, match="is saved after update_policy"):
        Trainer.save_checkpoint(trainer)


def test_a_checkpoint_has_the_calls_of_collect_data() -> None:
    """The noise of rollouts depends on their number: a program that is started again goes on with the next one."""
    loaded: list[dict[str, Any]] = []
    supply = SimpleNamespace(state_dict=lambda: {"prompts": "a"}, load_state_dict=loaded.append)
    state = DataCollector.state_dict(SimpleNamespace(supply=supply, version=5))
    again = SimpleNamespace(supply=supply)
    DataCollector.load_state_dict(again, state)
    assert (again.version, again.learnt, loaded) == (5, 5, [state]) and state["prompts"] == "a"
    DataCollector.load_state_dict(again, {"prompts": "a", "position": None})  # of an earlier version
    assert again.version == 0


def test_a_saved_policy_replaces_a_model_and_nothing_else(tmp_path: Path) -> None:
    """The run's folder, or one with several models, would be gone with all of its files."""
    checkpoint = tmp_path / "run/checkpoints/step-6/run.json"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("{}")
    for folder, words in (
        (tmp_path / "run", r"run is no model's folder \(found: checkpoints\)"),
        (checkpoint, r"\(found: a file\)"),
    ):
        with pytest.raises(ValueError, match=words):
            Trainer.save(SimpleNamespace(), folder)
    assert checkpoint.read_text() == "{}"
    (tmp_path / "empty").mkdir()
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text("{}")
    for folder in ("empty", "policy", "new"):
        with pytest.raises(AttributeError, match="_roles"):  # which the export begins with
            Trainer.save(SimpleNamespace(), tmp_path / folder)
