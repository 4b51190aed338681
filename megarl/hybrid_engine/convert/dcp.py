"""The files of torch's distributed checkpoint format: chunks read one by one, files written one by one.

megatron-core's `torch_dist` checkpoints have this format. `.metadata`, a pickle of torch's `Metadata`, lists the
global tensors, the chunks that each is stored in, and where these lie: a chunk is a `torch.save` within a `.distcp`
file. Torch's own reader loads a chunk anew for each slice that is wanted of it, and its writer (2.13) keeps all tensors
of a file in memory until it is written; hence these. Seen with torch 2.13.
"""

import pickle
from collections import defaultdict
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
_METADATA_MODULES = {
    "torch",
    "torch.serialization",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
    "pathlib",
    "pathlib._local",
}


class Chunk(NamedTuple):
    """A stored part of a global tensor: which, and `length` bytes from `offset` of a file."""

    box: Box
    file: str
    offset: int
    length: int


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what metadata consists of and nothing else: a pickle can name any function to be called."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron."):
            return type(name, (), {})  # notes that older versions left, for their own use
        found = super().find_class(module, name) if module in _METADATA_MODULES and "." not in name else None
        described = isinstance(found, type) and found.__module__ in _METADATA_MODULES
        if not described and not isinstance(found, torch.dtype) and name != "_get_layout":
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")
        return found


class DCPReader:
    """The global tensors of a checkpoint folder (`tensors`, by key), and the keys of its other objects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = _read_metadata(folder)
        where: Mapping[MetadataIndex, Any] = metadata.storage_data
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: list[str] = []
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                self.objects.append(key)
                continue
            chunks = []
            for chunk in entry.chunks:
                info = where[MetadataIndex(key, chunk.offsets)]
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                chunks.append(Chunk(box, info.relative_path, info.offset, info.length))
            self.tensors[key] = StoredTensor(tuple(entry.size), entry.properties.dtype, tuple(chunks))

    def load(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's values, [*chunk.box.size].

        Raises:
            ValueError: the file is not there, or not all of it.
        """
        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                view = _create_file_view(file, chunk.offset, chunk.length)
                tensor = torch.load(view, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise ValueError(f"checkpoint {self.folder} lacks its file {chunk.file}") from None
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged at byte {chunk.offset}: {error}") from None
        if tuple(tensor.shape) != chunk.box.size:
            raise ValueError(
                f"{path} holds a tensor of shape {tuple(tensor.shape)} at byte {chunk.offset}, "
                f"{_METADATA} says {chunk.box.size}"
            )
        return tensor


def _read_metadata(folder: Path) -> Metadata:
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            return _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise ValueError(f"checkpoint {folder} has no {_METADATA}") from None
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} is no metadata of a distributed checkpoint: {error}") from None


class DCPWriter:
    """Writes a checkpoint into an empty folder, file by file; it is one when `finish` has returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata: dict[str, Any] = {}
        self._chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        self._where: dict[MetadataIndex, _StorageInfo] = {}
        self._num_files = 0

    def write_file(
        self,
        chunks: Iterable[tuple[str, tuple[int, ...], Box, torch.Tensor]],
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the next file.

        Args:
            chunks: key and shape of the global tensor, which part of it, its values ([*box.size]).
            objects: what else to save, by key.
        """
        name = f"__{self._num_files}_0.distcp"  # as if each file were that of a rank
        self._num_files += 1
        with (self.folder / name).open("wb") as file:
            for key, value in (objects or {}).items():
                self._metadata[key] = BytesStorageMetadata()
                self._where[MetadataIndex(key)] = _save(value, file, name)
            for key, shape, box, tensor in chunks:
                assert tuple(tensor.shape) == box.size, (key, tensor.shape, box)
                entry = self._metadata.setdefault(
                    key,
                    TensorStorageMetadata(
                        TensorProperties.create_from_tensor(tensor), torch.Size(shape), self._chunks[key]
                    ),
                )
                assert (entry.properties.dtype, entry.size) == (tensor.dtype, torch.Size(shape)), key
                index = MetadataIndex(key, box.start, len(entry.chunks))
                entry.chunks.append(ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)))
                self._where[index] = _save(tensor, file, name)

    def finish(self) -> None:
        metadata = Metadata(self._metadata, storage_data=self._where, storage_meta=StorageMeta())
        metadata.version = CURRENT_DCP_VERSION
        with (self.folder / _METADATA).open("wb") as file:
            pickle.dump(metadata, file)


def _save(value: Any, file: Any, name: str) -> _StorageInfo:
    start = file.tell()
    try:
        torch.save(value, file)
    except RuntimeError as error:  # torch's own, on closing what it could not write
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return _StorageInfo(name, start, file.tell() - start)
