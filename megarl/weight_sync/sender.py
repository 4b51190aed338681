"""A trainer rank's side of a weight sync: it packs its share bucket by bucket into two slots and hands them over as packets.

The slots (`Slots`) are the only memory that a sync takes on the trainer's side. Engine ranks that map them read packets in
place; to others packets are sent from them. Where a trainer rank receives for the engine rank on its device, received packets lie in
the same slots, after its own. A slot is packed anew when its packets were sent and taken. On a GPU slots exist
only during a sync, so that the next phase has the memory: they are taken for a version and offered to the engines, which say
when they have closed them. On a CPU they last.

The slots belong to the process, not to a connection. torch counts the buffers that an engine opens by CUDA IPC, and only the
engine counts them down: a killed engine never does, and torch would keep the memory for good though it is unused
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

from megarl.models.computed import ComputedWeight
from megarl.weight_sync.exchange import Exchange, join_exchange
from megarl.weight_sync.gpu_buckets import PackedBucket
from megarl.weight_sync.hub import Hub
from megarl.weight_sync.inbox import OFFER, RANK, slots_closed_token
from megarl.weight_sync.links import ControlChannel, LinkError, Token, naming_peer
from megarl.weight_sync.packets import (
    CONVERT,
    QUANTISE,
    SCALE,
    Address,
    Packet,
    PacketSpec,
    SyncShare,
    checksum,
)
from megarl.weight_sync.quantize import read_scales, read_values

READ = {QUANTISE: read_values, SCALE: read_scales}


@dataclass
class SendReport:
    """A trainer rank's figures for one sent version.

    Attributes:
        bytes_sent: bytes of slices, counted as often as a slice is given away, including slices to engine ranks on the same device.
        bytes_unchanged: bytes of slices that were not given away again.
        buffer_bytes: bytes of both slots.
        seconds: by phase: pack (with checksums), wait (for packets to arrive and to be taken).
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
    """The connections of one trainer rank to engine ranks, and to other trainer ranks; they are made with the first version."""

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
            host: address at which other machines reach this one.
            timeout: seconds to wait for another rank.
            slots: the slots of this process; None: the outbox makes its own, and frees them when it closes.
        """
        self._share, self._device, self._timeout = share, device, timeout
        self._at_once = device != "cpu"  # whether kernels may pack a bucket
        self._memory = slots if slots is not None else Slots(device)
        self._own_slots = self._memory if slots is None else None
        self._closed = False
        self._channels: dict[int, ControlChannel] = {}
        self._exchange: Exchange | None = None
        # By bucket: the version whose checksums are known, and these checksums by packet.
        self._known: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self._packed: dict[int, PackedBucket] = {}  # on a GPU: by bucket, its tables
        self._slots: list[torch.Tensor] = []
        self._offered = False  # to the engine ranks that map them
        if self._memory.lasting:
            self._take_slots()
        self._path = Path(folder, f"weights-{secrets.token_hex(4)}.socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(max(1, len(share.near)))
        exchange = share.exchange
        self._hub = Hub(host) if exchange is not None and exchange.member == 0 else None
        self._hub_address = self._hub.address if self._hub is not None else None
        self.address = Address(share.rank, str(self._path), self._hub_address)

    def join(self, hub: tuple[str, int]) -> None:
        """Set where the members of the exchange meet: the address of the first trainer rank's hub."""
        self._hub_address = hub

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
        computed: Mapping[str, ComputedWeight] | None = None,
    ) -> SendReport:
        """Send this rank's share of a version; returns when all of it has left and was taken.

        Args:
            parameters: this rank's local tensors by name.
            held: the verified version that each engine rank holds (None: none), where the share leaves out unchanged slices: slices
                that have not changed since that version are not sent again.
            complete: false: without the buckets whose weights training does not change (`SyncShare.frozen`).
            computed: the weights among `parameters` that are made when they are asked for: on a GPU kernels compute them where they are
                read, on a CPU they are asked for one at a time.

        Raises:
            LinkError: names the rank that is gone or silent; all connections are given up.
        """
        share = self._share
        if self._closed:
            raise LinkError(
                "this trainer rank gave up its links: trainer and engines have to be connected anew"
            )
        try:
            assert complete or held is None, "checksums are remembered for complete versions only"
            assert held is None or share.skip_unchanged, "engine ranks expect all slices"
            if not self._slots:
                self._take_slots()
            sent = SendReport(version, buffer_bytes=self.buffer_bytes)
            self._connect()
            if not self._offered:
                for channel in self._channels.values():
                    self._offer_slots(channel)
                self._offered = True
            num_buckets, first = len(share.buckets), 0 if complete else share.frozen
            travelling: int | None = None  # the bucket whose packets are on their way between members
            # A slot is packed again when its previous bucket was taken; the last rounds only wait for the buckets still in flight.
            for bucket in range(first, num_buckets + len(self._slots)):
                before = bucket - len(self._slots)
                if travelling is not None and travelling <= before:  # only of one bucket, in one slot
                    self._complete((version, travelling), sent)
                    travelling = None
                if before >= first:
                    self._wait_taken((version, before), sent)
                if bucket < num_buckets:
                    self._pack((version, bucket), parameters, held, computed or {}, sent)
                if travelling is not None:  # it travelled while this bucket was packed
                    self._complete((version, travelling), sent)
                    travelling = None
                if bucket < num_buckets:
                    if self._exchange is not None and self._exchange.start(bucket, self._slots, first):
                        travelling = bucket
                    else:
                        self._complete((version, bucket), sent)
            if not self._memory.lasting:
                for channel in self._channels.values():
                    channel.expect_token(slots_closed_token(version, share))
                if self._exchange is not None:
                    self._exchange.forget_slots()
                self._slots, self._offered = [], False
                self._memory.close()
        except BaseException:
            self.close()  # so that no other rank waits for packets that will not come
            raise
        return sent

    def close(self) -> None:
        """Close all connections; waiting ranks notice it."""
        self._closed = True
        for channel in self._channels.values():
            channel.close()
        if self._exchange is not None:
            self._exchange.close()
        if self._hub is not None:
            self._hub.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        if self._own_slots is not None:
            self._own_slots.close()
        self._channels, self._slots, self._exchange, self._packed = {}, [], None, {}

    def _connect(self) -> None:
        share = self._share
        while missing := [rank for rank in share.near if rank not in self._channels]:
            rank, channel = self._accept(missing)
            self._channels[rank] = channel
        if share.exchange is not None and self._exchange is None:
            assert self._hub_address is not None, "join comes first: it gives the address of the hub"
            self._exchange = join_exchange(
                share.exchange, self._hub_address, self._device, self._timeout, share.skip_unchanged
            )

    def _accept(self, missing: list[int]) -> tuple[int, ControlChannel]:
        """Accept the next engine rank that connects, which must be one of `missing`."""
        with naming_peer(f"engine rank {missing[0]}", self._timeout):
            self._listener.settimeout(self._timeout)
            connection, _ = self._listener.accept()
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

    def _pack(
        self,
        token: Token,
        parameters: Mapping[str, torch.Tensor],
        held: Mapping[int, int | None] | None,
        computed: Mapping[str, ComputedWeight],
        sent: SendReport,
    ) -> None:
        """Pack the packets of a bucket into its slot, on a GPU by kernels over all of its slices."""
        begun = time.perf_counter()
        version, bucket = token
        specs = self._share.buckets[bucket]
        known = self._known_checksums(bucket, specs, held)
        slot = self._slots[bucket % len(self._slots)] if specs else torch.empty(0)
        if self._at_once and specs:
            found, follows = self._pack_at_once(token, parameters, computed, slot, known)
        else:
            found, follows = _pack_one_by_one(token, specs, parameters, slot, known, self._share.fp8_block)
        if held is not None:
            self._known[bucket] = version, found
        for spec, flags in zip(specs, follows, strict=True):
            for item, given in zip(spec.slices, flags, strict=True):
                sent.bytes_sent += item.nbytes * spec.copies if given else 0
                sent.bytes_unchanged += 0 if given else item.nbytes * spec.copies
        sent.seconds["pack"] += time.perf_counter() - begun

    def _pack_at_once(
        self,
        token: Token,
        parameters: Mapping[str, torch.Tensor],
        computed: Mapping[str, ComputedWeight],
        slot: torch.Tensor,
        known: list[torch.Tensor | None],
    ) -> tuple[list[torch.Tensor], list[list[bool]]]:
        """Pack a bucket on a GPU; returns by packet the checksums, and whether each slice follows."""
        specs = self._share.buckets[token[1]]
        if token[1] not in self._packed:
            self._packed[token[1]] = PackedBucket(specs, self._share.fp8_block, slot.device)
        packed, counts = self._packed[token[1]], [len(spec.slices) for spec in specs]
        nothing_known = all(sums is None for sums in known)
        flags = packed.pack(token, parameters, slot, None if nothing_known else known, computed)
        # Only where unchanged slices are left out the host waits here, to learn which.
        values = iter([True] * sum(counts) if flags is None else flags.tolist())
        follows = [[next(values) for _ in range(count)] for count in counts]
        return list(packed.checksums.clone().split(counts)), follows

    def _known_checksums(
        self, bucket: int, specs: Sequence[PacketSpec], held: Mapping[int, int | None] | None
    ) -> list[torch.Tensor | None]:
        """By packet, checksums of its slices in the version that its engine ranks hold, if they are known."""
        if held is None or bucket not in self._known:
            return [None] * len(specs)
        version, checksums = self._known[bucket]
        return [
            sums if all(held[target] == version for target in spec.targets) else None
            for spec, sums in zip(specs, checksums, strict=True)
        ]

    def _complete(self, token: Token, sent: SendReport) -> None:
        """Wait until a bucket's slot is complete, and tell the engine ranks that map it."""
        begun = time.perf_counter()
        if self._exchange is not None and self._exchange.moving:
            self._exchange.finish()  # which waits for the packing, too
        elif self._device != "cpu":
            torch.cuda.current_stream().synchronize()
        for rank in self._share.mapped[token[1]]:
            self._channels[rank].send_token(token)
        sent.seconds["wait"] += time.perf_counter() - begun

    def _wait_taken(self, token: Token, sent: SendReport) -> None:
        """Wait until the engine ranks that map a bucket's slot have taken its packets."""
        begun = time.perf_counter()
        for rank in self._share.mapped[token[1]]:
            self._channels[rank].expect_token(token)
        sent.seconds["wait"] += time.perf_counter() - begun


