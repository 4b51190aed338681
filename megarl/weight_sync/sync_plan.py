"""The plan of a weight sync, from Megatron shards to SGLang shards: which slices each rank reads, in which bucket, for which engine
ranks, and by which way.

The controller works the plan out once (`SyncPlan.shares`) and gives each rank its own share. Each trainer rank then
packs the slices of its share (sender.py). The receiver inside each SGLang rank (receiver.py) copies
the slices into SGLang's own parameters, reads them back, and compares every checksum.

A sync has one of three ways (`SyncPlan.way`):

- `MAPPED`: every engine rank maps the memory of all trainer ranks: a CPU machine, or a single GPU. Nothing crosses a network.
- `COLOCATED`: there is a trainer rank on the device of every engine rank. Trainer ranks exchange packets among themselves; an
  engine rank reads all that it needs from memory of trainer ranks that it maps.
- `APART`: engines have devices of their own. A trainer rank sends a packet to one engine alone, which passes it on to the next one, and so on
  (`chain`): the seconds of a sync do not grow with the number of engines, except by a bucket each.

In the last two all members of the exchange share one communicator.

Adapters that are served separately from the weights are a plan of their own, whose buckets come after those of the weights: a
version after the first begins with them.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import torch

from megarl.config.schema.models import LoraConfig
from megarl.layout import Delivery, Layout, Plan, RankPlace, make_plan
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
    GROUP,
    NIXL,
    QUANTISE,
    SCALE,
    ExchangeShare,
    Message,
    PacketSpec,
    Slice,
    SyncShare,
    packet_bytes,
)
from megarl.weight_sync.quantize import SCALES, Block, dtype_in_fp8, is_quantised, with_scales

AUTO, SHARED_MEMORY, P2P = "auto", "shared_memory", "p2p"  # rollout.sync_transport, which may be NIXL, too
WAYS = MAPPED, COLOCATED, APART = "mapped", "colocated", "apart"
# Slices that several trainer ranks hold may come from any of them, to share the sends. NCCL keeps buffers for every peer: so an engine rank
# takes slices of a trainer of n shards from FEW_PEERS / n of them at most (one at least).
FEW_PEERS = 8
# A small model's buckets are smaller than they may be, so that there are enough of them for packing, travelling and
# writing to overlap, but not so small that the fixed cost of a bucket would matter.
OVERLAPPING_BUCKETS = 8
SMALL_BUCKET = 4 << 20


@dataclass(frozen=True)
class SyncPlan:
    """The transition of one policy into the layout of all engines; equal wherever it is computed.

    Where the engines draft tokens with the model's layer for further tokens (`engines.draft`), the trainer's model must have it.

    Attributes:
        dtype: the type that travels and that the engines hold.
        bucket_bytes: the most that one rank sends or receives at a time.
        source_places, target_places: where trainer and engine ranks run (None: each on a machine of its own).
        device: "cpu" or "cuda": where both ends have their tensors.
        transport: AUTO: memory is shared wherever it can be. SHARED_MEMORY: there is nothing else. P2P: memory is shared on a device
            alone. NIXL: likewise, and NIXL carries messages.
        skip_unchanged: whether slices that have not changed are left out.
        fp8_block: rows and columns of a block, where the engines hold the model in float8 (None: they do not).
        adapters: the adapters that the engines serve separately, on top of unmerged weights; None: none.
        mtp: whether the trainer's ranks have multi-token prediction layers, of which engines without a draft have none.
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
    skip_unchanged: bool = False
    mtp: bool = False

    @cached_property
    def plan(self) -> Plan:
        """The plan of the weights."""
        source, target = self._layouts()
        if self.fp8_block is not None:
            shapes = logical_tensors(self.config, mtp=self.predicts)
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

    @property
    def predicts(self) -> bool:
        """Whether multi-token prediction layers are among the trainer's shards."""
        return self.mtp or self.engines.draft

    @cached_property
    def trained(self) -> Layout:
        """The trainer's shards."""
        return megatron_layout(self.config, self.parallel, "lm", self.source_places, self.predicts)

    def with_engines_at(self, places: tuple[RankPlace, ...]) -> "SyncPlan":
        """The same plan with engine ranks at other places; the trainer's shards do not depend on them, and are listed once for both plans."""
        moved = replace(self, target_places=places)
        vars(moved)["trained"] = self.trained
        return moved

    def _layouts(self) -> tuple[Layout, Layout]:
        """The trainer's shards and the engines'."""
        return self.trained, sglang_layout(self.config, self.engines, self.target_places)

    def _make_plan(self, source: Layout, target: Layout) -> Plan:
        largest = max(1, self.bucket_limit // 4)  # else one copy would hold up all others of its bucket
        few = max(1, FEW_PEERS // len(source.shards))
        # From a copy without the plan: else plan and object would refer to each other and hold gigabytes until the garbage collector runs.
        facts = replace(self)
        return make_plan(
            source, target, lambda tensor: facts.dtype_of(tensor).itemsize, largest, few, self._previous
        )

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
    def buckets(self) -> list[tuple[Delivery, ...]]:
        return self._weight_buckets + self._adapter_buckets

    @property
    def frozen(self) -> int:
        """The number of first buckets whose weights training does not change."""
        return len(self._weight_buckets) if self.adapters is not None else 0

    @cached_property
    def _weight_buckets(self) -> list[tuple[Delivery, ...]]:
        return self.plan.buckets(self.bucket_limit)

    @cached_property
    def _adapter_buckets(self) -> list[tuple[Delivery, ...]]:
        return self.adapter_plan.buckets(self.bucket_limit) if self.adapters is not None else []

    @cached_property
    def way(self) -> str:
        """One of WAYS.

        Raises:
            ValueError: `transport` is SHARED_MEMORY, and a trainer rank and an engine rank have none in common.
        """
        pairs = product(range(self.parallel.world), range(self.engines.num_ranks))
        if self.transport == SHARED_MEMORY:
            self._require_shared_memory(pairs)
            return MAPPED
        if all(self._near(source, target) for source, target in pairs):
            return MAPPED
        return APART if None in self._hosts else COLOCATED

    def _require_shared_memory(self, ranks: Iterable[tuple[int, int]]) -> None:
        here, there = self.source_places, self.target_places
        if here is None or there is None:
            return
        for source, target in ranks:
            if not self._near(source, target):
                raise ValueError(
                    f"rollout.sync_transport={self.transport}: trainer rank {source} may send to engine rank {target}, which "
                    f"runs on {there[target]}, not on {here[source]}; {AUTO} reaches it"
                )

    def _near(self, source: int, target: int) -> bool:
        """Whether an engine rank can map the memory of a trainer rank."""
        if self.source_places is None or self.target_places is None:
            return self.transport == SHARED_MEMORY
        here, there = self.source_places[source], self.target_places[target]
        # On GPUs a process maps memory of its own device alone: it may not see the others.
        by_device = self.device == "cuda" or self.transport in (P2P, NIXL)
        return here == there if by_device else here.node == there.node

    @cached_property
    def _hosts(self) -> tuple[int | None, ...]:
        """By engine rank the trainer rank on its device (None: there is none)."""
        if self.source_places is None or self.target_places is None:
            return (None,) * self.engines.num_ranks
        by_place = {place: rank for rank, place in reversed(list(enumerate(self.source_places)))}
        return tuple(by_place.get(place) for place in self.target_places)

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """The order in which engines pass packets on: engines on nodes of the trainer first, neighbours after each other."""
        nodes = {place.node for place in self.source_places or ()}

        def far(engine: int) -> bool:
            first = engine * self.engines.tp
            return self.target_places is None or self.target_places[first].node not in nodes

        return tuple(sorted(range(self.engines.num_engines), key=lambda engine: (far(engine), engine)))

    @cached_property
    def _previous(self) -> dict[int, int]:
        """By engine rank, the engine rank that passes packets on to it; empty where trainer ranks send to all engine ranks."""
        if self.way != APART:
            return {}
        tp = self.engines.tp
        return {
            engine * tp + rank: before * tp + rank
            for before, engine in pairwise(self.chain)
            for rank in range(tp)
        }

    def shares(self) -> tuple[list[SyncShare], list[SyncShare]]:
        """The shares of all trainer ranks, and of all engine ranks.

        Raises:
            ValueError: as `way`.
        """
        num_sources, num_targets = self.parallel.world, self.engines.num_ranks
        trainers = [_Side(len(self.buckets)) for _ in range(num_sources)]
        engines = [_Side(len(self.buckets)) for _ in range(num_targets)]
        members = trainers + engines if self.way == APART else trainers
        for bucket, deliveries in enumerate(self.buckets):
            packets: dict[tuple[int, tuple[int, ...]], list[Delivery]] = defaultdict(list)
            for delivery in deliveries:
                packets[delivery.source_rank, delivery.target_ranks].append(delivery)
            packed = []
            for (source, targets), contents in sorted(packets.items()):
                read, written = self._slices(contents)
                start = trainers[source].place(bucket, read)
                direct = sum(target not in self._previous for target in targets)
                trainers[source].packets[bucket].append(
                    PacketSpec(source, targets, None, start, read, direct)
                )
                packed.append((source, targets, start, written))
            # Packets that trainer ranks receive for engine ranks lie after all those that they pack.
            for source, targets, start, written in packed:
                self._hand_over(bucket, source, targets, start, written, trainers, engines)
        crosses = any(messages for member in members for messages in member.sends)
        factor = scaling(self.adapters) if self.adapters is not None else None
        common: dict[str, Any] = {"frozen": self.frozen, "skip_unchanged": self.skip_unchanged}

        def exchange(side: _Side, member: int, behind: int) -> ExchangeShare | None:
            if not crosses or member >= len(members):
                return None
            sends, receives = (tuple(map(tuple, messages)) for messages in (side.sends, side.receives))
            transport = NIXL if self.transport == NIXL else GROUP
            return ExchangeShare(member, len(members), num_sources, sends, receives, behind, transport)

        leaving = [
            side.share(rank, {}, exchange(side, rank, 0), fp8_block=self.fp8_block, **common)
            for rank, side in enumerate(trainers)
        ]
        arriving = [
            side.share(
                rank, self._padding(rank), exchange(side, num_sources + rank, 1), scaling=factor, **common
            )
            for rank, side in enumerate(engines)
        ]
        return leaving, arriving

    def _hand_over(
        self,
        bucket: int,
        source: int,
        targets: tuple[int, ...],
        start: int,
        slices: tuple[Slice, ...],
        trainers: list["_Side"],
        engines: list["_Side"],
    ) -> None:
        """Enter into the sides how a packet, which lies at `start` of its source's slot, reaches its targets."""
        sizes, num_sources = tuple([item.nbytes for item in slices]), len(trainers)
        found: dict[int, int] = {source: start}  # by member that has the packet, its offset there
        for target in targets:
            host = self._hosts[target]
            if self.way == MAPPED or (self.way == COLOCATED and self._near(source, target)):
                holder, member = source, source
            elif self.way == COLOCATED:
                assert host is not None
                holder, member = host, host
            else:
                holder, member = None, num_sources + target
            if member not in found:
                before = self._previous.get(target)
                sender = source if before is None else num_sources + before
                side = trainers[member] if member < num_sources else engines[member - num_sources]
                other = trainers[sender] if sender < num_sources else engines[sender - num_sources]
                found[member] = side.place(bucket, slices)
                there, here = found[sender], found[member]
                other.sends[bucket].append(Message(member, there, here, sizes))
                side.receives[bucket].append(Message(sender, here, there, sizes))
            if holder is not None:
                trainers[holder].mapped[bucket].add(target)
                engines[target].mapped[bucket].add(holder)
            spec = PacketSpec(source, targets, holder, found[member], slices)
            engines[target].packets[bucket].append(spec)

    def peers(self) -> list[int]:
        """By member of the exchange the number of others with which it exchanges messages in a complete version.

        Members are the trainer ranks, and, `APART`, the engine ranks after them; without an exchange nobody has peers.
        """
        num_sources = self.parallel.world
        met: list[set[int]] = [set() for _ in range(num_sources + self.engines.num_ranks)]
        for source, target in {pair for plan in self._plans(complete=True) for pair in plan.pairs()}:
            if self.way == MAPPED or (self.way == COLOCATED and self._near(source, target)):
                continue
            member = num_sources + target if self.way == APART else self._hosts[target]
            assert member is not None
            met[source].add(member)
            met[member].add(source)
        for rank, before in self._previous.items():
            met[num_sources + rank].add(num_sources + before)
            met[num_sources + before].add(num_sources + rank)
        return [len(peers) for peers in met][: None if self.way == APART else num_sources]

    def leaving(self, rank: int) -> list[Slice]:
        """All slices that one trainer rank sends in a complete version, without their buckets and without planning other ranks."""
        plans = self._plans(complete=True)
        return [item for plan in plans for item in self._slices(plan.deliveries_from(rank))[0]]

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

    def _slices(self, deliveries: list[Delivery]) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
        """The slices of a packet, as its source and as its target see them."""
        leaving, arriving = [], []
        for item in deliveries:
            dtype, reading = self._travels(item.tensor)
            local = item.source_local.removesuffix(SCALES) if reading == SCALE else item.source_local
            leaving.append(Slice(item.tensor, local, item.source_box, dtype, reading))
            arriving.append(Slice(item.tensor, item.target_local, item.target_box, dtype))
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


class _Side:
    """One rank's share while it is being made: by bucket its packets, ranks that share memory, messages, and the bytes of its slot."""

    def __init__(self, num_buckets: int) -> None:
        self.packets: list[list[PacketSpec]] = [[] for _ in range(num_buckets)]
        self.mapped: list[set[int]] = [set() for _ in range(num_buckets)]
        self.sends: list[list[Message]] = [[] for _ in range(num_buckets)]
        self.receives: list[list[Message]] = [[] for _ in range(num_buckets)]
        self._filled = [0] * num_buckets

    def place(self, bucket: int, slices: tuple[Slice, ...]) -> int:
        """Make room for one more packet in this rank's slot; returns its offset."""
        start = self._filled[bucket]
        self._filled[bucket] += packet_bytes([item.nbytes for item in slices])
        return start

    def share(
        self, rank: int, padding: dict[str, int], exchange: ExchangeShare | None, **more: Any
    ) -> SyncShare:
        mapped = tuple(tuple(sorted(ranks)) for ranks in self.mapped)
        size = max(self._filled, default=0)
        return SyncShare(rank, tuple(map(tuple, self.packets)), mapped, size, padding, exchange, **more)
