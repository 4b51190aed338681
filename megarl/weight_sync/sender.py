"""A trainer rank's side of a weight sync: it packs its share bucket by bucket into two slots and hands them over as packets.

The slots (`Slots`) are the only memory that a sync takes on the trainer's side. Engine ranks on the same machine read them in
place; to others packets are sent from them. A slot is packed anew when all engine ranks have taken its packets. On a GPU slots exist
only during a sync, so that the next phase has the memory: they are taken for a version and offered to the engines, which say
when they have closed them. On a CPU they last.

The slots belong to the process, not to a connection. torch counts the buffers that an engine opens by CUDA IPC, and only the
engine counts them down: one that was killed never does, and torch would keep the memory for good though it is unused
(CudaIPCSentDataLimbo in torch/csrc/CudaIPCTypes.cpp). So the next connection gets the memory of a broken one.

On a CPU a slot is shared memory without a name (memfd), passed on as an open file: nothing is left of it when the
processes that map it have ended, however they ended.
"""

import mmap
import os
import pickle
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megarl.weight_sync.inbox import OFFER, RANK, slots_closed_token
from megarl.weight_sync.links import ControlChannel, LinkError, PacketChannel, Token, Transfer, naming_peer
from megarl.weight_sync.packets import (
    CONVERT,
    P2P,
    QUANTISE,
    SCALE,
    Address,
    Packet,
    PacketSpec,
    SyncShare,
    aligned,
    checksum,
)
from megarl.weight_sync.quantize import read_scales, read_values

READ = {QUANTISE: read_values, SCALE: read_scales}


@dataclass
class SendReport:
    """A trainer rank's figures for one sent version.

    Attributes:
        bytes_sent: bytes of slices, including slices to engine ranks on the same device.
        bytes_unchanged: bytes of slices that were not sent again.
        buffer_bytes: bytes of both slots.
        seconds: by phase: pack (with checksums), wait (for engine ranks to take packets).
    """

    version: int
    bytes_sent: int = 0
    bytes_unchanged: int = 0
    buffer_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"pack": 0.0, "wait": 0.0})


class Slots:
    """The memory into which a trainer rank packs weights: one slot for each bucket that is in flight at a time.

    Attributes:
        files: descriptors of the slots, which other processes may map (CPU only).
        lasting: whether the slots stay between two syncs.
    """

    def __init__(self, device: str, lasting: bool | None = None) -> None:
        """`lasting`: None: true on a CPU, false on a GPU."""
        self._device = device
        self.lasting = device == "cpu" if lasting is None else lasting
        self._slots: list[torch.Tensor] = []
        self.files: list[int] = []

    def take(self, number: int, size: int) -> list[torch.Tensor]:
        """`number` slots of `size` bytes: the existing ones if they have this size. Their previous user must not use them any more."""
        if [len(slot) for slot in self._slots] != [size] * number:
            self.close()
            self._slots = [self._make(size) for _ in range(number)]
        return list(self._slots)

    def close(self) -> None:
        """Free the slots; their memory is gone when no process maps it any more."""
        files, self.files = self.files, []  # swapped at once: a sending thread may call this at the same time
        for file in files:
            os.close(file)
        made, self._slots = len(self._slots), []
        if self._device != "cpu" and made:
            torch.cuda.ipc_collect()  # buffers that the engines have closed
            torch.cuda.empty_cache()

    def _make(self, size: int) -> torch.Tensor:
        if self._device != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        file = os.memfd_create("megarl-weights")
        os.ftruncate(file, size)
        self.files.append(file)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


