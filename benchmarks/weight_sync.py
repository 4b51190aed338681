"""Seconds, bytes and memory of a weight sync: megarl's, compared with the full-gather way, in one run on one machine.

Trainer ranks (gloo) and engine ranks are processes of their own; rank i of both shares device i, as where trainer and
engine are colocated and engine ranks are placed where most of their weights lie already. Trainer ranks hold Megatron's shards of a random model, engine ranks SGLang's parameters, empty. Four ways,
on the same shards, in the same buckets:

- megarl: slices go from shard to shard through memory that both ends map; each is verified where it arrives;
- megarl p2p: the same, but all of it over gloo, as between machines;
- adapters: of a model with low-rank adapters that engines serve next to the weights: the adapters alone, through memory
  that both ends map, as in every version but the first;
- full gather (`full_gather.py`): every trainer rank gathers every full tensor, the engine rank on its device slices them.

Cases named `apart` have 1, 2 and 4 engines with devices of their own; they have one way, over gloo, in which engines pass packets on.

In each round all of them take their turn. A time is that of the slowest rank from a common start. A first round of each
(connections, first touch) is not counted; after it the engine ranks' parameters are compared with the model's tensors.

    python benchmarks/weight_sync.py --out weight_sync.json
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from facts import announce, write_report
from rich.console import Console
from rich.table import Table
from weight_sync_cases import CASES, DTYPE, Case, lora_of, model_of, sync_plan
from weight_sync_ranks import TIMEOUT, Ranks, answers, call, full_gather

from megarl.weight_sync.layouts import hf_layout
from megarl.weight_sync.receiver import InboxFile
from megarl.weight_sync.sync_plan import APART

ADAPTERS = "adapters"
P2P = "megarl p2p"
TRANSPORTS = {"megarl": "shared_memory", P2P: "p2p", ADAPTERS: "shared_memory"}
GATHER = "full gather"
WAYS = (*TRANSPORTS, GATHER)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}


class Megarl:
    """megarl's way, by one transport. `figures`: of the last round, the most of any rank."""

    def __init__(self, ranks: Ranks, case: Case, way: str, bucket_bytes: int, lora_rank: int) -> None:
        self._ranks, self._way, self._version, self._whole = ranks, way, 0, way != ADAPTERS
        adapters = lora_of(case, lora_rank) if way == ADAPTERS else None
        plan = sync_plan(case, bucket_bytes, TRANSPORTS[way], adapters)
        sources, targets = plan.shares()
        self._peers, self._chain = plan.peers(), plan.way == APART
        for pipe, share in zip(ranks.trainers, sources, strict=True):
            pipe.send(("outbox", (way, share)))
        addresses = {address.rank: address for address in answers(ranks.trainers)}
        hub = addresses[0].hub
        if hub is not None:
            call(ranks.trainers, "hub", (way, hub))
        # Links are made while the first version is sent, so its commands go out before answers are waited for.
        for pipe in ranks.trainers:
            pipe.send(("send", (way, 0, True)))
        for pipe, share in zip(ranks.engines, targets, strict=True):
            pipe.send(("inbox", (way, InboxFile(share, addresses, hub, TIMEOUT))))
            pipe.send(("receive", (way, 0, True)))
        answers(ranks.engines)
        answers([*ranks.trainers, *ranks.engines])
        self._planned = (plan.plan if adapters is None else plan.adapter_plan).account()

    def round(self) -> dict[str, int]:
        self._version += 1
        for pipe in self._ranks.engines:
            pipe.send(("receive", (self._way, self._version, self._whole)))
        for pipe in self._ranks.trainers:
            pipe.send(("send", (self._way, self._version, self._whole)))
        received, sent = answers(self._ranks.engines), answers(self._ranks.trainers)
        planned = [sum(by_link.values()) for by_link in self._planned.received]
        if [written for written, _ in received] != planned:
            raise RuntimeError(f"{self._way}: written were {received}, planned {planned} bytes")
        buffers = [sum(pair) for pair in zip(*(_padded(part, 8) for part in (sent, received)), strict=True)]
        return {
            "bytes_received_max": max(
                by_link["intra_node"] + by_link["inter_node"] for by_link in self._planned.received
            ),
            "extra_bytes_max": max(buffers)
            if not self._chain
            else max(buffer for _, buffer in (*sent, *received)),
            "bytes_total": sum(planned),
            "bytes_sent_max": max(count for count, _ in sent),
            "peers_max": max(self._peers),
        }


def ways_of(case: Case) -> tuple[str, ...]:
    return (P2P,) if case.apart else WAYS


def _padded(found: list[tuple[int, int]], count: int) -> list[int]:
    """Buffer bytes by device; there may be fewer ranks of a kind than devices."""
    return [buffer for _, buffer in found] + [0] * (count - len(found))


class GatherAll:
    """The full-gather way."""

    def __init__(self, ranks: Ranks, case: Case, bucket_bytes: int) -> None:
        self._ranks, self._way, self._received = ranks, full_gather(case, bucket_bytes), 0
        size = self._way.bucket_size // DTYPE.itemsize
        memory = [torch.empty(size, dtype=DTYPE).share_memory_() for _ in ranks.trainers]
        for pipe, full in zip(ranks.trainers, memory, strict=True):
            pipe.send(("full", full))
        for rank, pipe in enumerate(ranks.engines):
            pipe.send(("full", memory[rank % len(memory)]))
        answers(ranks.all)
        self.round()

    def round(self) -> dict[str, int]:
        for bucket in range(len(self._way.buckets)):
            gathered = call(self._ranks.trainers, "gather", bucket)
            call(self._ranks.engines, "load", bucket)
        so_far = max(received for received, _ in gathered)
        received, self._received = so_far - self._received, so_far
        return {"bytes_received_max": received, "extra_bytes_max": max(extra for _, extra in gathered)}


