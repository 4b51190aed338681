"""Adapters between Megatron ranks and folders in PEFT's format.

Guarantees, each asserted by a test: a folder that does not fit section `lora` is refused before anything is read; each
rank reads only its slices; written folders appear complete or not at all, each slice's checksum verified, and an adapter's
results in PEFT are its results in Megatron.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from megarl.checkpoints.hf.export import Bundle, Export, assemble, save_tensors
from megarl.checkpoints.hf.peft import PREFIX, WEIGHTS_FILE, PeftReader, adapter_config
from megarl.checkpoints.hf.peft_config import CONFIG_FILE
from megarl.config.schema.models import LoraConfig
from megarl.layout import Box, Copy, Layout, Piece, Plan, Shard, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.models.lora import ADAPTER, A, B, adapted_weights, adapter_pieces, logical_adapters, scaling
from megarl.models.shards import Shapes
from megarl.models.table import VALUE_HEAD
from megarl.util.files import whole_folder
from megarl.weight_sync.layouts import megatron_layout


def adapter_tensors(config: ModelConfig, lora: LoraConfig, head: str = "lm") -> Shapes:
    """The tensors of a folder of adapters with their shapes; a value head is one of them."""
    shapes = logical_adapters(config, lora)
    return shapes | ({VALUE_HEAD: (1, config.hidden_size)} if head == "value" else {})


def adapter_layout(
    config: ModelConfig,
    parallel: ParallelLayout,
    lora: LoraConfig,
    adapter: str = ADAPTER,
    head: str = "lm",
) -> Layout:
    """The shards of a Megatron model's adapters (and of its value head) over all its ranks."""
    weights = adapted_weights(config, lora)
    base = megatron_layout(config, parallel, head)
    shards = [Shard(shard.ranks, partial(_pieces, shard, weights, lora, adapter)) for shard in base.shards]
    return Layout("Megatron's adapters", base.num_ranks, tuple(shards))


def _pieces(shard: Shard, weights: Shapes, lora: LoraConfig, adapter: str) -> list[Piece]:
    pieces = adapter_pieces(shard.pieces, weights, lora, adapter)
    return pieces + [piece for piece in shard.pieces if piece.tensor == VALUE_HEAD]


def _peft_layout(shapes: Shapes) -> Layout:
    pieces = [Piece(name, Box.whole(shape), name, Box.whole(shape)) for name, shape in shapes.items()]
    return Layout.by_rank("PEFT's adapters", 1, lambda rank: pieces)


def load_adapters(
    path: str,
    config: ModelConfig,
    lora: LoraConfig,
    layout: ParallelLayout,
    rank: int,
    parameters: Mapping[str, torch.Tensor],
    adapter: str = ADAPTER,
    head: str = "lm",
) -> None:
    """Fill a Megatron rank's adapters from the folder at `path`.

    Section `lora` must have the rank and alpha of the folder's adapters of the largest rank. Of an adapter of a smaller rank the first
    rows of A and columns of B are filled, the other columns of B with 0, and other rows of A stay new ones. B of an adapter of
    another alpha is multiplied so that the outputs are the same.

    Args:
        parameters: the rank's, named as pieces name them.
        adapter: the name of the submodules that hold the adapters.
        head: "value" for a model with a value head, which the folder may have; otherwise the head keeps its values.

    Raises:
        ValueError: no such folder, one that does not fit section `lora` or the model, or adapters that are
            equal by this section and differ in the folder.
    """
    with PeftReader(path, config) as reader:
        reader.check(lora)
        if head == "value" and VALUE_HEAD not in reader.names:
            head = "lm"
        peft = _peft_layout(adapter_tensors(config, lora, head))
        copies = make_plan(peft, adapter_layout(config, layout, lora, adapter, head)).copies_to(rank)
        if lora.shared_a or lora.expert_groups:
            _check_shared(reader, copies)
        for copy in copies:
            place = parameters[copy.target_local][copy.target_box.slices].view(copy.box.size)
            _fill(place, reader, copy, lora)
    unfilled = {name for name in parameters if f".{adapter}." in name} - {
        copy.target_local for copy in copies
    }
    assert not unfilled, f"adapters that no piece names: {sorted(unfilled)}"


