"""The trained policy as a Hugging Face folder; with LoRA its adapters in PEFT's format, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.checkpoints.hf.adapters import AdapterExport, write_peft_adapter
from megarl.checkpoints.hf.export import Bundle, ExportPlan, write_hf_checkpoint
from megarl.cluster import WorkerGroup
from megarl.config import TrainedModelConfig
from megarl.trainer.run.run import Run

FOLDER = "hf"
ADAPTER_FOLDER = "adapter"


def export_hf(
    run: Run,
    group: WorkerGroup,
    model: TrainedModelConfig,
    folder: Path,
    adapter: Path | None = None,
    fields: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> str:
    """Gather the group's shards, file by file, into `folder`, whole or not at all; returns its path.

    With LoRA these are the merged weights, and the adapters are written as well.

    Args:
        adapter: their folder; None: `adapter` beside `folder`.
        fields, files: see `write_hf_checkpoint`.
    """
    plan: ExportPlan = run.wait(group.call("export_plan", model.mtp == "keep"))[0]
    path = str(folder)
    with run.status(f"exporting the model to {path}"):

        def collect(shard: int) -> list[Bundle]:
            return run.wait(group.call("pack_export", shard))

        write_hf_checkpoint(path, model.path, plan, collect, fields, files)
    run.say(f"exported: {path}")
    if model.lora.rank:
        _export_adapters(run, group, model, adapter or folder.with_name(ADAPTER_FOLDER))
    return path


def _export_adapters(run: Run, group: WorkerGroup, model: TrainedModelConfig, folder: Path) -> None:
    """The same of the adapters."""
    plan: AdapterExport = run.wait(group.call("adapter_plan"))[0]
    write_peft_adapter(str(folder), model.path, plan, run.wait(group.call("pack_adapters")))
    run.say(f"exported adapters: {folder}")
