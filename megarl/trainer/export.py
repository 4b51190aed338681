"""The trained policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megarl.cluster import WorkerGroup
from megarl.config import TrainedModelConfig
from megarl.hybrid_engine import ExportPlan, write_hf_checkpoint
from megarl.trainer.run import Run

FOLDER = "hf"


def export_hf(run: Run, group: WorkerGroup, model: TrainedModelConfig, folder: Path) -> str:
    """Gather the group's shards, file by file, into `folder`, whole or not at all; returns its path."""
    plan: ExportPlan = run.wait(group.call("export_plan", model.mtp == "keep"))[0]
    path = str(folder)
    with run.status(f"exporting the model to {path}"):
        write_hf_checkpoint(path, model.path, plan, lambda shard: run.wait(group.call("pack_export", shard)))
    run.say(f"exported: {path}")
    return path


def export_checkpoint(run: Run, group: WorkerGroup, model: TrainedModelConfig, step: int) -> str:
    """The policy after `step` as `<run folder>/checkpoints/step-<step>/hf`; returns that path."""
    return export_hf(run, group, model, run.folder / "checkpoints" / f"step-{step}" / FOLDER)
