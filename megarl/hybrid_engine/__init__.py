"""Moves weights between layouts: Hugging Face files, Megatron shards, SGLang shards.

Promises: what a plan says is what is moved, no more; every slice carries a checksum that is verified where
it arrives; an engine serves nothing but a whole, verified version. Executes plans, decides nothing: who
sends what to whom comes from `megarl.layout`. Must not know: Ray, RL.
"""

from megarl.hybrid_engine.adapters import (
    AdapterExport,
    adapter_export_plan,
    load_adapters,
    write_peft_adapter,
)
from megarl.hybrid_engine.bundles import Bundle, pack
from megarl.hybrid_engine.export import ExportPlan, assemble, write_hf_checkpoint
from megarl.hybrid_engine.layouts import (
    EngineLayout,
    best_device_order,
    hf_layout,
    megatron_layout,
    sglang_layout,
)
from megarl.hybrid_engine.load import check_hf_weights, load_hf_weights
from megarl.hybrid_engine.outbox import Outbox, Sent
from megarl.hybrid_engine.slots import Slots
from megarl.hybrid_engine.sync import SyncPlan

__all__ = [
    "AdapterExport",
    "Bundle",
    "EngineLayout",
    "ExportPlan",
    "Outbox",
    "Sent",
    "Slots",
    "SyncPlan",
    "adapter_export_plan",
    "assemble",
    "best_device_order",
    "check_hf_weights",
    "hf_layout",
    "load_adapters",
    "load_hf_weights",
    "megatron_layout",
    "pack",
    "sglang_layout",
    "write_hf_checkpoint",
    "write_peft_adapter",
]
