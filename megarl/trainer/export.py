"""The trained policy as a Hugging Face folder."""

from __future__ import annotations

from megarl.cluster import WorkerGroup
from megarl.config import TrainedModelConfig
from megarl.hybrid_engine import ExportPlan, write_hf_checkpoint
from megarl.trainer.run import Run

FOLDER = "hf"


def export_hf(run: Run, group: WorkerGroup, model: TrainedModelConfig) -> str:
    """Gather the group's shards, file by file, into `<run folder>/hf`; returns that path."""
    plan: ExportPlan = run.wait(group.call("export_plan", model.mtp == "keep"))[0]
    path = str(run.folder / FOLDER)
    with run.status(f"exporting the model to {path}"):
        write_hf_checkpoint(path, model.path, plan, lambda shard: run.wait(group.call("pack_export", shard)))
    run.say(f"exported: {path}")
    return path
