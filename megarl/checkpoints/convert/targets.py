"""What a conversion writes: the files of a Hugging Face folder, or of a Megatron distributed checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from megarl.checkpoints.convert.megatron_layout import megatron_checkpoint, stacks_layers
from megarl.checkpoints.dcp import DCPWriter
from megarl.checkpoints.hf.folder import HFFolderWriter
from megarl.layout import Box, Layout
from megarl.models import COMPANIONS, ModelConfig
from megarl.weight_sync.layouts import hf_layout

CHECKPOINT = "release"  # what Megatron-LM calls a checkpoint that begins a training run
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
        items: all that is to be written, in order.
        checkpoint: the folder, within the one that is written, in which the weights lie.
    """

    kind: str
    layout: Layout
    items: tuple[Item, ...]
    checkpoint: str

    def num_leading(self, local: str) -> int:
        """How many leading axes of the tensor number layers and experts."""
        ...

    def write_file(self, folder: Path, at: int, count: int, tensors: Mapping[Item, torch.Tensor]) -> None:
        """Write file `at` (from 0) of `count`."""
        ...

    def finish(self, folder: Path, companions: Mapping[str, bytes]) -> None:
        """Write what makes the files a checkpoint. `companions`: config, tokenizer and so on, by file name."""
        ...


class HFTarget:
    """A Hugging Face folder: `model-00001-of-00003.safetensors` and so on, and an index."""

    kind = "hf"
    checkpoint = "."

    def __init__(self, config: ModelConfig, head: str, mtp: bool) -> None:
        self.layout = hf_layout(config, head, mtp)
        self.items = tuple(Item(piece.local, piece.local_box) for piece in self.layout.pieces(0))
        self._writer: HFFolderWriter | None = None

    def num_leading(self, local: str) -> int:
        return 0

    def write_file(self, folder: Path, at: int, count: int, tensors: Mapping[Item, torch.Tensor]) -> None:
        if self._writer is None:
            self._writer = HFFolderWriter(folder, count)
        self._writer.write_file(at, {item.local: tensor for item, tensor in tensors.items()})

    def finish(self, folder: Path, companions: Mapping[str, bytes]) -> None:
        assert self._writer is not None
        self._writer.finish(companions)


class MegatronTarget:
    """A distributed checkpoint where Megatron-LM's `--load` finds it: in a folder `release`, named by the tracker file.

    Transformer Engine's modules save an extra state each, empty without FP8, and Megatron-LM refuses a checkpoint
    that lacks one of a model that has it: they are written for all. A model without Transformer Engine has none, and
    loads leave them unread. The options of a training run (`args`) are not there: there was none.
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
        """What is not a module's own. `content_metadata` tells whoever loads which keys to ask for."""
        metadata = {"singleton_local_shards": False, "non_homogeneous_layers": not self.stacked}
        return {"content_metadata": metadata, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}

    def _objects(self) -> dict[str, list[Any]]:
        """What the checkpoint holds beside weights, each in a list of one as Megatron has it."""
        empty = [torch.empty(0, dtype=torch.uint8)]
        return {"common_state/shard_0_1": [self._common]} | dict.fromkeys(self.definition.extra_states, empty)

    def finish(self, folder: Path, companions: Mapping[str, bytes]) -> None:
        assert self._writer is not None
        self._writer.finish()
        # where megatron-core looks for the common state before 0.19
        torch.save(self._common, folder / CHECKPOINT / "common.pt")
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (folder / CHECKPOINT / "metadata.json").write_text(json.dumps(config))
        (folder / CHECKPOINT / COMPANIONS).mkdir()
        for name, content in companions.items():
            (folder / CHECKPOINT / COMPANIONS / name).write_bytes(content)
        (folder / "latest_checkpointed_iteration.txt").write_text(CHECKPOINT)


TARGETS = {"hf": HFTarget, "megatron": MegatronTarget}
