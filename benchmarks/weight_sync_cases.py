"""The transitions that weight_sync.py measures: layouts of both sides, and the models that are moved."""

from dataclasses import dataclass
from typing import Any

import torch

from megarl.config import LoraConfig
from megarl.layout import RankPlace, place_engines
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.models.config import MoEConfig
from megarl.weight_sync.layouts import EngineLayout, megatron_layout, sglang_layout
from megarl.weight_sync.sync_plan import SyncPlan

DTYPE = torch.float32


@dataclass(frozen=True)
class Case:
    """One transition; `layers` of the model. `apart`: engines have a machine of their own."""

    train: ParallelLayout
    engine: EngineLayout
    moe: bool = False
    layers: int = 8
    apart: bool = False


CASES = {
    "TP2PP2 -> TP2": Case(ParallelLayout(4, tp=2, pp=2), EngineLayout(tp=2)),
    "TP4 -> TP2": Case(ParallelLayout(4, tp=4), EngineLayout(tp=2)),
    "TP2 -> TP4": Case(ParallelLayout(2, tp=2), EngineLayout(tp=4)),
    "PP4 -> TP2": Case(ParallelLayout(4, pp=4), EngineLayout(tp=2)),
    "EP4 -> EP2xTP2": Case(ParallelLayout(4, ep=4), EngineLayout(tp=4, ep=2), moe=True, layers=4),
    **{
        f"TP2 -> {number} x TP1 apart": Case(
            ParallelLayout(2, tp=2), EngineLayout(tp=1, num_engines=number), layers=4, apart=True
        )
        for number in (1, 2, 4)
    },
}


def model_of(case: Case) -> ModelConfig:
    """About 270 MB in float32: the shape of Qwen2 with an untied head, or of Qwen3-MoE."""
    sizes: dict[str, Any] = {
        "num_layers": case.layers,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_query_groups": 4,
        "head_dim": 64,
        "ffn_hidden_size": 2304,
        "vocab_size": 8000,
        "norm_epsilon": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "hf": {},
    }
    if not case.moe:
        return ModelConfig(
            family="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, **sizes
        )
    sizes |= {"hidden_size": 512, "num_attention_heads": 8}
    moe = MoEConfig(num_experts=32, top_k=4, ffn_hidden_size=256)
    return ModelConfig(
        family="qwen3_moe", architecture="Qwen3MoeForCausalLM", qkv_bias=False, qk_norm=True, moe=moe, **sizes
    )


def lora_of(case: Case, rank: int) -> LoraConfig:
    """Adapters on all linear layers, or, where there are experts, on attention's."""
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    return LoraConfig(rank=rank, **({"target_modules": attention} if case.moe else {}))


def sync_places(case: Case) -> tuple[tuple[RankPlace, ...], tuple[RankPlace, ...]]:
    """The devices of the trainer's and of the engine's ranks, the latter placed where most of their weights are."""
    config, train, engine = model_of(case), case.train, case.engine
    if case.apart:
        return tuple(
            tuple(RankPlace(node, str(number)) for number in range(count))
            for node, count in (("trainer", train.world), ("engines", engine.num_ranks))
        )
    devices = tuple(RankPlace("node", str(number)) for number in range(max(train.world, engine.num_ranks)))
    sources = devices[: train.world]
    order = place_engines(
        megatron_layout(config, train, places=sources), sglang_layout(config, engine), devices, engine.tp
    )
    return sources, tuple(devices[number] for number in order)


def sync_plan(case: Case, bucket_bytes: int, transport: str, adapters: LoraConfig | None = None) -> SyncPlan:
    """`adapters`: the adapters that engines serve next to the weights; None: none."""
    sources, targets = sync_places(case)
    return SyncPlan(
        config=model_of(case),
        parallel=case.train,
        engines=case.engine,
        dtype=DTYPE,
        bucket_bytes=bucket_bytes,
        source_places=sources,
        target_places=targets,
        transport=transport,
        adapters=adapters,
    )