def _fill(place: torch.Tensor, reader: PeftReader, copy: Copy, lora: LoraConfig) -> None:
    """Fill `place` with a copy's values, which have the full rank dimension, from an adapter with a rank and alpha of its own."""
    module, kind = next(
        ((copy.tensor.removesuffix(end), end) for end in (A, B) if copy.tensor.endswith(end)), ("", "")
    )
    if not kind:
        place.copy_(reader.read(copy.tensor, copy.box))
        return
    rank, box = reader.rank(module), copy.box
    if kind == A:
        place[:rank].copy_(reader.read(copy.tensor, Box(box.start, (rank, box.size[1]))))
        return
    values, factor = (
        reader.read(copy.tensor, Box(box.start, (box.size[0], rank))),
        reader.scaling(module) / scaling(lora),
    )
    place[:, rank:].zero_()
    place[:, :rank].copy_(values if math.isclose(factor, 1.0, rel_tol=1e-6) else values.double() * factor)


def _check_shared(reader: PeftReader, copies: Sequence[Copy]) -> None:
    """Refuse (ValueError) tensors that lie in one place and are not equal."""
    places: dict[tuple[str, Box], list[Copy]] = defaultdict(list)
    for copy in copies:
        places[copy.target_local, copy.target_box].append(copy)
    for first, *others in places.values():
        values = reader.read(first.tensor, first.box) if others else None
        for other in others:
            if not torch.equal(reader.read(other.tensor, other.box), values):
                raise ValueError(
                    f"adapter {reader.path!r}: {first.tensor} and {other.tensor} differ; by lora.shared_a and "
                    "lora.expert_groups they are the same adapter"
                )


@dataclass(frozen=True)
class AdapterExport(Export):
    """Which rank sends which slices of the adapters into PEFT's tensors; equal wherever it is computed.

    Adapters that several projections or experts share are written for each of them.

    Attributes:
        dtype: of the written tensors.
        adapter: the name of the submodules that hold the adapters.
        head: "value" to write the value head, too.
    """

    config: ModelConfig
    parallel: ParallelLayout
    lora: LoraConfig
    dtype: torch.dtype
    adapter: str = ADAPTER
    head: str = "lm"

    @cached_property
    def shards(self) -> list[Shapes]:
        return [adapter_tensors(self.config, self.lora, self.head)]

    @cached_property
    def plan(self) -> Plan:
        source = adapter_layout(self.config, self.parallel, self.lora, self.adapter, self.head)
        return make_plan(source, _peft_layout(self.shards[0]))

    def dtype_of(self, tensor: str) -> torch.dtype:
        return self.dtype


def write_peft_adapter(
    path: str, source_model: str, export: AdapterExport, bundles: Sequence[Bundle]
) -> None:
    """Write the adapters into folder `path`; it appears only when it is complete.

    Args:
        source_model: the folder of the base model, which the adapters name.
        bundles: of all trainer ranks (`AdapterExport.pack`).

    Raises:
        ValueError: a slice arrived damaged.
        OSError: the disk is full or not writable; `path` is then as it was before.
    """
    tensors = assemble(export, 0, bundles)
    with whole_folder(path) as folder:
        save_tensors({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
        write_adapter_config(folder, export.config, export.lora, source_model, export.head)


def write_adapter_config(
    folder: Path, config: ModelConfig, lora: LoraConfig, source_model: str, head: str = "lm"
) -> None:
    """Write `adapter_config.json` into a folder: the facts of adapters that are not in their tensors. A Megatron checkpoint that holds
    adapters needs it, too."""
    facts = adapter_config(config, lora, source_model, head)
    (folder / CONFIG_FILE).write_text(json.dumps(facts, indent=2) + "\n")
