"""What a rank with a model does while it is exported: how it is planned, and what this rank holds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megarl import platform
from megarl.cluster.worker import RankInfo
from megarl.hybrid_engine import AdapterExport, Bundle, ExportPlan, adapter_export_plan
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import local_parameters
from megarl.megatron.offload import assert_resident
from megarl.models import ModelConfig
from megarl.trainer.specs import ModelSpec


class Exporting:
    """A part of `ModelWorker`, whose attributes these are."""

    info: RankInfo
    spec: ModelSpec
    config: ModelConfig
    layout: ParallelLayout
    dtype: torch.dtype
    adapter: str
    chunks: Sequence[torch.nn.Module]
    export: ExportPlan | None = None
    adapter_export: AdapterExport | None = None

    def trained_tensors(self) -> Mapping[str, torch.Tensor]:
        raise NotImplementedError

    def export_plan(self, mtp: bool) -> ExportPlan:
        """How the model is exported. `mtp`: with the source model's multi-token prediction layers."""
        dtype = platform.torch_dtype(self.config.dtype)
        self.export = ExportPlan(self.config, self.layout, dtype, mtp=mtp, head=self.spec.head)
        return self.export

    def adapter_plan(self) -> AdapterExport:
        """How the adapters are exported, with the value head if there is one."""
        spec = self.spec
        self.adapter_export = adapter_export_plan(
            self.config, self.layout, spec.lora, self.dtype, adapter=self.adapter, head=spec.head
        )
        return self.adapter_export

    def pack_adapters(self) -> Bundle:
        """What this rank holds of the adapters, after `adapter_plan`."""
        assert self.adapter_export is not None
        assert_resident(self.chunks)
        return self.adapter_export.pack(self.info.rank, local_parameters(self.chunks))

    def pack_export(self, shard: int) -> Bundle:
        """What this rank holds of a shard file of the Hugging Face checkpoint, after `export_plan`."""
        assert self.export is not None
        assert_resident(self.chunks)
        return self.export.pack(shard, self.info.rank, self.trained_tensors())
