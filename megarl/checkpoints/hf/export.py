"""Megatron shards to a Hugging Face checkpoint, shard file by shard file, complete or not at all.

A Hugging Face folder consists of the weights' files and their index, the config, the tokenizer and the generation config.
"""

import json
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megarl.checkpoints.hf.fused import as_stored, find_vision_tensors, read_vision_tensors, stored_name
from megarl.checkpoints.hf.load import HFReader
from megarl.layout import Box, Copy, Layout, Plan, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, keeps_float32, logical_tensors
from megarl.models.shards import Shapes
from megarl.util.files import json_object, whole_folder
from megarl.weight_sync.layouts import hf_layout, megatron_layout
from megarl.weight_sync.packets import crc32

Item = TypeVar("Item")
# files of a tokenizer. Transformers keeps further chat templates in a folder.
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken",
              "chat_template*", "additional_chat_templates/*.jinja", "added_tokens.json", "*.model", "*.py")  # fmt: skip
# files of a model folder other than its weights and its tokenizer: config.json is written anew.
_COMPANIONS = ("generation_config.json", "*preprocessor_config.json", "processor_config.json", "*.py")
# of a reward model's folder: by what its outputs are shifted and divided. It was measured on these very weights.
NORMALIZATION_FILE = "reward_normalization.json"


