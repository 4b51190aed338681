"""Damaged and contradictory safetensors files of a model folder, found by their headers."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.models.weight_files import INDEX_FILE, read_header, stored_tensors

TENSORS = {
    "a": torch.ones(3, 4),
    "b": torch.zeros(5, dtype=torch.bfloat16),
    "c": torch.ones(2, 2, dtype=torch.float8_e4m3fn),
    "empty": torch.ones(0, 7),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Tensors a and b in one file, c and d in another, and an index."""
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "one.safetensors")
    save_file({"c": TENSORS["c"], "d": torch.ones(3)}, tmp_path / "two.safetensors")
    write_index(tmp_path, a="one", b="one", c="two", d="two")
    return tmp_path


def write_index(folder: Path, **files: str) -> None:
    named = {name: f"{file}.safetensors" for name, file in files.items()}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": named}))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        stored_tensors(str(folder))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_types_shapes_and_files_are_those_that_safetensors_finds(tmp_path, folder):
    for name, stored in stored_tensors(str(folder)).items():
        with safe_open(stored.file, "pt") as reader:
            part = reader.get_slice(name)
            assert (part.get_dtype(), tuple(part.get_shape())) == stored[1:]
    single = tmp_path / "single"
    single.mkdir()
    save_file(TENSORS, single / "model.safetensors", metadata={"format": "pt"})
    found = stored_tensors(str(single))
    assert {name: stored.shape for name, stored in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }


def test_files_that_are_not_whole_are_named_with_their_sizes(folder):
    file = folder / "two.safetensors"
    content = file.read_bytes()
    for kept in (0, 5, 8, 60, len(content) - 1):
        file.write_bytes(content[:kept])
        refused(folder, rf"two.safetensors is no complete safetensors file: it has {kept} bytes")
    file.write_bytes(content + b"\0")
    refused(folder, rf"it has {len(content) + 1} bytes, header and tensors are {len(content)}")
    length = struct.unpack("<Q", content[:8])[0]
    file.write_bytes(struct.pack("<Q", length - 30) + content[8:])
    refused(folder, r"no complete safetensors file: .*two.safetensors's header is not JSON")
    file.write_bytes(struct.pack("<Q", 1 << 62) + content[8:])
    refused(folder, rf"its header should have {1 << 62}")


def write_header(file: Path, header: object, num_bytes: int) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"c": ["F32", [2], [0, 800]]}, "c has 800 bytes, F32 of shape .2,. has 8"),
        ({"c": ["F32", [200], [0, 800]]}, "it has .* bytes, header and tensors are"),
        ({"c": ["F32", [2], [4, 12]]}, "c begins at byte 4 of the values, the tensor before it ends at 0"),
        ({"c": ["F32", [1], [0, 4]], "d": ["F32", [1], [2, 6]]}, "d begins at byte 2 .* before it ends at 4"),
        ({"c": ["F32", [-2], [0, 8]]}, "its header has c as "),
        ({"c": ["F31", [2], [0, 8]]}, "its header has c as "),
        ({"c": ["F32", [True, 2], [0, 8]]}, "its header has c as "),
        ({"c": ["F32", 2, [0, 8]]}, "its header has c as "),
        ({"c": ["F32", [2], [0]]}, "its header has c as "),
        ({"c": [["F32"], [2], [0, 8]]}, "its header has c as "),
        ({"c": None}, "its header has c as None"),
        ([1], "header should hold a JSON object, found list"),
    ],
)
def test_headers_that_cannot_be_are_refused(folder, entries, message):
    if isinstance(entries, dict):
        entries = {
            name: entry and dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True))
            for name, entry in entries.items()
        }
    write_header(folder / "two.safetensors", entries, 8)
    refused(folder, message)
    with pytest.raises(SafetensorError):
        safe_open(folder / "two.safetensors", "pt")


def test_an_index_and_files_that_contradict_each_other_are_refused(folder):
    write_index(folder, a="one", b="one", c="two", d="two", e="two")
    refused(folder, r"index.json names tensors that are not there: e in two.safetensors")
    write_index(folder, a="one", b="one", c="two", d="one")
    refused(folder, r"names tensors that are not there: d in one.safetensors")
    write_index(folder, a="one", b="one", c="two")
    refused(folder, r"two.safetensors holds d, but .*index.json does not name it")
    write_index(folder, a="one", b="one", c="two", d="three")
    refused(folder, r"names files that are not there: three.safetensors")
    save_file({"a": TENSORS["a"], "c": TENSORS["c"], "d": torch.ones(3)}, folder / "two.safetensors")
    write_index(folder, a="one", b="one", c="two", d="two")
    refused(folder, r"two.safetensors holds a, but .*one.safetensors has it, too")


def test_a_single_file_beside_an_index_of_others_is_refused(folder):
    save_file({"a": TENSORS["a"]}, folder / "model.safetensors")
    refused(folder, r"index.json does not name model.safetensors, which is there, too")


@pytest.mark.parametrize(
    "file",
    ["../other/one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..", "", ".", "a\0", 3],
)
def test_an_index_names_files_of_its_own_folder_only(folder, file):
    (folder.parent / "other").mkdir(exist_ok=True)
    save_file({"a": TENSORS["a"]}, folder.parent / "other" / "one.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    refused(folder, "index.json: a should be in a file of this folder, found")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "index.json is not JSON"),
        ("[]", "index.json should hold a JSON object, found list"),
        ("{}", "index.json: weight_map should say which file holds each tensor, found None"),
        ('{"weight_map": []}', r"weight_map should say .* found \[\]"),
        ('{"weight_map": {}}', r"weight_map should say"),
        ("[" * 100_000, "index.json is not JSON"),
        (b"\xff\xfe", "index.json is not JSON"),
    ],
)
def test_an_index_that_is_none_is_named(folder, text, message):
    (folder / INDEX_FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(folder, message)


def test_a_folder_without_weights(tmp_path):
    refused(tmp_path, r"holds no model.safetensors and no model.safetensors.index.json")


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_accepted_is_what_safetensors_opens(tmp_path, data):
    """Bytes of the header are changed, or a part of the file is cut off: megarl raises no other error, and accepts no file that safetensors
    refuses."""
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    file.write_bytes(content[:cut])
    try:
        found = read_header(file)
    except ValueError as error:
        assert str(file) in str(error)
        return
    with safe_open(file, "pt") as reader:
        assert set(reader.keys()) == found.keys()


def test_it_is_checked_without_torch():
    code = "import megarl.models.weight_files, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
