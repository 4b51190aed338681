"""An exported model against Hugging Face transformers: the same prompts must get the same greedy answers."""

from __future__ import annotations

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from megarl.data.trajectories import read_trajectories
from megarl.models import read_model_config


@torch.no_grad()
def verify_greedy(model_path: str, trajectories: str, max_samples: int) -> None:
    """Generate again what the trajectories' prompts were answered, and compare token by token.

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
