"""What of a rank is in a checkpoint, and the files beside it that `megarl convert` needs.

Without adapters the model is saved; with adapters these and the value head, and which model they are on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from megarl.checkpoints import FileFacts, seal_files
from megarl.checkpoints.hf.adapters import adapter_layout, adapter_tensors, write_adapter_config
from megarl.checkpoints.hf.export import read_companions
from megarl.checkpoints.hf.peft_config import CONFIG_FILE
from megarl.cluster.ranks import RankInfo
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import unwrap
from megarl.megatron.checkpoint.base import BaseModel, identify
from megarl.megatron.checkpoint.checkpoint import RankStates
from megarl.megatron.checkpoint.places import Places, adapter_places, model_places
from megarl.megatron.offload import Gradients, HostStates, Offloadable
from megarl.models import COMPANIONS, ModelConfig
from megarl.trainer.workers.specs import ModelSpec


class TrainedModel(Protocol):
    """What of a `ModelWorker` is read here."""

    info: RankInfo
    spec: ModelSpec
    layout: ParallelLayout
    config: ModelConfig
    dtype: torch.dtype
    adapter: str
    chunks: list[torch.nn.Module]
    parts: dict[str, Offloadable | Gradients | HostStates]
    optimizer: Any
    scheduler: Any
    base_model: BaseModel | None


def rank_states(worker: TrainedModel) -> RankStates:
    """What of a worker is saved and loaded; called on all ranks of the role at once.

    What it has must be on the device: weights or adapters, and the optimizer.
    """
    assert worker.spec.optim is not None, "a model that is not trained is not saved"
    for part in ("adapters" if worker.spec.adapted else "weights", "optimizer"):
        worker.parts[part].require()
    adapted = worker.spec.adapted
    return RankStates(
        worker.chunks,
        worker.optimizer,
        worker.scheduler,
        worker.layout,
        _adapter_places(worker) if adapted else model_places(unwrap(worker.chunks), worker.config.vocab_size),
        worker.spec.megatron.seed,
        _base(worker) if adapted else None,
    )


def _adapter_places(worker: TrainedModel) -> Places:
    spec = worker.spec
    layout = adapter_layout(worker.config, worker.layout, spec.lora, worker.adapter, spec.head)
    return adapter_places(
        layout.pieces(worker.info.rank), adapter_tensors(worker.config, spec.lora, spec.head)
    )


def _base(worker: TrainedModel) -> BaseModel:
    """The model that the adapters are on; one rank looks at its files, once."""
    if worker.base_model is None:
        found = [identify(worker.spec.path) if torch.distributed.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(found, src=0)
        worker.base_model = found[0]
    assert worker.base_model is not None
    return worker.base_model


def write_companions(worker: TrainedModel, folder: Path) -> dict[str, FileFacts]:
    """Write what tells `megarl convert` of which model a checkpoint is; one rank calls it.

    Returns: the files, by name in the folder.

    Raises:
        OSError: the disk is full or not writable.
    """
    spec, companions = worker.spec, folder / COMPANIONS
    companions.mkdir()
    source = Path(spec.path).expanduser()
    names = []
    for name, content in read_companions(source, worker.config, worker.dtype).items():
        (companions / name).write_bytes(content)
        names.append(f"{COMPANIONS}/{name}")
    if spec.adapted:
        write_adapter_config(folder, worker.config, spec.lora, spec.path, spec.head)
        names.append(CONFIG_FILE)
    return seal_files(folder, names)
