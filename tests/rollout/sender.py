"""A trainer rank in the test's process: sends whole Hugging Face tensors to an engine, or to any receiver."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megarl.layout.boxes import Box
from megarl.weight_sync.links import Token
from megarl.weight_sync.packets import P2P, SHARED, Packet, PacketSpec, Slice, SyncShare
from megarl.weight_sync.receiver import InboxFile
from megarl.weight_sync.sender import Outbox
from tests.rollout.manifests import Slices, rank_slices


class TamperingOutbox(Outbox):
    """Lets `tamper(token, packet)` change a packet after it was packed, or return False to lose it."""

    tamper: Callable[[Token, Packet], bool | None] = staticmethod(lambda token, packet: None)

    def _hand_over(self, token: Token, packet: Packet, used: int) -> None:
        if self.tamper(token, packet) is not False:
            super()._hand_over(token, packet, used)


class Sender:
    """Sends `slices[engine rank]` as trainer rank `rank`, dealt out over `num_buckets`.

    `parameters` may be changed between versions; `inboxes` are the files that the engine's ranks are told of.
    """

    def __init__(
        self,
        folder: Path,
        slices: Sequence[Slices],
        num_buckets: int = 2,
        transport: str = SHARED,
        timeout: float = 60.0,
        frozen: int = 0,
        scaling: float | None = None,
    ) -> None:
        """`frozen`: so many of the first buckets have what training leaves alone; the others adapters of `scaling`."""
        self.parameters: dict[str, torch.Tensor] = {}
        leaving: list[list[PacketSpec]] = [[] for _ in range(num_buckets)]
        targets = []
        for rank, of_rank in enumerate(slices):
            arriving: list[list[PacketSpec]] = [[] for _ in range(num_buckets)]
            for bucket in range(num_buckets):
                here, there = self._slices(f"{rank}/{bucket}/", of_rank.entries[bucket::num_buckets])
                if here:
                    start = sum(spec.nbytes for spec in leaving[bucket])
                    leaving[bucket].append(PacketSpec(rank, start, here))
                    arriving[bucket].append(PacketSpec(0, start, there))
            buckets = tuple(tuple(specs) for specs in arriving)
            targets.append(
                SyncShare(rank, {0: transport}, buckets, of_rank.padding, frozen=frozen, scaling=scaling)
            )
        transports = dict.fromkeys(range(len(slices)), transport)
        share = SyncShare(0, transports, tuple(tuple(specs) for specs in leaving), {}, frozen=frozen)
        folder.mkdir(exist_ok=True)
        self._short = TemporaryDirectory()  # a test's own folder may be too long for a socket's path
        self.outbox = TamperingOutbox(share, self._short.name, "127.0.0.1", "cpu", timeout)
        self.told = [InboxFile(target, {0: self.outbox.address}, timeout) for target in targets]
        self.inboxes = [folder / f"inbox-{rank}" for rank in range(len(slices))]
        for told, inbox in zip(self.told, self.inboxes, strict=True):
            told.write(inbox)
        self._thread = ThreadPoolExecutor(1)

    def _slices(self, prefix: str, entries) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
        here, there = [], []
        for index, (tensor, local, start, value) in enumerate(entries):
            dtype, own = str(value.dtype).removeprefix("torch."), f"{prefix}{index}"
            self.parameters[own] = value
            here.append(Slice(tensor, own, Box.whole(tuple(value.shape)), dtype))
            there.append(Slice(tensor, local, Box(tuple(start), tuple(value.shape)), dtype))
        return tuple(here), tuple(there)

    def send(
        self, version: int, held: Mapping[int, int | None] | None = None, complete: bool = True
    ) -> Future:
        """Begin to send a version; the result is a `Sent`."""
        return self._thread.submit(self.outbox.send, version, self.parameters, held, complete)

    def close(self) -> None:
        self.outbox.close()
        self._thread.shutdown()
        self._short.cleanup()


def sync_state(
    engine,
    folder: Path,
    state: dict[str, torch.Tensor],
    config,
    tp: int,
    version: int,
    ep: int = 1,
    num_buckets: int = 2,
    p2p: bool = False,
):
    """Bring a model's weights (its state dict and config) into an engine; returns its SyncReport."""
    slices = [rank_slices(state, config, tp, rank, ep) for rank in range(tp)]
    return sync_slices(engine, folder, slices, version, num_buckets, p2p)


def sync_slices(
    engine, folder: Path, slices: Sequence[Slices], version: int, num_buckets: int = 2, p2p: bool = False
):
    """Bring what each of its ranks takes into an engine; returns its SyncReport."""
    sender = Sender(folder, slices, num_buckets, P2P if p2p else SHARED)
    try:
        engine.call("connect", sender.inboxes)
        engine.call("begin_update", version)
        sent = sender.send(version)
        engine.call("receive_weights")
        sent.result()
        return engine.call("finish_update")
    finally:
        sender.close()
