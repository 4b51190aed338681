"""A trainer rank in the test's process: sends unsharded Hugging Face tensors to an engine, or to any receiver."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megarl.layout.boxes import Box
from megarl.weight_sync.links import Token
from megarl.weight_sync.packets import ExchangeShare, Message, Packet, PacketSpec, Slice, SyncShare
from megarl.weight_sync.receiver import InboxFile
from megarl.weight_sync.sender import Outbox, SendReport
from megarl.weight_sync.sync_plan import APART, MAPPED
from tests.rollout.manifests import Slices, rank_slices


class TamperingOutbox(Outbox):
    """Lets `tamper(token, packet)` change a packet after it was packed, or return False to lose it.

    `packet.targets`: the engine ranks that get the packet.
    """

    tamper: Callable[..., bool | None] = staticmethod(lambda token, packet: None)

    def _pack(self, token: Token, *more: object) -> None:
        super()._pack(token, *more)
        self._lost = set()
        for spec in self._share.buckets[token[1]]:
            slot = self._slots[token[1] % len(self._slots)]
            packet = Packet(slot[spec.start : spec.start + spec.nbytes], spec.slices)
            packet.targets = spec.targets
            if self.tamper(token, packet) is False:
                self._lost |= set(spec.targets)

    def _complete(self, token: Token, sent: SendReport) -> None:
        if not self._lost:
            super()._complete(token, sent)


class Sender:
    """Sends `slices[engine rank]` as trainer rank `rank`, distributed over `num_buckets`.

    `parameters` may be changed between versions; `inboxes` are the files that the engine's ranks read.
    """

    def __init__(
        self,
        folder: Path,
        slices: Sequence[Slices],
        num_buckets: int = 2,
        way: str = MAPPED,
        timeout: float = 60.0,
        frozen: int = 0,
        scaling: float | None = None,
        skip_unchanged: bool = False,
    ) -> None:
        """`frozen`: how many of the first buckets hold frozen weights; the others hold adapters with this `scaling`."""
        self.parameters: dict[str, torch.Tensor] = {}
        leaving: list[list[PacketSpec]] = [[] for _ in range(num_buckets)]
        sends: list[list[Message]] = [[] for _ in range(num_buckets)]
        more = {"frozen": frozen, "skip_unchanged": skip_unchanged}
        targets, apart, size = [], way == APART, 1 + len(slices)
        for rank, of_rank in enumerate(slices):
            arriving: list[tuple[PacketSpec, ...]] = []
            receives: list[tuple[Message, ...]] = []
            for bucket in range(num_buckets):
                here, there = self._slices(f"{rank}/{bucket}/", of_rank.entries[bucket::num_buckets])
                start, sizes = (
                    sum(spec.nbytes for spec in leaving[bucket]),
                    tuple(item.nbytes for item in here),
                )
                arriving.append(())
                receives.append(())
                if here:
                    leaving[bucket].append(PacketSpec(0, (rank,), None, start, here))
                    holder, at = (None, 0) if apart else (0, start)
                    arriving[-1] = (PacketSpec(0, (rank,), holder, at, there),)
                    sends[bucket].append(Message(1 + rank, start, 0, sizes))
                    receives[-1] = (Message(0, 0, start, sizes),)
            exchange = ExchangeShare(1 + rank, size, 1, ((),) * num_buckets, tuple(receives), behind=1)
            mapped = tuple(() if apart or not specs else (0,) for specs in arriving)
            room = max(sum(spec.nbytes for spec in specs) for specs in arriving)
            padding = of_rank.padding
            share = SyncShare(
                rank,
                tuple(arriving),
                mapped,
                room,
                padding,
                exchange if apart else None,
                scaling=scaling,
                **more,
            )
            targets.append(share)
        exchange = ExchangeShare(0, size, 1, tuple(map(tuple, sends)), ((),) * num_buckets)
        readers = tuple(() if apart else tuple(spec.targets[0] for spec in specs) for specs in leaving)
        room = max(sum(spec.nbytes for spec in specs) for specs in leaving)
        packets = tuple(map(tuple, leaving))
        share = SyncShare(0, packets, readers, room, {}, exchange if apart else None, **more)
        folder.mkdir(exist_ok=True)
        self._short = TemporaryDirectory()  # a test's own folder may be too long for a socket's path
        self.outbox = TamperingOutbox(share, self._short.name, "127.0.0.1", "cpu", timeout)
        address = self.outbox.address
        self.told = [InboxFile(target, {0: address}, address.hub, timeout) for target in targets]
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
    way: str = MAPPED,
    dp: int = 1,
    dp_head: bool = False,
):
    """Bring a model's weights (its state dict and config) into an engine; returns its SyncReport."""
    slices = [rank_slices(state, config, tp, rank, ep, dp, dp_head) for rank in range(tp)]
    return sync_slices(engine, folder, slices, version, num_buckets, way)


def sync_slices(
    engine, folder: Path, slices: Sequence[Slices], version: int, num_buckets: int = 2, way: str = MAPPED
):
    """Sync each engine rank's slices into an engine; returns its SyncReport."""
    sender = Sender(folder, slices, num_buckets, way)
    try:
        engine.call("connect", sender.inboxes)
        engine.call("begin_update", version)
        sent = sender.send(version)
        engine.call("receive_weights")
        sent.result()
        return engine.call("finish_update")
    finally:
        sender.close()
