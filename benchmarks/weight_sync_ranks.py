"""The processes that weight_sync.py drives: trainer ranks and engine ranks, each answering commands over a pipe."""

import multiprocessing
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from full_gather import FullGather, Gatherer, loader
from weight_sync_cases import DTYPE, Case, model_of

from megarl.hybrid_engine.layouts import hf_layout, megatron_layout, sglang_layout
from megarl.hybrid_engine.outbox import Outbox
from megarl.layout import Layout, Piece
from megarl.rollout.receiver import Receiver

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


def each_piece(layout: Layout, whole: Layout, rank: int) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Each piece of a rank with its values; pieces of a tensor come together."""
    shapes = {piece.tensor: piece.box.size for piece in whole.pieces(0)}
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


def train_rank(rank: int, case: Case, bucket_bytes: int, folder: str, pipe: Connection) -> None:
    """Commands: ("outbox", (way, share)), ("send", (way, version)), ("full", shared memory), ("gather", bucket)."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=case.train.world
    )
    layout, whole = megatron_layout(model_of(case), case.train), hf_layout(model_of(case))
    parameters = empty_parameters(layout, rank)
    for piece, part in each_piece(layout, whole, rank):
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
        elif kind == "send":
            way, version = argument
            sent = outboxes[way].send(version, parameters)
            pipe.send((sent.bytes_sent, sent.buffer_bytes))
        elif kind == "full":
            gatherer = Gatherer(full_gather(case, bucket_bytes), rank, parameters, argument)
            pipe.send("ready")
        else:
            gatherer.gather(argument)
            pipe.send((gatherer.bytes_received, gatherer.extra_bytes))
    dist.destroy_process_group()


def engine_rank(rank: int, case: Case, bucket_bytes: int, folder: str, pipe: Connection) -> None:
    """Commands: ("inbox", (way, InboxFile)), ("receive", (way, version)), ("full", memory), ("load", bucket), ("check",)."""
    torch.set_num_threads(1)
    layout, whole = sglang_layout(model_of(case), case.engine), hf_layout(model_of(case))
    parameters = empty_parameters(layout, rank)
    model = Engine(parameters)
    receivers: dict[str, Receiver] = {}
    load = None
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        kind, argument = command
        if kind == "inbox":
            way, told = argument
            receivers[way] = Receiver(model, told, way)
            pipe.send("ready")
        elif kind == "receive":
            way, version = argument
            received = receivers[way].receive(version)
            pipe.send((received.bytes_written, received.buffer_bytes))
        elif kind == "full":
            load = loader(full_gather(case, bucket_bytes), rank, parameters, argument)
            pipe.send("ready")
        elif kind == "load":
            load(argument)
            pipe.send("loaded")
        else:
            right = all(
                torch.equal(parameters[piece.local][piece.local_box.slices].view(part.shape), part)
                for piece, part in each_piece(layout, whole, rank)
            )
            for tensor in parameters.values():
                tensor.zero_()
            pipe.send(right)


class Ranks:
    """All processes of a case, each at the end of a pipe."""

    def __init__(self, case: Case, bucket_bytes: int, folder: str) -> None:
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
                    target=function, args=(rank, case, bucket_bytes, folder, theirs), daemon=True
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
