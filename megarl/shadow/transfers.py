"""Transfers out of a shadow rank other than its passes': a checkpoint, the weights for the engines, and its parts when they are released.

Everything up to the last copy from the device is the rank's own code. Replaced are the bytes of a checkpoint's file (left out:
metadata and `states.json` are really written and read, and peers are taken to hold nothing), and the engines' answers (immediate).
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl import platform
from megarl.checkpoints import dcp
from megarl.checkpoints.dcp import Chunk
from megarl.config import TrainConfig
from megarl.costs.phases import frees_engines
from megarl.megatron.checkpoint import checkpoint
from megarl.models import ModelConfig
from megarl.plan.sync import configured_sync
from megarl.shadow.tracker import Made, Tracker
from megarl.trainer.roles.adapters import served_adapters
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.dispatch import ENGINES
from megarl.trainer.workers.model import ModelWorker
from megarl.weight_sync.links import Token
from megarl.weight_sync.packets import PacketSpec, Slice, SyncShare, aligned
from megarl.weight_sync.sender import Outbox
from megarl.weight_sync.sync_plan import COLOCATED

ENGINE = 0  # the rank that everything goes to
WHOLE_BUCKETS = (
    3  # each slot is packed, and one of them anew; of later buckets only new kinds of slices are sent
)


@dataclass(frozen=True)
class Moved:
    """Bytes that the device had less when a part left it, and more when it was back."""

    freed: int
    back: int


@dataclass(frozen=True)
class Released:
    """A rank's parts, by name, as they left and came back; the bytes that stayed when all had left, and these by their makers."""

    parts: dict[str, Moved]
    stays: int
    makers: dict[Made, int]


def save_and_load(worker: ModelWorker, tracker: Tracker) -> int:
    """Save the rank's states and load them, as phases "save" and "load"; returns the bytes of the tensors in its file."""
    from megarl.trainer.workers.model import rank_states

    if worker.spec.adapted:  # else its files are looked at, which a recipe need not have
        worker.base_model = checkpoint.BaseModel(worker.spec.path, "")
    with tempfile.TemporaryDirectory() as folder, _without_bytes() as sizes:
        with tracker.phase("save"):
            checkpoint.save_states(folder, rank_states(worker))
            gc.collect()
        with tracker.phase("load"):
            states = rank_states(worker)
            # Tensors that another stage saves, such as an embedding of which this one has a copy, are in no file here.
            checkpoint.load_states(folder, replace(states, places=states.places.saved()))
            gc.collect()
    return sum(sizes)


@contextmanager
def _without_bytes() -> Iterator[list[int]]:
    """A checkpoint of one rank whose tensors have a place in its file and no bytes there; yields their sizes, as they are saved."""
    objects: dict[tuple[str, int], Any] = {}
    sizes: list[int] = []

    def save(value: Any, file: Any) -> tuple[int, int]:
        start = file.tell()
        file.write(b"\0")
        if isinstance(value, torch.Tensor):
            assert value.device.type == "cpu", "what is written is in the host's memory"
            sizes.append(value.nbytes)
        else:
            objects[Path(file.name).name, start] = value
        return start, 1

    dtypes: dict[Chunk, torch.dtype] = {}

    def load(reader: dcp.DCPReader, chunk: Chunk) -> torch.Tensor:
        if chunk not in dtypes:
            dtypes.update({own: tensor.dtype for tensor in reader.tensors.values() for own in tensor.chunks})
        return torch.empty(chunk.box.size, dtype=dtypes[chunk])

    def load_object(reader: dcp.DCPReader, key: str) -> Any:
        stored = reader.objects[key]
        return objects[stored.file, stored.offset]

    def gather(value: Any) -> list[Any]:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return [value if peer == rank else _nothing_of(value) for peer in range(world)]

    with (
        patch.object(dcp, "_save", save),
        patch.object(dcp.DCPReader, "load", load),
        patch.object(dcp.DCPReader, "load_object", load_object),
        patch.object(checkpoint, "_gather", gather),
        patch.object(checkpoint, "_check_complete", lambda held, shapes: None),  # one rank's is incomplete
    ):
        yield sizes


def _nothing_of(value: Any) -> Any:
    """The value of a rank without tensors in place of `value`: contents of a file, its parts, or its errors."""
    if isinstance(value, dcp.Contents):
        return dcp.Contents({}, {})
    return ([], {}, (0, None)) if len(value) == 3 else ([], set())


