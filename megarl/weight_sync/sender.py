"""What a trainer rank sends in a weight sync: packed bucket by bucket into two slots, handed over as packets.

The slots (`Slots`) are the only memory that a sync takes on the trainer's side. Engine ranks on the same machine read them in
place; to others packets are sent from them. A slot is packed anew when all engine ranks have taken what lay in it. Slots that
do not last are taken for a version and offered to the engines, which say when they have closed them.

On a CPU a slot is shared memory without a name (memfd), passed on as an open file: nothing is left of it when the
processes that map it have ended, however they ended.
"""

import pickle
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megarl.weight_sync.checksum import checksum
from megarl.weight_sync.inbox import OFFER, RANK, after_all
from megarl.weight_sync.links import Line, LinkError, Pair, Sending, Token, naming_peer
from megarl.weight_sync.packets import (
    CONVERT,
    P2P,
    QUANTISE,
    SCALE,
    Address,
    Packet,
    Parcel,
    SyncShare,
    aligned,
)
from megarl.weight_sync.quantize import read_scales, read_values
from megarl.weight_sync.slots import Slots

READ = {QUANTISE: read_values, SCALE: read_scales}


@dataclass
class Sent:
    """What a rank sent of a version.

    Attributes:
        bytes_sent: of slices, those to engine ranks on the same device among them.
        bytes_unchanged: of slices that did not have to be sent.
        buffer_bytes: of both slots.
        seconds: by what it did: pack (with checksums), wait (for engine ranks to take what was packed).
    """

    version: int
    bytes_sent: int = 0
    bytes_unchanged: int = 0
    buffer_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"pack": 0.0, "wait": 0.0})


class Outbox:
    """The links of one trainer rank to all engine ranks that it sends to; they are made with the first version."""

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
            folder: private to this process, with a short path; a socket is put there.
            host: address of this machine for other ones.
            timeout: seconds to wait for an engine rank.
            slots: this process's; None: an outbox that is its only one makes them, and gives them up when it closes.
        """
        self._share, self._device, self._timeout = share, device, timeout
        self._memory = slots if slots is not None else Slots(device)
        self._own_slots = self._memory if slots is None else None
        self._closed = False
        self._lines: dict[int, Line] = {}
        self._pairs: dict[int, Pair] = {}
        self._sendings: dict[int, list[Sending]] = {}
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
        self._far = _listen(host, len(self._remote)) if self._remote else None
        port = self._far.getsockname()[1] if self._far is not None else None
        self.address = Address(share.rank, str(self._path), host, port)

    def _take_slots(self) -> None:
        share = self._share
        self._slots = self._memory.take(share.num_slots if share.slot_bytes else 0, share.slot_bytes)

    @property
    def buffer_bytes(self) -> int:
        """Of the slots that are there."""
        return sum(slot.nbytes for slot in self._slots)

    def send(
        self,
        version: int,
        parameters: Mapping[str, torch.Tensor],
        held: Mapping[int, int | None] | None = None,
        whole: bool = True,
    ) -> Sent:
        """Send this rank's share of a version; returns when all of it has arrived.

        Args:
            parameters: this rank's local tensors by name; asked for one at a time.
            held: the verified version that each engine rank holds (None: none). Slices that are as they were in
                that version are not sent again.
            whole: false: without the buckets that training leaves alone (`SyncShare.frozen`).

        Raises:
            LinkError: names the engine rank that is gone or silent; all links are given up.
        """
        assert whole or held is None, "checksums are remembered of whole versions"
        if self._closed:
            raise LinkError(
                "this trainer rank gave up its links: trainer and engines have to be connected anew"
            )
        try:
            if not self._slots:
                self._take_slots()
            sent = Sent(version, buffer_bytes=self.buffer_bytes)
            if len(self._lines) + len(self._pairs) < len(self._share.transports):
                self._connect()
            if not self._offered:
                for line in self._lines.values():
                    self._offer_slots(line)
                self._offered = True
            checksums: dict[int, list[torch.Tensor]] = {peer: [] for peer in self._share.transports}
            num_buckets, first = len(self._share.buckets), 0 if whole else self._share.frozen
            for bucket in range(first, num_buckets + len(self._slots)):
                if bucket - len(self._slots) >= first:
                    self._wait_taken(version, bucket - len(self._slots), sent)
                for parcel in self._share.buckets[bucket] if bucket < num_buckets else ():
                    known = self._known_checksums(parcel.peer, held, len(checksums[parcel.peer]))
                    packet, used = self._pack((version, bucket), parcel, parameters, known, sent)
                    checksums[parcel.peer].append(packet.checksums.clone())
                    self._hand_over((version, bucket), packet, used)
            if not self._memory.lasting:
                for line in self._lines.values():
                    line.expect(after_all(version, self._share))
                self._slots, self._offered = [], False
                self._memory.close()
        except BaseException:
            self.close()  # the engine ranks shall not wait for what does not come
            raise
        if held is not None:
            self._known = {peer: (version, of_peer) for peer, of_peer in checksums.items()}
        return sent

    def close(self) -> None:
        """Give up all links; engine ranks that wait notice."""
        self._closed = True
        for line in self._lines.values():
            line.close()
        for pair in self._pairs.values():
            pair.close()
        self._near.close()
        self._path.unlink(missing_ok=True)
        if self._far is not None:
            self._far.close()
        if self._own_slots is not None:
            self._own_slots.close()
        self._lines, self._pairs, self._sendings, self._slots = {}, {}, {}, []

    def _connect(self) -> None:
        # First those that map memory, here as there: an order in which nobody waits in a circle.
        while len(self._lines) < len(self._mapping):
            rank, line = self._accept(self._near, [peer for peer in self._mapping if peer not in self._lines])
            self._lines[rank] = line
        while len(self._pairs) < len(self._remote):
            assert self._far is not None, "it listens where there are remote engine ranks"
            rank, line = self._accept(self._far, [peer for peer in self._remote if peer not in self._pairs])
            self._pairs[rank] = Pair(line, 0, self._device)

    def _accept(self, listener: socket.socket, missing: list[int]) -> tuple[int, Line]:
        """The next engine rank that calls, which is one of `missing`."""
        with naming_peer(f"engine rank {missing[0]}", self._timeout):
            listener.settimeout(self._timeout)
            connection, _ = listener.accept()
        line = Line(connection, "an engine rank", self._timeout)
        (rank,) = RANK.unpack(line.receive(RANK.size))
        if rank not in missing:
            line.close()
            raise LinkError(f"engine rank {rank} came where {missing} were due")
        line.peer = f"engine rank {rank}"
        return rank, line

    def _offer_slots(self, line: Line) -> None:
        lasting = self._memory.lasting
        if self._device == "cpu":
            line.send(OFFER.pack(len(self._slots), self._share.slot_bytes, lasting))
            line.send_files(self._memory.files)
        else:
            handles = pickle.dumps([share_device_buffer(slot) for slot in self._slots])
            line.send(OFFER.pack(len(self._slots), -len(handles), lasting) + handles)

    def _known_checksums(
        self, peer: int, held: Mapping[int, int | None] | None, index: int
    ) -> torch.Tensor | None:
        """The checksums of the parcel's slices in the version that the engine rank holds, if they are known."""
        if held is None or peer not in self._known:
            return None
        version, checksums = self._known[peer]
        return checksums[index] if held[peer] == version else None

    def _pack(
        self,
        token: Token,
        parcel: Parcel,
        parameters: Mapping[str, torch.Tensor],
        known: torch.Tensor | None,
        sent: Sent,
    ) -> tuple[Packet, int]:
        """Pack a parcel into its slot; returns also how many bytes of it are used."""
        begun = time.perf_counter()
        slot = self._slots[token[1] % len(self._slots)]
        packet = Packet(slot[parcel.start : parcel.start + parcel.nbytes], parcel)
        packet.identity.copy_(torch.tensor(token))
        used, followed = fill(packet, parameters, known, self._share.fp8_block)
        for item, follows in zip(parcel.slices, followed, strict=True):
            sent.bytes_sent += item.nbytes if follows else 0
            sent.bytes_unchanged += 0 if follows else item.nbytes
        if self._device != "cpu":
            torch.cuda.current_stream().synchronize()
        sent.seconds["pack"] += time.perf_counter() - begun
        return packet, used

    def _hand_over(self, token: Token, packet: Packet, used: int) -> None:
        peer = packet.parcel.peer
        if peer in self._pairs:
            self._sendings.setdefault(token[1], []).append(self._pairs[peer].send(packet.data[:used]))
        else:
            self._lines[peer].say(token)

    def _wait_taken(self, version: int, bucket: int, sent: Sent) -> None:
        """Wait until all packets of a bucket were taken."""
        begun = time.perf_counter()
        for parcel in self._share.buckets[bucket]:
            if parcel.peer in self._lines:
                self._lines[parcel.peer].expect((version, bucket))
        for sending in self._sendings.pop(bucket, ()):
            sending.wait()
        sent.seconds["wait"] += time.perf_counter() - begun


