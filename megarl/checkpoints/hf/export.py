"""Megatron shards -> a Hugging Face checkpoint, shard file by shard file, whole or not at all."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.hf.bundles import Bundle, pack, unpack
from megarl.checkpoints.hf.folder import HFFolderWriter, read_companions
from megarl.checkpoints.hf.load import HFReader
from megarl.layout import Box, Copy, Layout, Plan, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, keeps_float32, logical_tensors
from megarl.util.files import whole_folder
from megarl.weight_sync.layouts import hf_layout, megatron_layout


@dataclass(frozen=True)
class ExportPlan:
    """Who sends which slices of a trained model into Hugging Face tensors; equal wherever it is computed.

    head: "lm", or "value" of a reward model, which is written as `score.weight` in place of the output layer.
    mtp: whether multi-token prediction layers, which are not trained, are taken over from the source model; what they
    repeat of the model is the trained one.
    """

    config: ModelConfig
    parallel: ParallelLayout
    dtype: torch.dtype
    shard_bytes: int = 4 << 30
    mtp: bool = False
    head: str = "lm"

    @cached_property
    def plan(self) -> Plan:
        whole = hf_layout(self.config, self.head, self.mtp)
        trained = logical_tensors(self.config, self.head)
        pieces = [piece for piece in whole.pieces(0) if piece.tensor in trained]
        target = Layout.by_rank(whole.name, 1, lambda rank: pieces)
        return make_plan(megatron_layout(self.config, self.parallel, self.head), target)

    @cached_property
    def shards(self) -> list[dict[str, tuple[int, ...]]]:
        """The tensors (name -> shape) of each file: in order, up to `shard_bytes` a file."""
        shards: list[dict[str, tuple[int, ...]]] = [{}]
        filled = 0
        for name, shape in logical_tensors(self.config, self.head, self.mtp).items():
            size = torch.Size(shape).numel() * self.dtype_of(name).itemsize
            if filled and filled + size > self.shard_bytes:
                shards.append({})
                filled = 0
            shards[-1][name] = shape
            filled += size
        return shards

    @cached_property
    def untrained(self) -> set[str]:
        """The tensors that come from the source model."""
        return set().union(*self.shards) - {copy.target_local for copy in self.plan.copies}

    def dtype_of(self, tensor: str) -> torch.dtype:
        """What a tensor is written as."""
        return torch.float32 if keeps_float32(tensor) else self.dtype

    @cached_property
    def _copies(self) -> dict[tuple[int, int], list[Copy]]:
        """By shard and rank."""
        shard_of = {name: index for index, shard in enumerate(self.shards) for name in shard}
        copies: dict[tuple[int, int], list[Copy]] = {}
        for copy in self.plan.copies:
            copies.setdefault((shard_of[copy.target_local], copy.source_rank), []).append(copy)
        return copies

    def copies(self, shard: int, rank: int) -> list[Copy]:
        return self._copies.get((shard, rank), [])

    def pack(self, shard: int, rank: int, parameters: dict[str, torch.Tensor]) -> Bundle:
        """What trainer rank `rank` holds of a shard file, or should send of it."""
        return pack(self.copies(shard, rank), parameters, self.dtype_of)


def assemble(
    export: ExportPlan, shard: int, bundles: Sequence[Bundle], source: HFReader | None = None
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
) -> None:
    """Write the model into folder `path`; it appears only when it is complete.

    Args:
        source_model: the Hugging Face folder that tokenizer, config, generation config and MTP layers come from.
        collect: shard number -> the bundles of all trainer ranks for it.
        fields: of config.json, in place of the source model's.
        files: name -> content of what else the folder has.

    Raises:
        ValueError: a slice arrived damaged.
        OSError: the disk is full or not writable; `path` is then as it was before.
    """
    folder_of_source = Path(source_model).expanduser()
    companions = read_companions(folder_of_source, export.config, export.dtype, export.mtp, fields)
    with (
        whole_folder(path) as folder,
        HFReader(source_model) if export.untrained else nullcontext() as source,
    ):
        writer = HFFolderWriter(folder, len(export.shards))
        for shard in range(len(export.shards)):
            writer.write_file(shard, assemble(export, shard, collect(shard), source))
        writer.finish({**companions, **(files or {})})
