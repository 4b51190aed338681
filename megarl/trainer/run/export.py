"""The trained policy as a Hugging Face folder, with LoRA its adapters in PEFT's format too, and a check against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megarl.checkpoints.hf.adapters import AdapterExport, write_peft_adapter
from megarl.checkpoints.hf.export import Bundle, ExportPlan, write_hf_checkpoint
from megarl.cluster import WorkerGroup
from megarl.config import TrainedModelConfig
from megarl.data.trajectories import read_trajectories
from megarl.models import read_model_config
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
    """Gather the group's shards, file by file, into `folder`, completely or not at all; returns its path.

    With LoRA these are the merged weights, and the adapters are written as well.

    Args:
        adapter: the adapters' folder; None: `adapter` next to `folder`.
        fields, files: see `write_hf_checkpoint`.
    """
    plan: ExportPlan = run.wait(group.call("export_plan", model.mtp != "drop"))[0]
    path = str(folder)
    with run.status(f"exporting the model to {path}"):

        def collect(shard: int) -> list[Bundle]:
            return run.wait(group.call("pack_export", shard))

        write_hf_checkpoint(path, model.path, plan, collect, fields, files, model.tokenizer_path)
    run.say(f"exported: {path}")
    if model.lora.rank:
        _export_adapters(run, group, model, adapter or folder.with_name(ADAPTER_FOLDER))
    return path


def _export_adapters(run: Run, group: WorkerGroup, model: TrainedModelConfig, folder: Path) -> None:
    """Write the adapters in PEFT's format into `folder`."""
    plan: AdapterExport = run.wait(group.call("adapter_plan"))[0]
    write_peft_adapter(str(folder), model.path, plan, run.wait(group.call("pack_adapters")))
    run.say(f"exported adapters: {folder}")


@torch.no_grad()
def verify_greedy(model_path: str, trajectories: str, max_samples: int) -> None:
    """Answer the trajectories' prompts again, and compare token by token.

    Raises:
        ValueError: no such model or file; answers of several turns; or an answer differs: names the first trajectory that does, and how
            many.
    """
    read_model_config(model_path)  # transformers takes a folder that is not there for a name on the Hub
    batch = read_trajectories(trajectories).slice(0, max_samples)
    if any(num_turns > 1 for num_turns in batch["num_turns"].to_pylist()):
        raise ValueError(
            f"{trajectories} has answers of several turns: transformers has no environment for them"
        )
    # Here, and not above: with torch._dynamo, it takes a controller seconds that runs do not need.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    different = []
    for uid, prompt, response in zip(
        *(batch[name].to_pylist() for name in ("uid", "prompt_ids", "response_ids")), strict=True
    ):
        ids = torch.tensor([prompt])
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(response),
            do_sample=False,
        )
        answer = output[0, len(prompt) :].tolist()
        if answer != response:
            different.append(f"{uid}: transformers {answer}, engine {response}")
    if different:
        raise ValueError(f"{len(different)} of {batch.num_rows} greedy answers differ; first {different[0]}")
    Console().print(f"verified: {batch.num_rows} of {batch.num_rows} greedy answers are transformers' own")
