"""Megatron shards -> SGLang shards: who sends which slices, in which bucket, and how they are handed over.

Every trainer rank packs the slices that the plan makes it send to each engine rank (`SyncPlan.pack`). The
process that owns an engine puts the packets for each of its ranks into one shared-memory file and writes
a manifest beside it (`write_update`); the receiver inside SGLang (`megarl.rollout.receiver`) copies the
slices into SGLang's own parameters, reads them back, and compares every checksum.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from megarl.files import naming
from megarl.hybrid_engine.layouts import megatron_layout, sglang_layout
from megarl.hybrid_engine.packets import Packet, copy_bytes, pack
from megarl.layout import Copy, Plan, RankPlace, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, sglang_vocab_share
from megarl.models.dense import EMBEDDING, LM_HEAD


@dataclass(frozen=True)
class SyncPlan:
    """The transition of one policy into one engine's layout; equal wherever it is computed.

    Attributes:
        dtype: the type that travels and that the engine holds.
        bucket_bytes: the most that one engine rank receives at a time (a single larger slice excepted).
    """

    config: ModelConfig
    parallel: ParallelLayout
    engine_tp: int
    dtype: torch.dtype
    bucket_bytes: int
    source_places: tuple[RankPlace, ...] | None = None
    target_places: tuple[RankPlace, ...] | None = None

    @cached_property
    def plan(self) -> Plan:
        source = megatron_layout(self.config, self.parallel, "lm", self.source_places)
        return make_plan(source, sglang_layout(self.config, self.engine_tp, self.target_places))

    @cached_property
    def buckets(self) -> list[tuple[Copy, ...]]:
        return self.plan.buckets(self.bytes_of, self.bucket_bytes)

    def bytes_of(self, copy: Copy) -> int:
        return copy_bytes(copy, self.dtype)

    @cached_property
    def _routes(self) -> list[dict[tuple[int, int], list[Copy]]]:
        """Per bucket: (source rank, target rank) -> its copies in the plan's order."""
        routes: list[dict[tuple[int, int], list[Copy]]] = []
        for bucket in self.buckets:
            routes.append({})
            for copy in bucket:
                routes[-1].setdefault((copy.source_rank, copy.target_rank), []).append(copy)
        return routes

    def copies(self, bucket: int, source_rank: int, target_rank: int) -> list[Copy]:
        return self._routes[bucket].get((source_rank, target_rank), [])

    def pack(self, bucket: int, rank: int, parameters: Mapping[str, torch.Tensor]) -> list[Packet]:
        """What trainer rank `rank` sends of a bucket: one packet (maybe empty) for each engine rank."""
        return [
            pack(self.copies(bucket, rank, target), parameters, self.dtype)
            for target in range(self.engine_tp)
        ]

    def account(self) -> dict[str, float]:
        """Bytes of one sync into one engine: by link, in all, and the most that one rank receives."""
        links = {f"bytes_{link}": n for link, n in self.plan.bytes_by_link(self.bytes_of).items()}
        received = self.plan.bytes_received(self.bytes_of)
        return {**links, "bytes_total": sum(received), "bytes_max_per_rank": max(received)}


def write_update(
    folder: Path, sync: SyncPlan, version: int, bucket: int, packets: Sequence[Sequence[Packet]]
) -> list[Path]:
    """Write a bucket for every rank of an engine; returns the manifests' paths, by engine rank.

    Args:
        folder: a folder in shared memory, private to the engine; payloads of the bucket are overwritten.
        packets: `packets[source_rank][target_rank]`, as `SyncPlan.pack` gives them.
    """
    manifests = []
    for target in range(sync.engine_tp):
        payload = folder / f"payload-{target}.bin"
        entries: list[dict[str, object]] = []
        with naming(payload), payload.open("wb") as file:
            for source, by_target in enumerate(packets):
                packet, offset = by_target[target], file.tell()
                copies = sync.copies(bucket, source, target)
                for copy, crc32 in zip(copies, packet.crc32.tolist(), strict=True):
                    entries.append(_entry(copy, sync, offset, crc32))
                    offset += sync.bytes_of(copy)
                file.write(packet.data)
        manifest = folder / f"manifest-{target}.json"
        content = {
            "version": version,
            "bucket": bucket,
            "last": bucket == len(sync.buckets) - 1,
            "payload": str(payload),
            "entries": entries,
            "padding": _padding(sync, target),
        }
        manifest.write_text(json.dumps(content))
        manifests.append(manifest)
    return manifests


def _entry(copy: Copy, sync: SyncPlan, offset: int, crc32: int) -> dict[str, object]:
    return {
        "tensor": copy.tensor,
        "local": copy.target_local,
        "start": copy.target_box.start,
        "size": copy.target_box.size,
        "dtype": str(sync.dtype).removeprefix("torch."),
        "offset": offset,
        "nbytes": sync.bytes_of(copy),
        "crc32": crc32,
    }


def _padding(sync: SyncPlan, rank: int) -> dict[str, int]:
    """Local parameter -> its elements that no weight fills on engine rank `rank`: the vocabulary's padding."""
    share = sglang_vocab_share(sync.config, sync.engine_tp)
    real = max(0, min(share, sync.config.vocab_size - rank * share))
    if real == share:
        return {}
    names = [EMBEDDING] if sync.config.tie_word_embeddings else [EMBEDDING, LM_HEAD]
    return dict.fromkeys(names, (share - real) * sync.config.hidden_size)
