"""Targets of a conversion: the files of a Hugging Face folder or of a Megatron distributed checkpoint, and the values that fill them."""

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from megarl.checkpoints.convert.sources import Source, megatron_checkpoint, stacks_layers
from megarl.checkpoints.dcp import DCPWriter
from megarl.checkpoints.hf.export import HFFolderWriter, in_files, write_files
from megarl.checkpoints.hf.fused import stored_name
from megarl.layout import Box, Copy, Layout, make_plan
from megarl.models import COMPANIONS, ModelConfig, keeps_float32
from megarl.weight_sync.layouts import hf_layout

CHECKPOINT = "release"  # Megatron-LM's name for a checkpoint that begins a training run
CHECKPOINT_VERSION = 3.0  # of Megatron-LM: from 2.0 on the order of rows within linear_qkv is today's


class Item(NamedTuple):
    """A tensor to write: `box` of the target's tensor `local`, all of it but for the leading axes."""

    local: str
    box: Box


class Target(Protocol):
    """A checkpoint that is written.

    Attributes:
        kind: "hf" or "megatron".
        layout: where the weights are to lie in its tensors.
        items: everything that is to be written, in order.
        checkpoint: the folder, within the one that is written, in which the weights lie.
    """

    kind: str
    layout: Layout
    items: tuple[Item, ...]
    checkpoint: str

    def num_leading(self, local: str) -> int:
        """How many leading axes of the tensor number layers and experts."""
        ...

    def together(self, item: Item) -> str:
        """A key that is the same for items that have to be in one file."""
        ...

    def write_file(self, folder: Path, at: int, count: int, tensors: Mapping[Item, torch.Tensor]) -> None:
        """Write file `at` (from 0) of `count`."""
        ...

    def finish(self, folder: Path, companions: Mapping[str, bytes], source: Path) -> None:
        """Write the files that complete the checkpoint. `companions`: config, tokenizer and so on, by path; `source`: their folder."""
        ...


class HFTarget:
    """A Hugging Face folder: `model-00001-of-00003.safetensors` and so on, and an index."""

    kind = "hf"
    checkpoint = "."

    def __init__(self, config: ModelConfig, head: str, mtp: bool) -> None:
        self.config, self.layout = config, hf_layout(config, head, mtp)
        self.items = tuple(Item(piece.local, piece.local_box) for piece in self.layout.pieces(0))
        self._writer: HFFolderWriter | None = None

    def num_leading(self, local: str) -> int:
        return 0

    def together(self, item: Item) -> str:
        return stored_name(self.config, item.local)

    def write_file(self, folder: Path, at: int, count: int, tensors: Mapping[Item, torch.Tensor]) -> None:
        if self._writer is None:
            self._writer = HFFolderWriter(folder, count, self.config)
        self._writer.write_file(at, {item.local: tensor for item, tensor in tensors.items()})

    def finish(self, folder: Path, companions: Mapping[str, bytes], source: Path) -> None:
        assert self._writer is not None
        self._writer.finish(companions, source)


class MegatronTarget:
    """A distributed checkpoint where Megatron-LM's `--load` finds it: in a folder `release`, named by the tracker file.

    Transformer Engine's modules save an extra state each, empty without FP8, and Megatron-LM refuses a checkpoint
    that lacks one: they are written for all modules. A model without Transformer Engine has none, and its
    loads leave them unread. The options of a training run (`args`) are not there: there was no run.
    """

    kind = "megatron"
    checkpoint = CHECKPOINT

    def __init__(self, config: ModelConfig, head: str, mtp: bool) -> None:
        self.stacked = stacks_layers(config)
        self.definition = megatron_checkpoint(config, stacked=self.stacked, head=head, mtp=mtp)
        self.layout = self.definition.layout
        items: dict[Item, None] = {}
        for piece in self.layout.pieces(0):
            shape, leading = self.definition.tensors[piece.local]
            at = piece.local_box.start[:leading]
            box = Box(at + (0,) * (len(shape) - leading), (1,) * leading + shape[leading:])
            items[Item(piece.local, box)] = None
        self.items = tuple(items)
        self._writer: DCPWriter | None = None

    def num_leading(self, local: str) -> int:
        return self.definition.tensors[local].num_leading

    def together(self, item: Item) -> str:
        return str(item)

    def write_file(self, folder: Path, at: int, count: int, tensors: Mapping[Item, torch.Tensor]) -> None:
        if self._writer is None:
            (folder / CHECKPOINT).mkdir()
            self._writer = DCPWriter(folder / CHECKPOINT)
        chunks = [
            (item.local, self.definition.tensors[item.local].shape, item.box, tensor)
            for item, tensor in tensors.items()
        ]
        self._writer.write_file(chunks, self._objects() if at == 0 else {})

    @property
    def _common(self) -> dict[str, Any]:
        """State that belongs to no module. `content_metadata` tells a loader which keys to ask for."""
        metadata = {"singleton_local_shards": False, "non_homogeneous_layers": not self.stacked}
        return {"content_metadata": metadata, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}

    def _objects(self) -> dict[str, list[Any]]:
        """Contents other than weights, each in a list of one as Megatron has it."""
        empty = [torch.empty(0, dtype=torch.uint8)]
        return {"common_state/shard_0_1": [self._common]} | dict.fromkeys(self.definition.extra_states, empty)

    def finish(self, folder: Path, companions: Mapping[str, bytes], source: Path) -> None:
        assert self._writer is not None
        self._writer.finish()
        # where megatron-core looks for the common state before 0.19
        torch.save(self._common, folder / CHECKPOINT / "common.pt")
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (folder / CHECKPOINT / "metadata.json").write_text(json.dumps(config))
        write_files(folder / CHECKPOINT / COMPANIONS, companions)
        (folder / "latest_checkpointed_iteration.txt").write_text(CHECKPOINT)


