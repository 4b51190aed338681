"""Log-probs of a Megatron model and of PEFT's model with the adapters in a folder."""

from typing import Any

import pyarrow as pa
import torch

from megarl.checkpoints.hf.adapters import AdapterExport, load_adapters
from megarl.checkpoints.hf.export import Bundle
from megarl.checkpoints.hf.load import load_hf_weights
from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, local_parameters
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.lora.lora import attach_adapters
from megarl.megatron.packing import arrange_sequences
from megarl.megatron.parallel import init_parallel
from megarl.megatron.step import forward_only
from megarl.models import read_model_config

TOKENS = torch.tensor([[3, 141, 59, 26, 5, 35, 89, 79, 32]])


def peft_log_probs(model: Any) -> torch.Tensor:
    """Log-probs of TOKENS after the first."""
    with torch.no_grad():
        logits = model(TOKENS).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, TOKENS[0, 1:, None])[:, 0]


def log_probs_with_adapters(
    rank: int, world: int, model: str, adapter: str, lora: LoraConfig, sizes: dict[str, Any]
) -> tuple[torch.Tensor | None, Bundle]:
    """A Megatron rank's log-probs with the adapters in a folder, and its export of these adapters."""
    layout = ParallelLayout(world=world, **sizes)
    init_parallel(layout, rank, world)
    config = read_model_config(model)
    chunks = build_model(config, layout, dtype=torch.float32)
    load_hf_weights(model, config, layout, rank, local_parameters(chunks))
    attach_adapters(chunks, config, layout, lora)
    load_adapters(adapter, config, lora, layout, rank, local_parameters(chunks))
    ids = TOKENS[0].tolist()
    table = pa.table({"input_ids": [ids], "loss_mask": [[False] + [True] * (len(ids) - 1)]})
    batch = arrange_sequences(
        table, [0], tp=layout.tp, cp=1, cp_rank=0, sequence_parallel=layout.sp
    ).on_device()
    (found,) = forward_only(chunks, [batch], lm_head(vocab_size=config.vocab_size, chunk_tokens=16))
    plan = AdapterExport(config, layout, lora, torch.float32)
    bundle = plan.pack(0, rank, local_parameters(chunks))
    return None if found is None else found[: len(ids) - 1, 0], bundle
