"""Megatron shards -> a Hugging Face checkpoint, shard file by shard file, whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megarl.files import naming
from megarl.hybrid_engine.layouts import hf_layout, megatron_layout
from megarl.hybrid_engine.packets import Packet, pack, unpack
from megarl.layout import Copy, Plan, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, logical_tensors

# what a model folder holds beside its weights; config.json is rewritten for the dtype
COMPANIONS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt",
              "chat_template*", "added_tokens.json", "*.model")  # fmt: skip


@dataclass(frozen=True)
class ExportPlan:
    """Who sends which slices of a trained model into Hugging Face tensors; equal wherever it is computed."""

    config: ModelConfig
    parallel: ParallelLayout
    dtype: torch.dtype
    shard_bytes: int = 4 << 30

    @cached_property
    def plan(self) -> Plan:
        return make_plan(megatron_layout(self.config, self.parallel), hf_layout(self.config))

    @cached_property
    def shards(self) -> list[dict[str, tuple[int, ...]]]:
        """The tensors (name -> shape) of each file: in order, up to `shard_bytes` a file."""
        shards: list[dict[str, tuple[int, ...]]] = [{}]
        filled = 0
        for name, shape in logical_tensors(self.config).items():
            size = torch.Size(shape).numel() * self.dtype.itemsize
            if filled and filled + size > self.shard_bytes:
                shards.append({})
                filled = 0
            shards[-1][name] = shape
            filled += size
        return shards

    def copies(self, shard: int, rank: int) -> list[Copy]:
        return [c for c in self.plan.copies if c.source_rank == rank and c.tensor in self.shards[shard]]

    def pack(self, shard: int, rank: int, parameters: dict[str, torch.Tensor]) -> Packet:
        """What trainer rank `rank` holds of a shard file, or should send of it."""
        return pack(self.copies(shard, rank), parameters, self.dtype)


def assemble(export: ExportPlan, shard: int, packets: Sequence[Packet]) -> dict[str, torch.Tensor]:
    """The tensors of a shard file from the packets of all trainer ranks, every slice's checksum verified."""
    tensors = {name: torch.empty(shape, dtype=export.dtype) for name, shape in export.shards[shard].items()}
    for rank, packet in enumerate(packets):
        unpack(packet, export.copies(shard, rank), tensors, export.dtype)
    return tensors


def write_hf_checkpoint(
    path: str,
    source_model: str,
    export: ExportPlan,
    collect: Callable[[int], Sequence[Packet]],
) -> None:
    """Write the model into folder `path`; it appears only when it is complete.

    Args:
        source_model: the Hugging Face folder that tokenizer, config and generation config come from.
        collect: shard number -> the packets of all trainer ranks for it.

    Raises:
        ValueError: a slice arrived damaged.
        OSError: the disk is full or not writable; `path` is then as it was before.
    """
    target, building = Path(path), Path(f"{path}.partial-{os.getpid()}")
    companions = _read_companions(Path(source_model).expanduser(), export)
    try:
        with naming(target):
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            _write_weights(building, export, collect)
            for name, content in companions.items():
                (building / name).write_bytes(content)
            for file in building.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            _replace(building, target)
    except SafetensorError as error:  # how safetensors says that the disk is full
        raise OSError(f"{target}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_weights(building: Path, export: ExportPlan, collect: Callable[[int], Sequence[Packet]]) -> None:
    weight_map: dict[str, str] = {}
    total, count = 0, len(export.shards)
    for shard in range(count):
        name = "model.safetensors" if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        tensors = assemble(export, shard, collect(shard))
        save_file(tensors, building / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (building / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _read_companions(source: Path, export: ExportPlan) -> dict[str, bytes]:
    """What the folder holds beside the weights: file name -> content."""
    config = {**export.config.hf, "dtype": str(export.dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    files = {file.name: file.read_bytes() for pattern in COMPANIONS for file in source.glob(pattern)}
    return {**files, "config.json": (json.dumps(config, indent=2) + "\n").encode()}


def _replace(building: Path, target: Path) -> None:
    """Put the finished folder in place; an older export there is moved aside first, then deleted."""
    old = Path(f"{target}.old-{os.getpid()}")
    if target.exists():
        target.rename(old)
    building.rename(target)
    shutil.rmtree(old, ignore_errors=True)