def read_companions(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    mtp: bool = False,
    fields: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> dict[str, bytes]:
    """The files other than weights of a model's Hugging Face folder, for a copy of the model: path in the folder -> content.

    Args:
        dtype: of the copy's weights, which its config says; its `quantization_config` is left out.
        mtp: whether the copy has the model's multi-token prediction layers; otherwise its config says that there are none.
        fields: values of its config in place of the model's.
        tokenizer: the folder of the copy's tokenizer; None: the model's own.

    Raises:
        ValueError: one of these files should hold a JSON object, and does not; names it.
        OSError: one cannot be read.
    """
    hf = _without_types(config.hf, dtype)
    own = _without_types(config.fields, dtype) if config.is_nested else hf
    if config.num_mtp_layers and not mtp:
        own[config.mtp_field] = 0
    own |= fields or {}
    if config.is_nested:
        hf["text_config"] = own
    sources = {
        file.relative_to(place).as_posix(): file
        for place, patterns in ((folder, _COMPANIONS), (tokenizer or folder, _TOKENIZER))
        for pattern in patterns
        for file in place.glob(pattern)
        if file.is_file()
    }
    files = {name: file.read_bytes() for name, file in sources.items()}
    for name, content in files.items():
        if name.endswith(".json"):
            json_object(content, str(sources[name]))
    return {**files, "config.json": (json.dumps(hf, indent=2) + "\n").encode()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, by their paths in it.

    Raises:
        OSError: the disk is full or not writable.
    """
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def one_label_fields(model: ModelConfig, pad_token_id: int | None) -> dict[str, Any]:
    """The fields of config.json that turn a language model into a sequence classifier with one label.

    Args:
        pad_token_id: transformers scores a text at its last token that is not this one; None: it scores one text at a time.
    """
    architecture = model.architecture.replace("Qwen3_5For", "Qwen3_5TextFor")
    return {
        "architectures": [architecture.replace("ForCausalLM", "ForSequenceClassification")],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad_token_id,
    }


def _without_types(fields: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    left = {key: value for key, value in fields.items() if key not in ("torch_dtype", "quantization_config")}
    return {**left, "dtype": str(dtype).removeprefix("torch.")}


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the disk is full or not writable.
    """
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors says that the disk is full: "... (os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error), str(file)) from error


class HFFolderWriter:
    """Writes the weights into `folder` as `num_files` safetensors files, one more for a vision tower, and an index where there are several.

    Tensors that the family's checkpoints have in one (`megarl.checkpoints.hf.fused`) must be given for one file.
    """

    def __init__(self, folder: Path, num_files: int, config: ModelConfig) -> None:
        self.folder, self.config = folder, config
        self.num_files = num_files + config.is_nested  # a last one for the vision tower
        self._weight_map: dict[str, str] = {}
        self._bytes = 0

    def write_file(self, at: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write file `at`, from 0.

        Raises:
            OSError: the disk is full or not writable.
        """
        self._save(at, as_stored(self.config, tensors))

    def _save(self, at: int, tensors: Mapping[str, torch.Tensor]) -> None:
        name = "model.safetensors"
        if self.num_files > 1:
            name = f"model-{at + 1:05d}-of-{self.num_files:05d}.safetensors"
        save_tensors(tensors, self.folder / name)
        self._weight_map |= dict.fromkeys(tensors, name)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self, companions: Mapping[str, bytes], source: Path) -> None:
        """Write the other files, and the vision tower of the model's folder `source` as it is, where config.json has one.

        Raises:
            ValueError: that folder has none.
            OSError: the disk is full or not writable.
        """
        if self.config.is_nested:
            self._save(self.num_files - 1, read_vision_tensors(source))
        if self.num_files > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": self._weight_map}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n")
        write_files(self.folder, companions)


# Bundles: the bytes of a list of copies in host memory, laid end to end, each copy with its checksum.


@dataclass(frozen=True)
class Bundle:
    """`data`: uint8, the copies' elements in order, each box row-major; `checksums`: int64, the CRC32 of each copy."""

    data: np.ndarray
    checksums: np.ndarray


def unpack(bundle: Bundle, copies: Sequence[Copy], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a bundle's slices, each checked first, into their targets, which have the types that were packed.

    Raises:
        ValueError: a slice's bytes differ from the packed ones; names the tensor and the source rank.
    """
    at = 0
    for copy, expected in zip(copies, bundle.checksums, strict=True):
        target = tensors[copy.target_local][copy.target_box.slices]
        part = torch.from_numpy(np.array(bundle.data[at : at + target.nbytes]))
        if crc32(part) != expected:
            raise ValueError(f"{copy.tensor} from rank {copy.source_rank} arrived damaged: checksum differs")
        target.copy_(part.view(target.dtype).view(target.shape))
        at += part.nbytes


class Export(ABC):
    """Which rank sends which slices into the tensors of a folder's weight files; equal wherever it is computed.

    Attributes:
        plan: the copies from the ranks into the files' tensors.
        shards: the tensors (name -> shape) of each file.
    """

    plan: Plan
    shards: list[Shapes]

    @abstractmethod
    def dtype_of(self, tensor: str) -> torch.dtype:
        """The type that a tensor is written as."""

    @cached_property
    def untrained(self) -> set[str]:
        """The tensors that come from the source model."""
        return set().union(*self.shards) - {copy.target_local for copy in self.plan.copies}

    @cached_property
    def _copies(self) -> dict[tuple[int, int], list[Copy]]:
        """The copies by shard and rank."""
        shard_of = {name: index for index, shard in enumerate(self.shards) for name in shard}
        copies: dict[tuple[int, int], list[Copy]] = {}
        for copy in self.plan.copies:
            copies.setdefault((shard_of[copy.target_local], copy.source_rank), []).append(copy)
        return copies

    def copies(self, shard: int, rank: int) -> list[Copy]:
        return self._copies.get((shard, rank), [])

    def pack(self, shard: int, rank: int, parameters: Mapping[str, torch.Tensor]) -> Bundle:
        """The slices of a shard file that trainer rank `rank` holds and should send, each converted to the type that its tensor is
        written as."""
        copies = self.copies(shard, rank)
        dtypes = [self.dtype_of(copy.tensor) for copy in copies]
        sizes = [copy.box.numel * dtype.itemsize for copy, dtype in zip(copies, dtypes, strict=True)]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        checksums = np.empty(len(copies), dtype=np.int64)
        for index, (copy, dtype, part) in enumerate(zip(copies, dtypes, data.split(sizes), strict=True)):
            source = parameters[copy.source_local][copy.source_box.slices].to(dtype)
            # As bytes: four-byte elements may begin anywhere here.
            part.copy_(source.flatten().view(torch.uint8))
            checksums[index] = crc32(part)
        return Bundle(data.numpy(), checksums)


@dataclass(frozen=True)
class ExportPlan(Export):
    """Which rank sends which slices of a trained model into Hugging Face tensors; equal wherever it is computed.

    head: "lm", or "value" of a reward model, which is written as `score.weight` in place of the output layer.
    mtp: whether the copy has multi-token prediction layers; tensors of the model that they repeat are the trained ones.
    mtp_trained: whether these layers are trained; otherwise they are taken over from the source model.
    """

    config: ModelConfig
    parallel: ParallelLayout
    dtype: torch.dtype
    shard_bytes: int = 4 << 30
    mtp: bool = False
    mtp_trained: bool = False
    head: str = "lm"

    @cached_property
    def plan(self) -> Plan:
        whole = hf_layout(self.config, self.head, self.mtp)
        trained = logical_tensors(self.config, self.head, self.mtp_trained)
        pieces = [piece for piece in whole.pieces(0) if piece.tensor in trained]
        target = Layout.by_rank(whole.name, 1, lambda rank: pieces)
        source = megatron_layout(self.config, self.parallel, self.head, mtp=self.mtp_trained)
        return make_plan(source, target)

    @cached_property
    def shards(self) -> list[Shapes]:
        """In the model's order, up to `shard_bytes` a file."""
        shapes = logical_tensors(self.config, self.head, self.mtp)
        sizes = [torch.Size(shape).numel() * self.dtype_of(name).itemsize for name, shape in shapes.items()]
        keys = [stored_name(self.config, name) for name in shapes]
        return [dict(file) for file in in_files(list(shapes.items()), sizes, self.shard_bytes, keys)]

    def dtype_of(self, tensor: str) -> torch.dtype:
        return torch.float32 if keeps_float32(tensor) else self.dtype


def in_files(
    items: Sequence[Item], sizes: Sequence[int], limit: int, keys: Sequence[str]
) -> list[list[Item]]:
    """The items of each file, up to `limit` bytes together; items of one key are in one file, alone if they are larger."""
    groups: dict[str, list[Item]] = defaultdict(list)
    totals: dict[str, int] = defaultdict(int)
    for item, size, key in zip(items, sizes, keys, strict=True):
        groups[key].append(item)
        totals[key] += size
    files: list[list[Item]] = [[]]
    filled = 0
    for key, group in groups.items():
        size = totals[key]
        if files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1] += group
        filled += size
    return files


def assemble(
    export: Export, shard: int, bundles: Sequence[Bundle], source: HFReader | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a shard file from the bundles of all trainer ranks, every slice's checksum verified.

    source: the model that untrained tensors are read from, if there are any.
    """
    tensors = {
        name: torch.empty(shape, dtype=export.dtype_of(name)) for name, shape in export.shards[shard].items()
    }
    for rank, bundle in enumerate(bundles):
        unpack(bundle, export.copies(shard, rank), tensors)
    for name in export.untrained & tensors.keys():
        assert source is not None, name
        tensors[name].copy_(source.read(name, Box.whole(tensors[name].shape)))
    return tensors


def write_hf_checkpoint(
    path: str,
    source_model: str,
    export: ExportPlan,
    collect: Callable[[int], Sequence[Bundle]],
    fields: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    tokenizer: str | None = None,
) -> None:
    """Write the model into folder `path`; it appears only when it is complete.

    Args:
        source_model: the Hugging Face folder that config, generation config and MTP layers come from.
        collect: shard number -> the bundles of all trainer ranks for it.
        fields: of config.json, in place of the source model's.
        files: name -> content of the folder's other files.
        tokenizer: the folder that the tokenizer comes from; None: `source_model`.

    Raises:
        ValueError: a slice arrived damaged; the model has a vision tower, and the source model's folder has no weights of one.
        OSError: the disk is full or not writable; `path` is then as it was before.
    """
    folder_of_source = Path(source_model).expanduser()
    of_tokenizer = None if tokenizer is None else Path(tokenizer).expanduser()
    companions = read_companions(
        folder_of_source, export.config, export.dtype, export.mtp, fields, of_tokenizer
    )
    if export.config.is_nested:
        find_vision_tensors(folder_of_source)
    with (
        whole_folder(path) as folder,
        HFReader(source_model) if export.untrained else nullcontext() as source,
    ):
        writer = HFFolderWriter(folder, len(export.shards), export.config)
        for shard in range(len(export.shards)):
            writer.write_file(shard, assemble(export, shard, collect(shard), source))
        writer.finish({**companions, **(files or {})}, folder_of_source)
