"""The safetensors files of a model folder: which tensors they hold, and whether they are complete.

Only headers, an index and sizes of files are read, without torch: so a damaged model is found in milliseconds, before any
process is started. The format: eight bytes with the header's length (little-endian), the header (a JSON object: type, shape
and place of each tensor), then the tensors end to end (safetensors 0.8).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.models.fields import short
from megarl.util.files import json_object, read_json_object

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes; safetensors opens no file with a longer one
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
_SHOWN = 6  # names in a message


class StoredTensor(NamedTuple):
    """A tensor's file, type and shape: `dtype` as safetensors has it ("BF16")."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(path: str) -> dict[str, StoredTensor]:
    """The tensors of the model folder `path` by name, in the order of its index or file.

    Raises:
        ValueError: its safetensors files are incomplete, or do not match its index; names the file, and the tensor that is missing,
            twice there, or beyond the file's end.
    """
    folder = Path(path).expanduser()
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.is_file():
        if not single.is_file():
            raise ValueError(f"model folder {path!r} holds no {SINGLE_FILE} and no {INDEX_FILE}")
        return read_header(single)
    named = _weight_map(index)
    files = dict.fromkeys(named.values())
    missing = sorted(file for file in files if not (folder / file).is_file())
    if missing:
        raise ValueError(f"{index} names files that are not there: {some(missing)}")
    if single.is_file() and SINGLE_FILE not in files:
        raise ValueError(
            f"{index} does not name {SINGLE_FILE}, which is there, too; remove the one that is outdated"
        )
    headers = {file: read_header(folder / file) for file in files}
    absent = [f"{name} in {file}" for name, file in named.items() if name not in headers[file]]
    if absent:
        raise ValueError(f"{index} names tensors that are not there: {some(absent)}")
    for file, tensors in headers.items():
        for name in tensors:
            if named.get(name) != file:
                other = (
                    f"{folder / named[name]} has it, too" if name in named else f"{index} does not name it"
                )
                raise ValueError(f"{folder / file} holds {name}, but {other}")
    return {name: headers[file][name] for name, file in named.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as an index says."""
    found = read_json_object(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index}: weight_map should say which file holds each tensor, found {short(found)}")
    for name, file in found.items():
        # A file of another folder would be read, and not be copied, verified or sent with the model.
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file or "\0" in file:
            raise ValueError(f"{index}: {name} should be in a file of this folder, found {short(file)}")
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        ValueError: it is no safetensors file, or not all of one.
        OSError: it cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(
                f"{file} is no complete safetensors file: it has {size} bytes, its header should have {length}"
            )
        try:
            header = json_object(opened.read(length), f"{file}'s header")
        except ValueError as error:
            raise ValueError(f"{file} is no complete safetensors file: {error}") from None
    header.pop("__metadata__", None)
    places, tensors = [], {}
    for name, entry in header.items():
        tensors[name], start, end = _tensor(file, name, entry)
        places.append((start, end, name))
    at = 0
    for start, end, name in sorted(places):
        if start != at:
            raise ValueError(
                f"{file} is no complete safetensors file: {name} begins at byte {start} of the values, the tensor before it "
                f"ends at {at}"
            )
        at = end
    if size != 8 + length + at:
        raise ValueError(
            f"{file} is no complete safetensors file: it has {size} bytes, header and tensors are {8 + length + at}"
        )
    return tensors


def _tensor(file: Path, name: str, entry: Any) -> tuple[StoredTensor, int, int]:
    """A header's entry: the tensor, the first of its bytes, and the one after its last."""
    fields = entry if isinstance(entry, Mapping) else {}
    dtype, shape, place = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not _is_counts(shape)
        or not _is_counts(place)
        or len(place) != 2
        or not isinstance(dtype, str)
        or dtype not in _BITS
    ):
        raise ValueError(f"{file} is no complete safetensors file: its header has {name} as {short(entry)}")
    start, end = place
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (end - start):
        raise ValueError(
            f"{file} is no complete safetensors file: {name} has {end - start} bytes, {dtype} of shape {tuple(shape)} has "
            f"{bits / 8:g}"
        )
    return StoredTensor(file, dtype, tuple(shape)), start, end


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def some(names: list[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