def _pack_one_by_one(
    token: Token,
    specs: Sequence[PacketSpec],
    parameters: Mapping[str, torch.Tensor],
    slot: torch.Tensor,
    known: list[torch.Tensor | None],
    fp8_block: tuple[int, int] | None,
) -> tuple[list[torch.Tensor], list[list[bool]]]:
    """Pack a bucket slice by slice; returns by packet the checksums, and whether each slice follows."""
    found, follows = [], []
    for spec, before in zip(specs, known, strict=True):
        packet = Packet(slot[spec.start : spec.start + spec.nbytes], spec.slices)
        packet.identity.copy_(torch.tensor(token))
        fill(packet, parameters, fp8_block)
        found.append(packet.checksums.clone())
        packet.sent.fill_(1) if before is None else packet.sent.copy_(packet.checksums != before)
        follows.append([True] * len(spec.slices) if before is None else packet.sent.bool().tolist())
    return found, follows


@torch.no_grad()
def fill(
    packet: Packet, parameters: Mapping[str, torch.Tensor], fp8_block: tuple[int, int] | None = None
) -> None:
    """Fill a packet with its slices of `parameters`, converted to the types that travel, and with their checksums."""
    found = []
    for item, part in packet.places():
        source = parameters[item.local]
        if item.reading == CONVERT:
            part.copy_(source[item.box.slices])
        else:
            assert fp8_block is not None, "a share that quantises has the size of its blocks"
            READ[item.reading](source, item.box, fp8_block, part)
        del source  # it may have been made for this slice: freed before the next one is made
        found.append(checksum(part))
    packet.checksums.copy_(torch.stack(found))


def share_device_buffer(buffer: torch.Tensor) -> tuple:
    """The handle by which another process on the same machine opens a tensor on a GPU (`open_device_buffer`).

    The GPU is named by its UUID, since its number may differ there. The number is the argument at index `place` of torch's
    rebuild function (torch 2.13: `rebuild_cuda_tensor(cls, size, stride, offset, storage_cls, dtype, device, ...)`).
    """
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(buffer)
    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return uuid, rebuild, arguments, 6