def _listen(host: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


@torch.no_grad()
def fill(
    packet: Packet,
    parameters: Mapping[str, torch.Tensor],
    known: torch.Tensor | None = None,
    fp8_block: tuple[int, int] | None = None,
) -> tuple[int, Sequence[bool]]:
    """Read a packet's slices from `parameters`, converted to the types that travel.

    Args:
        known: checksums of the slices [slices]; those that still have them do not follow.

    Returns: how many bytes of the packet are used, and for each slice whether it follows.
    """
    at, found, followed = packet.body, [], []
    for index, item in enumerate(packet.parcel.slices):
        part = packet.place(item, at)
        source = parameters[item.local]
        if item.reading == CONVERT:
            part.copy_(source[item.box.slices])
        else:
            assert fp8_block is not None, "a share that quantises has the size of its blocks"
            READ[item.reading](source, item.box, fp8_block, part)
        del source  # it may have been made for this slice: gone before the next one is
        found.append(checksum(part))
        followed.append(known is None or bool(found[-1] != known[index]))
        at += aligned(item.nbytes) if followed[-1] else 0
    packet.checksums.copy_(torch.stack(found))
    packet.sent.copy_(torch.tensor(followed, dtype=torch.uint8))
    return at, followed


def share_device_buffer(buffer: torch.Tensor) -> tuple:
    """What another process on the same machine needs to open a tensor on a GPU (`open_device_buffer`).

    The device's number, which may differ there, is given as the GPU's UUID; it is the argument `place` of torch's
    rebuild function (torch 2.13: `rebuild_cuda_tensor(cls, size, stride, offset, storage_cls, dtype, device, ...)`).
    """
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(buffer)
    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return uuid, rebuild, arguments, 6
