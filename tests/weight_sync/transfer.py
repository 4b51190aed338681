"""A complete weight sync in one process: a thread for each trainer rank and for each engine rank."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from megarl.weight_sync.receiver import InboxFile, Receiver, ReceiveReport
from megarl.weight_sync.sender import Outbox, SendReport
from megarl.weight_sync.sync_plan import SyncPlan

Tensors = dict[str, torch.Tensor]


class Shard(torch.nn.Module):
    """A model with the given parameters, whose names need not be valid attributes."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.tensors = tensors

    def named_parameters(self, *args, **kwargs):
        yield from self.tensors.items()

    def parameters(self, *args, **kwargs):
        yield from self.tensors.values()


class Transfer:
    """`trainer[rank]` and `engine[rank]`: local tensors by name; `run` sends a version from one side to the other.

    The engine's tensors end where its pieces do: without the vocabulary's padding.
    """

    def __init__(
        self,
        sync: SyncPlan,
        trainer: Sequence[Tensors],
        engine: Sequence[Tensors],
        folder: Path,
        at_once: bool = False,
    ) -> None:
        """`at_once`: pack and unpack with a GPU's kernels, interpreted."""
        self.trainer, self.engine = trainer, engine
        sources, targets = sync.shares()
        self.sources, self.targets = sources, [replace(target, padding={}) for target in targets]
        self.outboxes = [Outbox(share, str(folder), "127.0.0.1", "cpu", 20.0) for share in sources]
        self._at_once = at_once
        for outbox in self.outboxes:
            outbox._at_once = at_once
        addresses = {outbox.address.rank: outbox.address for outbox in self.outboxes}
        hub = self.outboxes[0].address.hub
        for outbox in self.outboxes if hub is not None else ():
            outbox.join(hub)
        self._told = [InboxFile(target, addresses, hub, 20.0) for target in self.targets]
        self._receivers: list[Receiver | None] = [None] * len(targets)
        self._threads = ThreadPoolExecutor(len(sources) + len(targets))

    def run(
        self, version: int, held: Mapping[int, int | None] | None = None
    ) -> tuple[list[SendReport], list[ReceiveReport]]:
        sending = [
            self._threads.submit(outbox.send, version, tensors, held)
            for outbox, tensors in zip(self.outboxes, self.trainer, strict=True)
        ]
        receiving = [self._threads.submit(self._receive, rank, version) for rank in range(len(self.engine))]
        received = [future.result() for future in receiving]
        return [future.result() for future in sending], received

    def close(self) -> None:
        for outbox in self.outboxes:
            outbox.close()
        self._threads.shutdown()

    def _receive(self, rank: int, version: int) -> ReceiveReport:
        if self._receivers[rank] is None:
            self._receivers[rank] = Receiver(Shard(self.engine[rank]), self._told[rank], "session")
            self._receivers[rank]._at_once = self._at_once
        return self._receivers[rank].receive(version)