@dataclass(frozen=True)
class Sent:
    """A version as a rank packed it: bytes of its slices; by bucket the number of slices, and of kernels that packing launched."""

    nbytes: int
    buckets: list[tuple[int, int]]


class _CountedOutbox(Outbox):
    """A rank's outbox that nobody takes from: a bucket is taken when it is packed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.launches: list[int] = []

    def _pack(self, token: Token, *more: Any) -> None:
        with _Launches() as found:
            super()._pack(token, *more)
        self.launches.append(found.count)


class _Launches(TorchDispatchMode):
    """Counts kernels that are launched: operations of torch that compute something on a device, and Triton's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __enter__(self) -> _Launches:
        self._patches = ExitStack()
        if platform.device().type == "cuda":
            from triton.runtime.jit import JITFunction

            run = JITFunction.run

            def launch(*arguments: Any, **options: Any) -> Any:
                self.count += 1
                return run(*arguments, **options)

            self._patches.enter_context(patch.object(JITFunction, "run", launch))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        outputs = [value for value in tree_leaves(found) if isinstance(value, torch.Tensor)]
        on_device = any(value.device.type == "cuda" for value in outputs)
        makes_memory = func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_strided)
        self.count += on_device and not makes_memory and not func.is_view
        return found


def send(config: TrainConfig, model: ModelConfig, worker: ActorWorker, tracker: Tracker) -> Sent:
    """Pack a version of the weights for the engines as phase "sync", and give the slots up."""
    policy = config.actor_rollout_ref
    sync = configured_sync(config, model, policy.rollout)
    freed = frees_engines(config, config.resource_pools)
    adapters, _ = served_adapters(policy.rollout, model, policy.model.lora, freed)
    slices = replace(sync, adapters=adapters).leaving(worker.info.rank)
    buckets = _buckets(slices, sync.bucket_limit)
    packed = max((spec.nbytes for (spec,) in buckets), default=0)  # of a replica others may send everything
    # Where engines share the devices, slots also have room for packets of other ranks: for as many bytes as leave.
    received = packed if sync.way == COLOCATED else 0
    share = SyncShare(
        worker.info.rank,
        buckets,
        ((),) * len(buckets),
        packed + received,
        {},
        fp8_block=sync.fp8_block,
        skip_unchanged=policy.rollout.sync_skip_unchanged,
    )
    with tracker.phase("sync"), tempfile.TemporaryDirectory() as folder:
        outbox = _CountedOutbox(share, folder, "127.0.0.1", platform.device().type, 1.0)
        worker.outboxes[ENGINES] = outbox
        held = {ENGINE: None} if policy.rollout.sync_skip_unchanged else None
        sent = worker.send_weights(1, held, merged=adapters is None)
        if held is not None:
            worker.send_weights(2, {ENGINE: 1}, merged=adapters is None)
        outbox.close()
        worker.outboxes.clear()
        gc.collect()
    slices = [sum(len(spec.slices) for spec in specs) for specs in buckets]
    return Sent(sent.bytes_sent, list(zip(slices, outbox.launches, strict=False)))


def _buckets(slices: Sequence[Slice], limit: int) -> tuple[tuple[PacketSpec, ...], ...]:
    """Slices in their order as packets of at most `limit` bytes; of slices after the first few only new kinds."""
    buckets, current, size, seen = [], [], 0, set()
    for item in slices:
        kind = item.reading, item.dtype, item.box.size
        if len(buckets) >= WHOLE_BUCKETS and kind in seen:
            continue
        seen.add(kind)
        if current and size + aligned(item.nbytes) > limit:
            buckets.append(tuple(current))
            current, size = [], 0
        current.append(item)
        size += aligned(item.nbytes)
    if current:
        buckets.append(tuple(current))
    return tuple((PacketSpec(0, (ENGINE,), None, 0, bucket),) for bucket in buckets)


def release_and_resume(worker: ModelWorker, tracker: Tracker) -> Released:
    """Have the rank's parts leave its device one after the other as phase "release", and come back as phase "resume"."""
    freed, back = {}, {}
    with tracker.phase("release"):
        for part in worker.parts:
            before = tracker.current
            worker.release_memory([part])
            freed[part] = before - tracker.current
        gc.collect()
        stays, makers = tracker.current, tracker.live()
    with tracker.phase("resume"):
        for part in worker.parts:
            before = tracker.current
            worker.resume_memory([part])
            back[part] = tracker.current - before
    return Released({part: Moved(freed[part], back[part]) for part in freed}, stays, makers)
