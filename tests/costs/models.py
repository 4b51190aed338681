"""Tiny models of every family, and how they are built on real ranks to be measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.tiny_model import make_tiny_model
from megarl.config.schema.commands import OptimConfig
from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, wrap_for_training
from megarl.megatron.lora.lora import attach_adapters
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.parallel import coords, init_parallel
from megarl.models import ModelConfig, read_model_config
from megarl.models.config import QWEN_HYBRIDS
from tests.megatron.parity import VOCAB

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"num_experts_per_tok": 3},
    # With these widths each of two ranks has multiples of 64 elements, to which Megatron aligns parameters.
    **{name: {"linear_key_head_dim": 16, "linear_value_head_dim": 16} for name in QWEN_HYBRIDS},
    "deepseek_v3": {"q_lora_rank": 64, "kv_lora_rank": 64},
    "deepseek_v3 with narrow values": {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 48},
    "deepseek_v3 without low rank queries": {"q_lora_rank": None, "kv_lora_rank": 64},
    "glm4_moe": {"n_shared_experts": 2},
    "deepseek_v32": {"q_lora_rank": 64, "kv_lora_rank": 64},
    "glm_moe_dsa": {"q_lora_rank": 64, "kv_lora_rank": 64},
    "glm4_moe_lite": {"q_lora_rank": 64, "kv_lora_rank": 64},
    "minimax_m2": {"num_experts_per_tok": 3},
    "kimi_k2": {"q_lora_rank": 64, "kv_lora_rank": 64},
    "gpt_oss": {},
}
PREDICTING = "deepseek_v3 with two layers of multi-token prediction"
LORA = LoraConfig(rank=8)  # all sizes are multiples of 64, to which Megatron aligns parameters


def make_models(folder: Path, families: Iterable[str] = tuple(FAMILIES)) -> dict[str, str]:
    """Family -> folder of a tiny model."""
    folders = {}
    for name in families:
        family = name.split()[0]
        fields = FAMILIES[family if name == PREDICTING else name]
        folders[name] = str(folder / name.replace(" ", "_"))
        make_tiny_model(
            folders[name],
            ["two words"],
            vocab_size=VOCAB,
            hidden_size=64,
            ffn_hidden_size=96,
            num_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            family=family,
            num_mtp_layers=2 if name == PREDICTING else 0,
            fields=fields,
            seed=5,
        )
    return folders


@dataclass(frozen=True)
class Built:
    """A model on this rank."""

    config: ModelConfig
    layout: ParallelLayout
    chunks: list
    optimizer: Any
    scheduler: Any
    place: Any
    replica: tuple[int, int]


def build(
    rank: int,
    world: int,
    folder: str,
    sizes: dict[str, Any],
    *,
    lora: LoraConfig | None = None,
    dtype: torch.dtype = torch.float32,
    head: str = "lm",
    distributed: bool = True,
    recompute: str | None = None,
    modules: Sequence[str] | None = None,
    on_host: bool = False,
    fsdp: str | None = None,
    mtp: bool = False,
    indexers: bool = False,
    muon: bool = False,
    overlap: bool = False,
) -> Built:
    """A model that is ready for training, with random weights. `modules`: of `recompute` "selective"."""
    from megatron.core import parallel_state  # after megarl's seam is installed

    layout = ParallelLayout(world=world, **sizes)
    init_parallel(layout, rank, world)
    config = read_model_config(folder)
    chunks = build_model(
        config,
        layout,
        head=head,
        dtype=dtype,
        recompute_granularity=recompute,
        recompute_modules=modules,
        base_block=None if lora is None else lora.blocks,
        mtp="detached" if mtp else None,
        indexers=indexers,
    )
    if lora is not None:
        attach_adapters(chunks, config, layout, lora)
        if head == "value" and hasattr(chunks[-1], "value_head"):
            chunks[-1].value_head.requires_grad_(True)
    chunks = wrap_for_training(
        chunks,
        use_distributed_optimizer=distributed,
        fsdp=fsdp,
        matrices=muon,
        overlap_grad_reduce=overlap,
    )
    optim = OptimConfig(lr=1e-3, optimizer_cpu_offload=on_host, optimizer="muon" if muon else "adam")
    optimizer, scheduler = build_optimizer(chunks, optim)
    replica = (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_rank(),
    )
    return Built(config, layout, chunks, optimizer, scheduler, coords(), replica)
