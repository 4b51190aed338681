"""Step `sync`: a trainer rank and an engine rank in two processes; versions of a model's weights go from one to the other.

On one GPU they go by CUDA IPC. The engine's side is megarl's receiver on tensors of its layout, without SGLang: measured are
packing, handing over, writing and verifying.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from megarl.gpu_test.runner import Check
from megarl.layout import Layout, RankPlace
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.util.packages import shipped
from megarl.weight_sync.layouts import EngineLayout
from megarl.weight_sync.receiver import InboxFile, Receiver
from megarl.weight_sync.sender import Outbox
from megarl.weight_sync.sync_plan import SyncPlan

BUCKET = 256 << 20  # as of rollout.sync_bucket_mb
SECONDS = 120.0
POLL_SECONDS = 0.5
NUM_VERSIONS = 3


def run(folder: Path) -> Iterator[Check]:
    yield from sync_versions(folder, config_folder(), "cuda")


def config_folder() -> str:
    """The folder of Qwen2.5-0.5B's config.json, without weights."""
    return str(shipped() / "recipes" / "models" / "qwen2.5-0.5b")


def sync_versions(folder: Path, model: str, device: str) -> Iterator[Check]:
    """Send versions of the model whose config.json is in `model`, and compare each element that came."""
    sync = single_rank_plan(model, torch.bfloat16, device)
    _, (share,) = sync.shares()
    yield Check("memory is shared", share.near == (0,) and share.exchange is None, sync.way)
    context = torch.multiprocessing.get_context("spawn")
    told, results = context.Queue(), context.Queue()
    process = context.Process(target=_send, args=(model, str(folder), device, told, results))
    process.start()
    try:
        tensors = {
            name: torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
            for name, shape in shapes(sync.plan.target).items()
        }
        address = told_by(process, told)
        receiver = Receiver(
            _Tensors(tensors), InboxFile(replace(share, padding={}), {0: address}, None, SECONDS), "session"
        )
        for version in range(1, NUM_VERSIONS + 1):
            assert told_by(process, results) == version  # the version to be sent is there
            begun = time.perf_counter()
            received = receiver.receive(version)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
            wrong = _differences(sync, tensors, version)
            parts = ", ".join(f"{name} {value:.3f}" for name, value in received.seconds.items())
            rate = received.bytes_written / seconds / 1e9
            yield Check(
                f"version {version}",
                not wrong,
                f"wrong: {', '.join(wrong)}"
                if wrong
                else f"{received.bytes_written / 1e9:.2f} GB in {seconds:.3f} s ({rate:.1f} GB/s): {parts}",
                {"bytes": received.bytes_written, "seconds": seconds, "gb_per_s": rate, **received.seconds},
            )
        process.join(SECONDS)
        yield Check("the sender ends", process.exitcode == 0, f"exit code {process.exitcode}")
    finally:
        process.kill()


def told_by(process: Any, queue: Any) -> Any:
    """The next value that a process puts into its queue.

    Raises:
        RuntimeError: the process has ended, or put nothing there within SECONDS.
    """
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        alive = process.is_alive()  # asked first: all that an ended process has put into its queue is there
        with suppress(Empty):
            return queue.get(timeout=POLL_SECONDS)
        if not alive:
            raise RuntimeError(f"the sender ended with exit code {process.exitcode}")
    raise RuntimeError(f"the sender gave no answer within {SECONDS:g} s")


def single_rank_plan(model: str, dtype: torch.dtype, device: str) -> SyncPlan:
    """The plan of a sync from one trainer rank to one engine rank on the same device."""
    place = (RankPlace("node", "0"),)
    config, alone = read_model_config(model), ParallelLayout(world=1)
    return SyncPlan(config, alone, EngineLayout(1), dtype, BUCKET, place, place, device=device)


def _send(model: str, folder: str, device: str, told: Any, results: Any) -> None:
    """The trainer rank, in a process of its own."""
    sync = single_rank_plan(model, torch.bfloat16, device)
    (share,), _ = sync.shares()
    outbox = Outbox(share, folder, "127.0.0.1", device, SECONDS)
    told.put(outbox.address)
    known = shapes(sync.plan.source)
    for version in range(1, NUM_VERSIONS + 1):
        parameters = {name: _values(name, shape, version).to(device) for name, shape in known.items()}
        results.put(version)
        outbox.send(version, parameters)


def _differences(sync: SyncPlan, tensors: dict[str, torch.Tensor], version: int) -> list[str]:
    """The tensors with an element that differs from the sent one."""
    known, sources, wrong = shapes(sync.plan.source), {}, []
    for copy in sync.plan.copies:
        if copy.source_local not in sources:
            sources[copy.source_local] = _values(copy.source_local, known[copy.source_local], version)
        found = tensors[copy.target_local][copy.target_box.slices].cpu()
        if not torch.equal(found, sources[copy.source_local][copy.source_box.slices].view(found.shape)):
            wrong.append(copy.target_local)
    return sorted(set(wrong))


def _values(name: str, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """Numbers that depend on the tensor's name, on the version and on the place."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {version}".encode()))
    return torch.randint(-1 << 15, 1 << 15, shape, dtype=torch.int16, generator=generator).bfloat16()


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """The local tensors of the layout's only rank, as large as its pieces need them."""
    found: dict[str, tuple[int, ...]] = {}
    for piece in layout.pieces(0):
        ends = [first + size for first, size in zip(piece.local_box.start, piece.local_box.size, strict=True)]
        known = found.get(piece.local, tuple(ends))
        found[piece.local] = tuple(max(pair) for pair in zip(known, ends, strict=True))
    return found


class _Tensors(torch.nn.Module):
    """A model that has these parameters, whatever their names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
        yield from self.tensors.values()
