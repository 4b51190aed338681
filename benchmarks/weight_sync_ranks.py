"""The processes that weight_sync.py drives: trainer ranks and engine ranks, each answering commands over a pipe."""

import multiprocessing
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from full_gather import FullGather, Gatherer, loader
from weight_sync_cases import DTYPE, Case, lora_of, model_of

from megarl.layout import Layout, Piece
from megarl.models.lora import logical_adapters, scaling
from megarl.weight_sync.layouts import (
    hf_layout,
    megatron_adapters,
    megatron_layout,
    served_adapters,
    sglang_layout,
)
from megarl.weight_sync.receiver import Receiver
from megarl.weight_sync.sender import Outbox
from megarl.weight_sync.served_model import remember_manager

TIMEOUT = 300.0


def full_gather(case: Case, bucket_bytes: int) -> FullGather:
    config = model_of(case)
    return FullGather(
        megatron_layout(config, case.train),
        hf_layout(config),
        sglang_layout(config, case.engine),
        DTYPE,
        bucket_bytes,
    )


def empty_parameters(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """A rank's local tensors, just large enough for its pieces."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in layout.pieces(rank):
        ends = [start + size for start, size in zip(*piece.local_box, strict=True)]
        shapes[piece.local] = tuple(map(max, zip(shapes.get(piece.local, ends), ends, strict=True)))
    return {name: torch.zeros(shape, dtype=DTYPE) for name, shape in shapes.items()}


def values(tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The full tensor's values, the same wherever they are made."""
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.encode()))
    return torch.randn(shape, generator=generator, dtype=DTYPE)


def shapes_of(complete: Layout) -> dict[str, tuple[int, ...]]:
    return {piece.tensor: piece.box.size for piece in complete.pieces(0)}


