"""The files of torch's distributed checkpoint format: chunks read one by one, files written one by one.

megatron-core's `torch_dist` checkpoints have this format. `.metadata`, a pickle of torch's `Metadata`, lists the
global tensors, the chunks that each is stored in, and where these lie: a chunk is a `torch.save` within a `.distcp`
file. Torch's own reader loads a chunk anew for each slice that is wanted of it and unpickles whatever a file names, and
its writer (2.13) keeps all tensors of a file in memory until it is written; hence this module. Seen with torch 2.13.
"""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megarl.layout import Box

_METADATA = ".metadata"
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
# By name: these modules have other classes whose construction alone opens, or empties, a file.
_METADATA_NAMES = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}  # fmt: skip


class Chunk(NamedTuple):
    """A stored part of a global tensor: its box, and `length` bytes from `offset` of a file."""

    box: Box
    file: str
    offset: int
    length: int


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class StoredObject(NamedTuple):
    """An object is `length` bytes from `offset` of a file."""

    file: str
    offset: int
    length: int


class Contents(NamedTuple):
    """Contents of a checkpoint's files, by key; `merged` joins the contents of several files."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of metadata and nothing else: a pickle can name any function to be called."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron."):
            return type(name, (), {})  # notes that older versions left, for their own use
        if name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(found, torch.dtype):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")
        return found


class DCPReader:
    """The global tensors of a checkpoint folder (`tensors`, by key), and its other objects (`objects`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors, self.objects = _read_metadata(folder / _METADATA)

    def load(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's values, [*chunk.box.size].

        Raises:
            ValueError: the file is not there, or not all of it.
        """
        tensor = self._load(chunk.file, chunk.offset, chunk.length)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.box.size:
            found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(
                f"{self.folder / chunk.file} holds a tensor of shape {found} at byte {chunk.offset}, "
                f"{_METADATA} says {chunk.box.size}"
            )
        return tensor

    def load_object(self, key: str) -> Any:
        """An object of `objects`, which consists of tensors and Python's plain types.

        Raises:
            ValueError: as `load`.
        """
        return self._load(*self.objects[key])

    def _load(self, file: str, offset: int, length: int) -> Any:
        path = self.folder / file
        try:
            with path.open("rb") as opened:
                view = _create_file_view(opened, offset, length)
                return torch.load(view, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise ValueError(f"checkpoint {self.folder} lacks its file {file}") from None
        except OSError:
            raise
        except Exception as error:  # loading bytes that are no tensor can raise any
            reason = str(error).splitlines() or [repr(error)]
            raise ValueError(f"{path} is damaged at byte {offset}: {reason[0]}") from None


def _read_metadata(path: Path) -> Contents:
    """The contents that a metadata file lists. ValueError: names the file, which is missing or damaged, or its impossible content."""
    try:
        with path.open("rb") as file:
            return _contents(_MetadataUnpickler(file).load())
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path.parent} has no {_METADATA}") from None
    except OSError:
        raise
    except Exception as error:  # unpickling bytes that are no pickle, or another one, can raise any
        raise ValueError(f"{path} is no metadata of a distributed checkpoint: {error!r}") from None


def _contents(metadata: Metadata) -> Contents:
    where: Mapping[MetadataIndex, Any] = metadata.storage_data
    contents = Contents({}, {})
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            contents.objects[key] = StoredObject(*_place(where[MetadataIndex(key)]))
            continue
        chunks = []
        for chunk in entry.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            chunks.append(Chunk(box, *_place(where[MetadataIndex(key, chunk.offsets)])))
        stored = StoredTensor(tuple(entry.size), entry.properties.dtype, tuple(chunks))
        _check_tensor(key, stored)
        contents.tensors[key] = stored
    return contents


def _place(info: _StorageInfo) -> tuple[str, int, int]:
    """File, offset and length of a stored item; the file is one of the checkpoint's own folder."""
    file, numbers = info.relative_path, (info.offset, info.length)
    if not isinstance(file, str) or file == ".." or Path(file).name != file or "\0" in file:
        raise ValueError(f"{file!r} is no file of the checkpoint's folder")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{file} is said to hold {numbers[1]!r} bytes from {numbers[0]!r} on")
    return file, *numbers


def _check_tensor(key: str, stored: StoredTensor) -> None:
    """Refuse (ValueError) a key, shape or type that is none, a chunk that lies beyond the tensor, and one that is there twice."""
    starts = [chunk.box.start for chunk in stored.chunks if chunk.box.numel]
    inside = (
        isinstance(key, str) and isinstance(stored.dtype, torch.dtype) and len(set(starts)) == len(starts)
    )
    for box in [Box.whole(stored.shape), *(chunk.box for chunk in stored.chunks)]:
        fits = len(box.start) == len(box.size) == len(stored.shape)
        inside &= fits and all(
            type(start) is type(size) is int and 0 <= start <= start + size <= extent
            for start, size, extent in zip(box.start, box.size, stored.shape, strict=True)
        )
    if not inside:
        raise ValueError(
            f"{key} of shape {stored.shape} and type {stored.dtype} has a chunk beyond it or twice, or is no tensor"
        )


class DCPWriter:
    """Writes a checkpoint into an empty folder, file by file; it is complete when `finish` has returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: list[Contents] = []

    def write_file(
        self,
        chunks: Iterable[tuple[str, tuple[int, ...], Box, torch.Tensor]],
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the next file, as if it were the next rank's; arguments as of the function `write_file`."""
        self._written.append(write_file(self.folder, len(self._written), chunks, objects))

    def finish(self) -> None:
        write_metadata(self.folder, merged(self._written))


def write_file(
    folder: Path,
    rank: int,
    chunks: Iterable[tuple[str, tuple[int, ...], Box, torch.Tensor]],
    objects: Mapping[str, Any] | None = None,
) -> Contents:
    """Write a rank's file, `file_name(rank)`. A checkpoint also needs `write_metadata`.

    Args:
        chunks: key and shape of the global tensor, which part of it, its values ([*box.size]).
        objects: further objects to save, by key.

    Raises:
        OSError: the disk is full or not writable.
    """
    name = file_name(rank)
    places: dict[str, StoredObject] = {}
    written: list[tuple[str, StoredTensor]] = []
    with (folder / name).open("wb") as file:
        for key, value in (objects or {}).items():
            places[key] = StoredObject(name, *_save(value, file))
        for key, shape, box, tensor in chunks:
            assert tuple(tensor.shape) == box.size, (key, tensor.shape, box)
            chunk = Chunk(box, name, *_save(tensor, file))
            written.append((key, StoredTensor(tuple(shape), tensor.dtype, (chunk,))))
    return Contents(_by_key(written), places)


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"__{rank}_0.distcp"


def merged(parts: Iterable[Contents]) -> Contents:
    """The contents of several files together."""
    objects: dict[str, StoredObject] = {}
    tensors: list[tuple[str, StoredTensor]] = []
    for part in parts:
        objects |= part.objects
        tensors += part.tensors.items()
    return Contents(_by_key(tensors), objects)


def write_metadata(folder: Path, contents: Contents) -> Path:
    """Write the file that makes a checkpoint of the others, and return its path.

    Raises:
        OSError: the disk is full or not writable.
    """
    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in contents.objects}
    where = {MetadataIndex(key): _StorageInfo(*place) for key, place in contents.objects.items()}
    for key, tensor in contents.tensors.items():
        chunks = []
        for index, (box, *place) in enumerate(tensor.chunks):
            chunks.append(ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)))
            where[MetadataIndex(key, box.start, index)] = _StorageInfo(*place)
        properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=tensor.dtype))
        entries[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    metadata = Metadata(entries, storage_data=where, storage_meta=StorageMeta())
    metadata.version = CURRENT_DCP_VERSION
    path = folder / _METADATA
    with path.open("wb") as file:
        pickle.dump(metadata, file)
    return path


def _by_key(tensors: list[tuple[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Tensors of the same key as one, with the chunks of all."""
    chunks: dict[str, list[Chunk]] = {}
    facts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for key, tensor in tensors:
        chunks.setdefault(key, []).extend(tensor.chunks)
        shape, dtype = facts.setdefault(key, tensor[:2])
        assert (shape, dtype) == tensor[:2], (key, shape, dtype, tensor)
    return {key: StoredTensor(*facts[key], tuple(found)) for key, found in chunks.items()}


def _save(value: Any, file: Any) -> tuple[int, int]:
    """Append a value to a file. Returns: its offset and length."""
    start = file.tell()
    try:
        torch.save(value, file)
    except RuntimeError as error:  # torch's own, on closing a file that it could not write
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return start, file.tell() - start