class Outbox:
    """The channels of one trainer rank to all engine ranks that it sends to; they are made with the first version."""

    def __init__(
        self,
        share: SyncShare,
        folder: str,
        host: str,
        device: str,
        timeout: float,
        slots: Slots | None = None,
    ) -> None:
        """
        Args:
            folder: private to this process, with a short path; its socket is made there.
            host: address of this machine for other ones.
            timeout: seconds to wait for an engine rank.
            slots: the slots of this process; None: the outbox makes its own, and frees them when it closes.
        """
        self._share, self._device, self._timeout = share, device, timeout
        self._memory = slots if slots is not None else Slots(device)
        self._own_slots = self._memory if slots is None else None
        self._closed = False
        self._channels: dict[int, ControlChannel] = {}
        self._packet_channels: dict[int, PacketChannel] = {}
        self._transfers: dict[int, list[Transfer]] = {}
        self._known: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self._slots: list[torch.Tensor] = []
        self._offered = False  # to the engine ranks that map them
        if self._memory.lasting:
            self._take_slots()
        self._mapping = [peer for peer, transport in share.transports.items() if transport != P2P]
        self._remote = sorted(peer for peer, transport in share.transports.items() if transport == P2P)
        self._path = Path(folder, f"weights-{secrets.token_hex(4)}.socket")
        self._near = socket.socket(socket.AF_UNIX)
        self._near.bind(str(self._path))
        self._near.listen(max(1, len(self._mapping)))
        self._far, port = None, None
        if self._remote:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._far = socket.create_server((host, 0), family=family, backlog=len(self._remote))
            port = self._far.getsockname()[1]
        self.address = Address(share.rank, str(self._path), host, port)

    def _take_slots(self) -> None:
        share = self._share
        self._slots = self._memory.take(share.num_slots if share.slot_bytes else 0, share.slot_bytes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the slots that exist at the moment."""
        return sum(slot.nbytes for slot in self._slots)

    def send(
        self,
        version: int,
        parameters: Mapping[str, torch.Tensor],
        held: Mapping[int, int | None] | None = None,
        complete: bool = True,
    ) -> SendReport:
        """Send this rank's share of a version; returns when all of it has arrived.

        Args:
            parameters: this rank's local tensors by name; asked for one at a time.
            held: the verified version that each engine rank holds (None: none). Slices that have not changed since
                that version are not sent again.
            complete: false: without the buckets whose weights training does not change (`SyncShare.frozen`).

        Raises:
            LinkError: names the engine rank that is gone or silent; all links are given up.
        """
        assert complete or held is None, "checksums are remembered for complete versions only"
        if self._closed:
            raise LinkError(
                "this trainer rank gave up its links: trainer and engines have to be connected anew"
            )
        try:
            if not self._slots:
                self._take_slots()
            sent = SendReport(version, buffer_bytes=self.buffer_bytes)
            if len(self._channels) + len(self._packet_channels) < len(self._share.transports):
                self._connect()
            if not self._offered:
                for channel in self._channels.values():
                    self._offer_slots(channel)
                self._offered = True
            checksums: dict[int, list[torch.Tensor]] = {peer: [] for peer in self._share.transports}
            num_buckets, first = len(self._share.buckets), 0 if complete else self._share.frozen
            # A slot is packed again when its previous bucket was taken; the last rounds only wait for the buckets still in flight.
            for bucket in range(first, num_buckets + len(self._slots)):
                if bucket - len(self._slots) >= first:
                    self._wait_taken(version, bucket - len(self._slots), sent)
                for spec in self._share.buckets[bucket] if bucket < num_buckets else ():
                    known = self._known_checksums(spec.peer, held, len(checksums[spec.peer]))
                    packet, used = self._pack((version, bucket), spec, parameters, known, sent)
                    checksums[spec.peer].append(packet.checksums.clone())
                    self._hand_over((version, bucket), packet, used)
            if not self._memory.lasting:
                for channel in self._channels.values():
                    channel.expect_token(slots_closed_token(version, self._share))
                self._slots, self._offered = [], False
                self._memory.close()
        except BaseException:
            self.close()  # so that the engine ranks do not wait for packets that will not come
            raise
        if held is not None:
            self._known = {peer: (version, of_peer) for peer, of_peer in checksums.items()}
        return sent

    def close(self) -> None:
        """Close all channels, which engine ranks that wait notice."""
        self._closed = True
        channels: list[ControlChannel | PacketChannel] = [*self._channels.values()]
        for channel in [*channels, *self._packet_channels.values()]:
            channel.close()
        self._near.close()
        self._path.unlink(missing_ok=True)
        if self._far is not None:
            self._far.close()
        if self._own_slots is not None:
            self._own_slots.close()
        self._channels, self._packet_channels, self._transfers, self._slots = {}, {}, {}, []

    def _connect(self) -> None:
        # Engine ranks that map memory come first, at both ends: in any other order ranks could wait for each other in a circle.
        while missing := [peer for peer in self._mapping if peer not in self._channels]:
            rank, channel = self._accept(self._near, missing)
            self._channels[rank] = channel
        while missing := [peer for peer in self._remote if peer not in self._packet_channels]:
            assert self._far is not None
            rank, channel = self._accept(self._far, missing)
            self._packet_channels[rank] = PacketChannel(channel, 0, self._device)

    def _accept(self, listener: socket.socket, missing: list[int]) -> tuple[int, ControlChannel]:
        """Accept the next engine rank that connects, which must be one of `missing`."""
        with naming_peer(f"engine rank {missing[0]}", self._timeout):
            listener.settimeout(self._timeout)
            connection, _ = listener.accept()
        channel = ControlChannel(connection, "an engine rank", self._timeout)
        (rank,) = RANK.unpack(channel.receive(RANK.size))
        if rank not in missing:
            channel.close()
            raise LinkError(f"engine rank {rank} came where {missing} were due")
        channel.peer = f"engine rank {rank}"
        return rank, channel

    def _offer_slots(self, channel: ControlChannel) -> None:
        lasting = self._memory.lasting
        if self._device == "cpu":
            channel.send(OFFER.pack(len(self._slots), self._share.slot_bytes, lasting))
            channel.send_files(self._memory.files)
        else:
            handles = pickle.dumps([share_device_buffer(slot) for slot in self._slots])
            channel.send(OFFER.pack(len(self._slots), -len(handles), lasting) + handles)

    def _known_checksums(
        self, peer: int, held: Mapping[int, int | None] | None, index: int
    ) -> torch.Tensor | None:
        """Checksums of the packet's slices in the version that the engine rank holds, if they are known."""
        if held is None or peer not in self._known:
            return None
        version, checksums = self._known[peer]
        return checksums[index] if held[peer] == version else None

    def _pack(
        self,
        token: Token,
        spec: PacketSpec,
        parameters: Mapping[str, torch.Tensor],
        known: torch.Tensor | None,
        sent: SendReport,
    ) -> tuple[Packet, int]:
        """Pack a packet into its slot; returns it and the number of its bytes that are used."""
        begun = time.perf_counter()
        slot = self._slots[token[1] % len(self._slots)]
        packet = Packet(slot[spec.start : spec.start + spec.nbytes], spec)
        packet.identity.copy_(torch.tensor(token))
        used, followed = fill(packet, parameters, known, self._share.fp8_block)
        for item, follows in zip(spec.slices, followed, strict=True):
            sent.bytes_sent += item.nbytes if follows else 0
            sent.bytes_unchanged += 0 if follows else item.nbytes
        if self._device != "cpu":
            torch.cuda.current_stream().synchronize()
        sent.seconds["pack"] += time.perf_counter() - begun
        return packet, used

    def _hand_over(self, token: Token, packet: Packet, used: int) -> None:
        peer = packet.spec.peer
        if peer in self._packet_channels:
            transfer = self._packet_channels[peer].send(packet.data[:used])
            self._transfers.setdefault(token[1], []).append(transfer)
        else:
            self._channels[peer].send_token(token)

    def _wait_taken(self, version: int, bucket: int, sent: SendReport) -> None:
        """Wait until the engine ranks have taken all packets of a bucket."""
        begun = time.perf_counter()
        for spec in self._share.buckets[bucket]:
            if spec.peer in self._channels:
                self._channels[spec.peer].expect_token((version, bucket))
        for transfer in self._transfers.pop(bucket, ()):
            transfer.wait()
        sent.seconds["wait"] += time.perf_counter() - begun


@torch.no_grad()
def fill(
    packet: Packet,
    parameters: Mapping[str, torch.Tensor],
    known: torch.Tensor | None = None,
    fp8_block: tuple[int, int] | None = None,
) -> tuple[int, Sequence[bool]]:
    """Read a packet's slices from `parameters`, converted to the types that travel.

    Args:
        known: checksums of the slices in the engine's version [slices]; slices with an equal checksum do not follow.

    Returns: the number of bytes of the packet that are used, and for each slice whether it follows.
    """
    at, found, followed = packet.body, [], []
    for index, item in enumerate(packet.spec.slices):
        part = packet.place(item, at)
        source = parameters[item.local]
        if item.reading == CONVERT:
            part.copy_(source[item.box.slices])
        else:
            assert fp8_block is not None, "a share that quantises has the size of its blocks"
            READ[item.reading](source, item.box, fp8_block, part)
        del source  # it may have been made for this slice: freed before the next one is made
        found.append(checksum(part))
        followed.append(known is None or bool(found[-1] != known[index]))
        at += aligned(item.nbytes) if followed[-1] else 0
    packet.checksums.copy_(torch.stack(found))
    packet.sent.copy_(torch.tensor(followed, dtype=torch.uint8))
    return at, followed


def share_device_buffer(buffer: torch.Tensor) -> tuple:
    """The handle by which another process on the same machine opens a tensor on a GPU (`open_device_buffer`).

    The device's number, which may differ there, is given as the GPU's UUID; it is the argument `place` of torch's
    rebuild function (torch 2.13: `rebuild_cuda_tensor(cls, size, stride, offset, storage_cls, dtype, device, ...)`).
    """
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(buffer)
    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return uuid, rebuild, arguments, 6