def measure(name: str, case: Case, bucket_bytes: int, rounds: int, lora_rank: int) -> dict[str, Any]:
    """All ways of a case."""
    model = sum(piece.box.numel for piece in hf_layout(model_of(case)).pieces(0)) * DTYPE.itemsize
    ways = ways_of(case)
    result: dict[str, Any] = {"case": name, "model_bytes": model, **{way: {"seconds": []} for way in ways}}
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(case, bucket_bytes, lora_rank, folder)
        running: dict[str, Megarl | GatherAll] = {}
        for way in ways:
            one = (
                GatherAll(ranks, case, bucket_bytes)
                if way == GATHER
                else Megarl(ranks, case, way, bucket_bytes, lora_rank)
            )
            running[way] = one
            if way == ADAPTERS and not all(call(ranks.engines, "check adapters")):
                raise RuntimeError(f"{name}: an engine rank serves other adapters than the trainer's")
            if not all(call(ranks.engines, "check")):
                raise RuntimeError(f"{name}, {way}: an engine rank holds other weights than the trainer's")
        for _ in range(rounds):
            for way in ways:
                begun = time.perf_counter()
                figures = running[way].round()
                result[way]["seconds"].append(time.perf_counter() - begun)
                result[way] |= figures
        ranks.close()
    for way in ways:
        result[way]["median_seconds"] = statistics.median(result[way]["seconds"])
    return result


def show(results: list[dict[str, Any]]) -> None:
    """One row a transition; p2p moves the same bytes as shared memory. Then the same of adapters alone, and of engines apart."""
    apart = [result for result in results if ADAPTERS not in result]
    results = [result for result in results if ADAPTERS in result]
    full = [way for way in WAYS if way != ADAPTERS]
    table = Table(title=f"{' | '.join(full)}: the most of any rank, in MB; seconds as median (least-most)")
    for heading in ("transition", "model", "received from others", "extra memory", "seconds", "times faster"):
        table.add_column(heading, justify="left" if heading == "transition" else "right", no_wrap=True)
    for result in results:
        ways = [result[way] for way in full]
        received = [f"{way['bytes_received_max'] / 1e6:.0f}" for way in ways]
        extra = [f"{way['extra_bytes_max'] / 1e6:.0f}" for way in ways]
        seconds = [
            f"{way['median_seconds']:.2f} ({min(way['seconds']):.2f}-{max(way['seconds']):.2f})"
            for way in ways
        ]
        faster = [f"{ways[-1]['median_seconds'] / way['median_seconds']:.1f}" for way in ways[:-1]]
        cells = [" | ".join(part) for part in (received, extra, seconds, faster)]
        table.add_row(result["case"], f"{result['model_bytes'] / 1e6:.0f}", *cells)
    Console(width=160).print(table)
    table = Table(title="weights | adapters alone: sent in all, in MB; seconds as median")
    for heading in ("transition", "sent", "seconds", "times fewer bytes", "times faster"):
        table.add_column(heading, justify="left" if heading == "transition" else "right", no_wrap=True)
    for result in results:
        weights, adapters = result["megarl"], result[ADAPTERS]
        cells = [
            " | ".join(f"{way['bytes_total'] / 1e6:.1f}" for way in (weights, adapters)),
            " | ".join(f"{way['median_seconds']:.3f}" for way in (weights, adapters)),
            f"{weights['bytes_total'] / adapters['bytes_total']:.0f}",
            f"{weights['median_seconds'] / adapters['median_seconds']:.1f}",
        ]
        table.add_row(result["case"], *cells)
    Console(width=160).print(table)
    table = Table(
        title="engines with devices of their own, over gloo: the most of any rank, in MB; seconds as median (least-most)"
    )
    for heading in ("transition", "model", "sent by a trainer rank", "extra memory", "peers", "seconds"):
        table.add_column(heading, justify="left" if heading == "transition" else "right", no_wrap=True)
    for result in apart:
        way = result[P2P]
        sizes = [result["model_bytes"], way["bytes_sent_max"], way["extra_bytes_max"]]
        least, most = min(way["seconds"]), max(way["seconds"])
        seconds = f"{way['median_seconds']:.2f} ({least:.2f}-{most:.2f})"
        table.add_row(
            result["case"], *(f"{size / 1e6:.0f}" for size in sizes), str(way["peers_max"]), seconds
        )
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layers", type=int, help="of the model (default: enough for about 270 MB)")
    parser.add_argument("--bucket-mb", type=int, default=32, help="MiB of a bucket (default 32)")
    parser.add_argument("--lora-rank", type=int, default=16, help="of the adapters (default 16)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # for the ranks
    facts = announce(("torch", "isal", "megarl"))
    results = []
    for name in arguments.cases:
        case = CASES[name] if arguments.layers is None else replace(CASES[name], layers=arguments.layers)
        bucket_bytes = arguments.bucket_mb << 20
        results.append(measure(name, case, bucket_bytes, arguments.rounds, arguments.lora_rank))
        print(f"{name}: done")
    show(results)
    write_report(arguments.out, **facts, results=results)


if __name__ == "__main__":
    main()