TARGETS: dict[str, type[HFTarget] | type[MegatronTarget]] = {"hf": HFTarget, "megatron": MegatronTarget}


READ_ELEMENTS = 16 << 20  # no more of a Hugging Face tensor is read at a time


class Moves:
    """The copies of a conversion by the tensor that they fill, and that tensor's type."""

    def __init__(self, source: Source, target: Target, dtype: torch.dtype | None) -> None:
        self.source, self.target = source, target
        # An element counts as one.
        plan = make_plan(source.layout, target.layout, max_copy_bytes=READ_ELEMENTS)
        self._copies: dict[Item, list[Copy]] = {item: [] for item in target.items}
        places = {
            (item.local, item.box.start[: target.num_leading(item.local)]): item for item in target.items
        }
        for copy in plan.copies_to(0):
            at = copy.target_box.start[: target.num_leading(copy.target_local)]
            self._copies[places[copy.target_local, at]].append(copy)
        self._places = places
        self.dtypes = self._find_dtypes(dtype)

    def _find_dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """By target tensor: `dtype` (float32 for tensors that are never anything else), or the dtype of its sources."""
        found: dict[str, set[torch.dtype]] = defaultdict(set)
        for item, copies in self._copies.items():
            for copy in copies:
                chosen = torch.float32 if dtype and keeps_float32(copy.tensor) else dtype
                found[item.local].add(chosen or self.source.dtype(copy.source_local))
        mixed = [
            f"{local} ({', '.join(sorted(map(str, types)))})"
            for local, types in found.items()
            if len(types) > 1
        ]
        if mixed:
            raise ValueError(
                f"checkpoint {self.source.path} has several types where one tensor is made of them; "
                f"choose one with --dtype: {'; '.join(mixed)}"
            )
        return {local: next(iter(types)) for local, types in found.items()}

    def nbytes(self, item: Item) -> int:
        return item.box.numel * self.dtypes[item.local].itemsize

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.nbytes(item) for item in self.target.items)

    @cached_property
    def main_dtype(self) -> torch.dtype:
        """The type that most bytes have."""
        totals: dict[torch.dtype, int] = defaultdict(int)
        for item in self.target.items:
            totals[self.dtypes[item.local]] += self.nbytes(item)
        return max(totals, key=totals.__getitem__)

    def files(self, shard_bytes: int) -> list[list[Item]]:
        """The items of each file: in order, up to `shard_bytes` a file."""
        items = self.target.items
        return in_files(items, [*map(self.nbytes, items)], shard_bytes, [*map(self.target.together, items)])

    def assemble(self, items: list[Item]) -> dict[Item, torch.Tensor]:
        """The items' values; a vocabulary's padding is zero."""
        tensors = {}
        for item in items:
            padded = sum(copy.box.numel for copy in self._copies[item]) < item.box.numel
            make = torch.zeros if padded else torch.empty
            tensors[item] = make(item.box.size, dtype=self.dtypes[item.local])
        where = f"checkpoint {self.source.path}"
        for part in self.source.read([copy for item in items for copy in self._copies[item]]):
            local = part.copy.target_local
            item = self._places[local, part.box.start[: self.target.num_leading(local)]]
            place = part.box.inside(item.box, Box.whole(item.box.size))
            narrow_into(tensors[item][place.slices], part.values.reshape(place.size), where, part.copy.tensor)
            del part  # before the source reads the next
        return tensors


def narrow_into(target: torch.Tensor, values: torch.Tensor, where: str, name: str) -> None:
    """Copy values into a tensor, which may be of another type.

    Raises:
        ValueError: a value of the tensor `name`, in `where`, is beyond the largest of that type, and would become infinite.
    """
    target.copy_(values)
    most = torch.finfo(target.dtype).max
    if most < torch.finfo(values.dtype).max and (lost := values.isfinite() & ~target.isfinite()).any():
        raise ValueError(
            f"{where}: {name} has values up to {values[lost].abs().max():g}, "
            f"{str(target.dtype).removeprefix('torch.')} holds none above {most:g}; choose another --dtype"
        )
