"""Wrong files next to the weights: one line names the file, and no output is left."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo

from examples.tiny_model import make_tiny_model
from megarl.checkpoints.convert import convert
from megarl.checkpoints.dcp import DCPReader
from megarl.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    return make_tiny_model(folder, ["one two"], vocab_size=300, hidden_size=64)


@pytest.fixture
def copied(tmp_path, model) -> Path:
    return Path(shutil.copytree(model, tmp_path / "hf"))


def refused(capsys, *arguments: str) -> str:
    """The one line with which the command refuses the folder."""
    out = Path(arguments[0]).parent / "out"
    assert main(["convert", *arguments[:1], str(out), *arguments[1:]]) == 2
    assert not out.exists() and not [name for name in os.listdir(out.parent) if name.startswith(".")]
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_companion_that_is_no_json_is_not_copied(copied, name, capsys):
    (copied / name).write_text("{'a': 1}")
    assert f"{copied}/{name} is not JSON" in refused(capsys, str(copied))
    (copied / name).write_text("[]")
    assert f"{copied}/{name} should hold a JSON object, found list" in refused(capsys, str(copied))


def test_a_folder_beside_the_tokenizer_is_no_companion(copied):
    (copied / "tokenizer").mkdir()
    convert(str(copied), str(copied.parent / "out"))


def test_a_config_of_a_wrong_type_and_a_cut_file_have_one_line(copied, capsys):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "num_hidden_layers": "3"}))
    assert "config.json: num_hidden_layers must be a whole number" in refused(capsys, str(copied))
    (copied / "config.json").write_text(json.dumps(config))
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is no complete safetensors file" in refused(capsys, str(copied))


def test_the_folder_of_a_step_names_the_checkpoints_in_it(tmp_path, model, capsys):
    run = tmp_path / "run"
    for step in (2, 10):
        for role in ("actor", "critic"):
            convert(str(model), str(run / f"step-{step}" / role))
            released = run / f"step-{step}" / role / "release"
            shutil.copytree(released, released.parent, dirs_exist_ok=True)
    line = refused(capsys, str(run / "step-10"))
    assert line.endswith(f"; it holds checkpoints: {run}/step-10/actor, {run}/step-10/critic")
    assert f"{run}/step-2/actor" in refused(capsys, str(run))
    assert main(["convert", str(run / "step-10" / "actor"), str(tmp_path / "back")]) == 0


def test_the_files_around_a_distributed_checkpoint(tmp_path, model, capsys):
    there = tmp_path / "there"
    convert(str(model), str(there))
    tracker, about = there / "latest_checkpointed_iteration.txt", there / "release" / "metadata.json"
    for latest in ("../there/release", "", "/etc", ".."):
        tracker.write_text(latest)
        assert f"{tracker} should name an iteration or release, found" in refused(capsys, str(there))
    tracker.write_bytes(b"\xff\xfe")
    assert f"{tracker} should name an iteration or release" in refused(capsys, str(there))
    tracker.write_text("release")
    about.write_text("[1]")
    assert f"{about} should hold a JSON object, found list" in refused(capsys, str(there))
    about.write_text("{")
    assert f"{about} is not JSON" in refused(capsys, str(there))


def _metadata(folder: Path):
    """The metadata of a checkpoint, to be changed and written again."""
    with (folder / ".metadata").open("rb") as file:
        return pickle.load(file)


KEY = "decoder.final_layernorm.weight"


def _foreign_file(metadata) -> None:
    index = next(iter(metadata.storage_data))
    info = metadata.storage_data[index]
    metadata.storage_data[index] = _StorageInfo("../" + info.relative_path, info.offset, info.length)


def _negative_offset(metadata) -> None:
    index = next(iter(metadata.storage_data))
    info = metadata.storage_data[index]
    metadata.storage_data[index] = _StorageInfo(info.relative_path, -8, info.length)


def _no_place(metadata) -> None:
    metadata.storage_data.clear()


def _chunk_twice(metadata) -> None:
    entry = metadata.state_dict_metadata[KEY]
    entry.chunks = entry.chunks * 2


def _beyond(metadata) -> None:
    entry = metadata.state_dict_metadata[KEY]
    entry.size = (*entry.size[:-1], entry.size[-1] - 1)


@pytest.mark.parametrize("change", [_foreign_file, _negative_offset, _no_place, _chunk_twice, _beyond])
def test_metadata_that_cannot_be_is_named(tmp_path, model, change, capsys):
    there = tmp_path / "there"
    convert(str(model), str(there))
    folder = there / "release"
    metadata = _metadata(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert f"{folder}/.metadata is no metadata of a distributed checkpoint" in refused(capsys, str(there))


def test_a_pickle_of_something_else_is_no_metadata(tmp_path):
    for content in (b"", b"\x80", pickle.dumps({"a": 1}), pickle.dumps(3), b"cos\nsystem\n(S'true'\ntR."):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match=f"{tmp_path}/.metadata is no metadata"):
            DCPReader(tmp_path)
