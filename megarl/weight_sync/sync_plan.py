"""The plan of a weight sync, from Megatron shards to SGLang shards: which slices each rank sends to which rank, in which bucket, by
which transport.

The controller works the plan out once (`SyncPlan.shares`) and gives each rank its own share. Each trainer rank then
packs and sends the slices of its share (sender.py). The receiver inside each SGLang rank (receiver.py) copies
the slices into SGLang's own parameters, reads them back, and compares every checksum.

Adapters that are served separately from the weights are a plan of their own, whose buckets come after those of the weights: a
version after the first begins with them.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megarl.config.schema.models import LoraConfig
from megarl.layout import Copy, Layout, Plan, RankPlace, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, logical_tensors, sglang_keeps_float32, sglang_padding
from megarl.models.lora import logical_adapters, scaling
from megarl.weight_sync.layouts import (
    EngineLayout,
    megatron_adapters,
    megatron_layout,
    served_adapters,
    served_padding,
    sglang_layout,
)
from megarl.weight_sync.packets import (
    CONVERT,
    IPC,
    P2P,
    QUANTISE,
    SCALE,
    SHARED,
    PacketSpec,
    Slice,
    SyncShare,
)
from megarl.weight_sync.quantize import SCALES, Block, dtype_in_fp8, is_quantised, with_scales

AUTO = "auto"
# A small model's buckets are smaller than they may be, so that there are enough of them for packing, travelling and
# writing to overlap, but not so small that the fixed cost of a bucket would matter.
OVERLAPPING_BUCKETS = 8
SMALL_BUCKET = 4 << 20


@dataclass(frozen=True)
class SyncPlan:
    """The transition of one policy into the layout of all engines; equal wherever it is computed.

    Attributes:
        dtype: the type that travels and that the engines hold.
        bucket_bytes: the most that one rank sends or receives at a time.
        source_places, target_places: where trainer and engine ranks run (None: each on a machine of its own).
        device: "cpu" or "cuda": where both ends have their tensors.
        transport: AUTO, or the one that all ranks shall use.
        fp8_block: rows and columns of a block, where the engines hold the model in float8 (None: they do not).
        adapters: the adapters that the engines serve separately, on top of unmerged weights; None: none.
    """

    config: ModelConfig
    parallel: ParallelLayout
    engines: EngineLayout
    dtype: torch.dtype
    bucket_bytes: int
    source_places: tuple[RankPlace, ...] | None = None
    target_places: tuple[RankPlace, ...] | None = None
    device: str = "cpu"
    transport: str = AUTO
    fp8_block: Block | None = None
    adapters: LoraConfig | None = None

    @cached_property
    def plan(self) -> Plan:
        """The plan of the weights."""
        source, target = self._layouts()
        if self.fp8_block is not None:
            shapes = logical_tensors(self.config)
            source = with_scales(source, shapes, self.fp8_block)
            target = with_scales(target, shapes, self.fp8_block)
        return self._make_plan(source, target)

    @cached_property
    def adapter_plan(self) -> Plan:
        """The plan of the adapters."""
        assert self.adapters is not None
        source, target = self._layouts()
        return self._make_plan(
            megatron_adapters(source, self.config, self.adapters),
            served_adapters(target, self.config, self.adapters),
        )

    def _layouts(self) -> tuple[Layout, Layout]:
        """The trainer's shards and the engines'."""
        source = megatron_layout(self.config, self.parallel, "lm", self.source_places)
        return source, sglang_layout(self.config, self.engines, self.target_places)

    def _make_plan(self, source: Layout, target: Layout) -> Plan:
        largest = max(1, self.bucket_limit // 4)  # else one copy would hold up all others of its bucket
        return make_plan(source, target, lambda tensor: self.dtype_of(tensor).itemsize, largest)

    def dtype_of(self, tensor: str) -> torch.dtype:
        """The type of a logical tensor in the engine."""
        if tensor in self._adapter_names:
            return self.dtype
        if sglang_keeps_float32(self.config, tensor):
            return torch.float32
        return self.dtype if self.fp8_block is None else dtype_in_fp8(tensor, self.dtype)

    @cached_property
    def bucket_limit(self) -> int:
        """The most bytes that a rank sends or receives at a time in this sync."""
        model = sum(torch.Size(shape).numel() for shape in logical_tensors(self.config).values())
        share = model * self.dtype.itemsize // self.engines.tp
        return min(self.bucket_bytes, max(SMALL_BUCKET, share // OVERLAPPING_BUCKETS))

    @cached_property
    def _adapter_names(self) -> frozenset[str]:
        return frozenset(logical_adapters(self.config, self.adapters) if self.adapters is not None else ())

    @cached_property
    def buckets(self) -> list[tuple[Copy, ...]]:
        return self._weight_buckets + self._adapter_buckets

    @property
    def frozen(self) -> int:
        """The number of first buckets whose weights training does not change."""
        return len(self._weight_buckets) if self.adapters is not None else 0

    @cached_property
    def _weight_buckets(self) -> list[tuple[Copy, ...]]:
        return self.plan.buckets(self.bucket_limit)

    @cached_property
    def _adapter_buckets(self) -> list[tuple[Copy, ...]]:
        return self.adapter_plan.buckets(self.bucket_limit) if self.adapters is not None else []

    def shares(self) -> tuple[list[SyncShare], list[SyncShare]]:
        """The shares of all trainer ranks, and of all engine ranks.

        Raises:
            ValueError: `transport` cannot connect a trainer rank with an engine rank that it sends to.
        """
        num_sources, num_targets = self.parallel.world, self.engines.num_ranks
        # By rank and bucket, the packets that leave it or reach it; by rank, the transports to its own peers only.
        Packets = list[list[list[PacketSpec]]]
        sent: Packets = [[[] for _ in self.buckets] for _ in range(num_sources)]
        taken: Packets = [[[] for _ in self.buckets] for _ in range(num_targets)]
        ways_out: dict[int, dict[int, str]] = defaultdict(dict)
        ways_in: dict[int, dict[int, str]] = defaultdict(dict)
        for bucket, copies in enumerate(self.buckets):
            routes: dict[tuple[int, int], list[Copy]] = defaultdict(list)
            for copy in copies:
                routes[copy.source_rank, copy.target_rank].append(copy)
            filled = [0] * num_sources  # bytes of each source's slot that this bucket's packets take so far
            for source, target in sorted(routes):
                if target not in ways_out[source]:
                    ways_out[source][target] = ways_in[target][source] = self._transport(source, target)
                read, written = self._slices(routes[source, target])
                spec = PacketSpec(target, filled[source], read)
                sent[source][bucket].append(spec)
                taken[target][bucket].append(PacketSpec(source, filled[source], written))
                filled[source] += spec.nbytes
        factor = scaling(self.adapters) if self.adapters is not None else None

        def share(rank: int, ways: dict, packets: Packets, padding: dict[str, int], **more: Any) -> SyncShare:
            buckets = tuple(map(tuple, packets[rank]))
            return SyncShare(rank, ways[rank], buckets, padding, frozen=self.frozen, **more)

        leaving = [share(rank, ways_out, sent, {}, fp8_block=self.fp8_block) for rank in range(num_sources)]
        arriving = [
            share(rank, ways_in, taken, self._padding(rank), scaling=factor) for rank in range(num_targets)
        ]
        return leaving, arriving

    def leaving(self, rank: int) -> list[Slice]:
        """All slices that one trainer rank sends in a complete version, without their buckets and without planning other ranks."""
        plans = self._plans(complete=True)
        return [item for plan in plans for item in self._slices(plan.copies_from(rank))[0]]

    def _padding(self, rank: int) -> dict[str, int]:
        padding = sglang_padding(self.config, self.engines.place(rank))
        if self.adapters is not None:
            padding |= served_padding(self.config, self.engines, rank, self.adapters)
        return padding

    def bytes_received(self, complete: bool = True) -> list[int]:
        """Bytes that each engine rank receives in a version. `complete`: including weights that training does not change."""
        return [
            sum(parts)
            for parts in zip(*(plan.bytes_received() for plan in self._plans(complete)), strict=True)
        ]

    def account(self, complete: bool = True) -> dict[str, int]:
        """Bytes of one sync into all engines: by link, in all, and the most that a rank receives and sends.

        Slices that stay on a device count as received and as sent, since they pass through a bucket, too.

        Args:
            complete: including weights that training does not change.
        """
        accounts = [plan.account() for plan in self._plans(complete)]
        received = self.bytes_received(complete)
        sent = [
            sum(sum(by_link.values()) for by_link in of_rank)
            for of_rank in zip(*(account.sent_by_link for account in accounts), strict=True)
        ]
        links = accounts[0].by_link
        return {
            **{f"bytes_{link}": sum(account.by_link[link] for account in accounts) for link in links},
            "bytes_total": sum(received),
            "bytes_max_per_rank": max(received),
            "bytes_sent_max_per_rank": max(sent),
        }

    def _plans(self, complete: bool) -> list[Plan]:
        """The plans of a version."""
        if self.adapters is None:
            return [self.plan]
        return [self.plan, self.adapter_plan] if complete else [self.adapter_plan]

    def _slices(self, copies: list[Copy]) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
        """The slices of a packet, as its source and as its target see them."""
        leaving, arriving = [], []
        for copy in copies:
            dtype, reading = self._travels(copy.tensor)
            local = copy.source_local.removesuffix(SCALES) if reading == SCALE else copy.source_local
            leaving.append(Slice(copy.tensor, local, copy.source_box, dtype, reading))
            arriving.append(Slice(copy.tensor, copy.target_local, copy.target_box, dtype))
        return tuple(leaving), tuple(arriving)

    def _travels(self, tensor: str) -> tuple[str, str]:
        """The name of the type in which a logical tensor travels, and how its source reads it."""
        if tensor not in self._known_travels:
            reading = CONVERT
            if self.fp8_block is not None and tensor not in self._adapter_names:
                reading = SCALE if tensor.endswith(SCALES) else QUANTISE if is_quantised(tensor) else CONVERT
            self._known_travels[tensor] = str(self.dtype_of(tensor)).removeprefix("torch."), reading
        return self._known_travels[tensor]

    @cached_property
    def _known_travels(self) -> dict[str, tuple[str, str]]:
        return {}

    def _transport(self, source: int, target: int) -> str:
        here = self.source_places[source] if self.source_places is not None else None
        there = self.target_places[target] if self.target_places is not None else None
        known, cuda = here is not None and there is not None, self.device == "cuda"
        same_node = here is not None and there is not None and here.node == there.node
        # A process maps memory of the GPUs that it sees, and an engine's process may not see the trainer's others.
        near = here == there if cuda and known else same_node
        mapped = IPC if cuda else SHARED
        if self.transport == AUTO:
            return mapped if near else P2P
        ends = f"rollout.sync_transport={self.transport}: trainer rank {source} sends to engine rank {target}"
        if self.transport == SHARED and known and not near:
            raise ValueError(f"{ends}, which runs on {there}, not on {here}; {AUTO} reaches it")
        if self.transport == P2P and cuda and known and near:
            raise ValueError(
                f"{ends} on the same GPU, where NCCL connects no two processes; {AUTO} reaches it"
            )
        return mapped if self.transport == SHARED else P2P