def each_piece(
    layout: Layout, shapes: dict[str, tuple[int, ...]], rank: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Each piece of a rank with its values; pieces of a tensor come together. `shapes`: of all logical tensors."""
    for piece in sorted(layout.pieces(rank), key=lambda piece: piece.tensor):
        yield piece, values(piece.tensor, shapes[piece.tensor])[piece.box.slices]


class Engine(torch.nn.Module):
    """Parameters under any name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = {
            name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()
        }

    def named_parameters(self, *args: Any, **kwargs: Any):
        return iter(self.tensors.items())


class Served:
    """The adapters that an engine rank serves: a model for its receiver, with slots where SGLang's LoRAManager has them."""

    def __init__(self, parameters: dict[str, torch.Tensor], case: Case, lora_rank: int, rank: int) -> None:
        config, lora = model_of(case), lora_of(case, lora_rank)
        self._layout, self._rank = served_adapters(sglang_layout(config, case.engine), config, lora), rank
        self._shapes, self._slots = logical_adapters(config, lora), empty_parameters(self._layout, rank)
        self.model = Engine(parameters)
        layers = {
            name.removesuffix(".lora_A"): SimpleNamespace(
                A_buffer=slot[None], B_buffer=self._slots[name.removesuffix("A") + "B"][None]
            )
            for name, slot in self._slots.items()
            if name.endswith(".lora_A")
        }
        manager = SimpleNamespace(
            base_model=self.model,
            loras={"policy": SimpleNamespace(scaling=scaling(lora))},
            fetch_new_loras=lambda uids: None,
            memory_pool=SimpleNamespace(uid_to_buffer_id={"policy": 0}),
            lora_modules=[layers],
        )
        remember_manager(None, manager)

    def right(self) -> bool:
        """Whether the slots hold the trainer's adapters; they are zeros afterwards."""
        right = all(
            torch.equal(self._slots[piece.local][piece.local_box.slices], part)
            for piece, part in each_piece(self._layout, self._shapes, self._rank)
        )
        for slot in self._slots.values():
            slot.zero_()
        return right


def train_rank(
    rank: int, case: Case, bucket_bytes: int, lora_rank: int, folder: str, pipe: Connection
) -> None:
    """Commands: ("outbox", (way, share)), ("hub", (way, address)), ("send", (way, version, whole)), ("full", shared memory), ("gather", bucket)."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=case.train.world
    )
    config, lora = model_of(case), lora_of(case, lora_rank)
    layout = megatron_layout(config, case.train)
    parameters: dict[str, torch.Tensor] = {}
    for of_rank, shapes in (
        (layout, shapes_of(hf_layout(config))),
        (megatron_adapters(layout, config, lora), logical_adapters(config, lora)),
    ):
        parameters |= empty_parameters(of_rank, rank)
        for piece, part in each_piece(of_rank, shapes, rank):
            parameters[piece.local][piece.local_box.slices].copy_(part)
    outboxes: dict[str, Outbox] = {}
    gatherer: Gatherer | None = None
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        kind, argument = command
        if kind == "outbox":
            way, share = argument
            outboxes[way] = Outbox(share, folder, "127.0.0.1", "cpu", TIMEOUT)
            pipe.send(outboxes[way].address)
        elif kind == "hub":
            way, hub = argument
            outboxes[way].join(hub)
            pipe.send("ready")
        elif kind == "send":
            way, version, complete = argument
            sent = outboxes[way].send(version, parameters, complete=complete)
            pipe.send((sent.bytes_sent, sent.buffer_bytes))
        elif kind == "full":
            gatherer = Gatherer(full_gather(case, bucket_bytes), rank, parameters, argument)
            pipe.send("ready")
        else:
            gatherer.gather(argument)
            pipe.send((gatherer.bytes_received, gatherer.extra_bytes))
    dist.destroy_process_group()


def engine_rank(
    rank: int, case: Case, bucket_bytes: int, lora_rank: int, folder: str, pipe: Connection
) -> None:
    """Commands: ("inbox", (way, InboxFile)), ("receive", (way, version, whole)), ("full", memory), ("load", bucket),
    ("check",), ("check adapters",)."""
    torch.set_num_threads(1)
    layout, shapes = sglang_layout(model_of(case), case.engine), shapes_of(hf_layout(model_of(case)))
    parameters = empty_parameters(layout, rank)
    model, served = Engine(parameters), Served(parameters, case, lora_rank, rank)
    receivers: dict[str, Receiver] = {}
    load = None
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        kind, argument = command
        if kind == "inbox":
            way, told = argument
            adapted = told.share.scaling is not None
            receivers[way] = Receiver(served.model if adapted else model, told, way)
            pipe.send("ready")
        elif kind == "receive":
            way, version, complete = argument
            received = receivers[way].receive(version, complete)
            pipe.send((received.bytes_written, received.buffer_bytes))
        elif kind == "full":
            load = loader(full_gather(case, bucket_bytes), rank, parameters, argument)
            pipe.send("ready")
        elif kind == "load":
            load(argument)
            pipe.send("loaded")
        elif kind == "check adapters":
            pipe.send(served.right())
        else:
            right = all(
                torch.equal(parameters[piece.local][piece.local_box.slices].view(part.shape), part)
                for piece, part in each_piece(layout, shapes, rank)
            )
            for tensor in parameters.values():
                tensor.zero_()
            pipe.send(right)


class Ranks:
    """All processes of a case, each at the end of a pipe."""

    def __init__(self, case: Case, bucket_bytes: int, lora_rank: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.trainers: list[Connection] = []
        self.engines: list[Connection] = []
        self._processes = []
        for function, pipes, count in (
            (train_rank, self.trainers, case.train.world),
            (engine_rank, self.engines, case.engine.num_ranks),
        ):
            for rank in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=function, args=(rank, case, bucket_bytes, lora_rank, folder, theirs), daemon=True
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                self._processes.append(process)
        answers(self.all)

    @property
    def all(self) -> list[Connection]:
        return [*self.trainers, *self.engines]

    def close(self) -> None:
        for pipe in self.all:
            pipe.send(None)
        for process in self._processes:
            process.join(30)


def call(pipes: list[Connection], kind: str, argument: Any = None) -> list[Any]:
    """Give all the same command; their answers."""
    for pipe in pipes:
        pipe.send((kind, argument))
    return answers(pipes)


def answers(pipes: list[Connection]) -> list[Any]:
    return [pipe.recv() for pipe in pipes]
