"""Receives weights inside SGLang: runs in each of its schedulers, one for each TP rank.

SGLang calls `receive_weights` as a custom weight loader (`custom_weight_loader`, `load_format`) between
its `begin_weight_update` and `end_weight_update`, once a version. The tensor it passes is a small JSON, as bytes: the
version, the session, and by TP rank the file that says what the rank takes from whom (`InboxFile`); it is read once
a session.

Guarantees, each asserted by a test:

- what counts is what lies in the parameter: each slice is read back from it and its checksum compared; so is each
  slice that was not sent because it has not changed;
- nothing is skipped: an unknown name, type or place is an error (SGLang's own loaders ignore such names);
- a version is complete: over its buckets every element of every parameter is written exactly once, but for
  the padding that the share declares; a version of adapters alone is taken only on top of a whole one, from the same
  trainer and into the same memory;
- what SGLang derives from parameters is derived again from those of the version; scales of its cache, which no version has, are 1;
- the first version of a session, and any that SGLang then moved, is compared once more when SGLang has ended its update
  (`after_update`);
- an error names the tensor and the rank, and reaches the engine's process, with what all other ranks say, through a file
  beside that of TP rank 0 (`results_path`): an exception would end the scheduler (sglang 0.5.21).
"""

import json
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megarl.layout.boxes import Box
from megarl.weight_sync.adapter_slot import Slot, has_slot
from megarl.weight_sync.binding import (
    RefusedError,
    check_complete,
    named_weights,
    place,
    renew_derived,
    set_cache_scales,
    weights_of,
)
from megarl.weight_sync.checksum import checksum
from megarl.weight_sync.inbox import Inbox
from megarl.weight_sync.links import LinkError, Token, describe
from megarl.weight_sync.packets import Address, Packet, SyncShare

LOADER = "megarl.weight_sync.receiver.receive_weights"
RECEIVER = "_megarl_receiver"  # attribute of the model; SGLang gives a loader no other place to remember


@dataclass(frozen=True)
class InboxFile:
    """What a rank is told when trainer and engine are connected; `write` it where the request says.

    Attributes:
        timeout: seconds that the rank waits for a trainer rank.
    """

    share: SyncShare
    addresses: dict[int, Address]
    timeout: float

    def write(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))


@dataclass
class Received:
    """What a rank took of a version; `seconds` by what it did: wait, write, verify."""

    version: int
    bytes_written: int = 0
    bytes_kept: int = 0
    buffer_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"wait": 0.0, "write": 0.0, "verify": 0.0})


def request_bytes(version: int, session: str, inboxes: Sequence[Path], whole: bool = True) -> bytes:
    """What carries a request through SGLang to a rank: a pickle of a uint8 tensor with a name.

    SGLang's own serializer puts tensors into shared memory and sends its name, which ranks on other nodes cannot open (0.5.21).

    Args:
        session: names the connection of trainer and engine; a new one replaces what was there.
        inboxes: each TP rank's file, on the rank's own node.
        whole: false: what training leaves alone does not come (`SyncShare.frozen`).
    """
    request = {
        "version": version,
        "session": session,
        "inboxes": [str(path) for path in inboxes],
        "whole": whole,
    }
    tensor = torch.tensor(list(json.dumps(request).encode()), dtype=torch.uint8)
    return pickle.dumps([("request", tensor)])


def results_path(inbox: Path) -> Path:
    """Where TP rank 0, whose file is `inbox`, puts all ranks' answers: {"ok", "error", "rank"} and the fields of `Received`."""
    return inbox.with_name(inbox.name + ".results")


def receive_weights(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry point: take the version that the request announces."""
    from sglang.srt.runtime_context import get_parallel

    ((_, tensor),) = named_tensors
    parallel = get_parallel()
    rank = parallel.tp_rank
    request = json.loads(bytes(tensor.cpu().numpy()))
    inbox = Path(request["inboxes"][rank])
    result = {"ok": True, "error": "", "rank": rank}
    # Any exception that left this function would end SGLang's scheduler, and with it the whole engine.
    try:
        receiver = connected(model, request["session"], inbox)
        result |= vars(receiver.receive(request["version"], request["whole"]))
    except Exception as error:
        kind = "" if isinstance(error, RefusedError) else f"{type(error).__name__}: "
        result |= {"ok": False, "error": f"{kind}{error} (TP rank {rank})"}
    results = every_rank(result, parallel.tp_group.cpu_group)
    if rank == 0:
        building = results_path(inbox).with_suffix(".building")
        building.write_text(json.dumps(results))
        os.replace(building, results_path(inbox))


def every_rank(result: dict, group: torch.distributed.ProcessGroup) -> list[dict]:
    """The results of all TP ranks, on each of them: some may be on other nodes."""
    results: list = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(results, result, group=group)
    return results


def connected(model: torch.nn.Module, session: str, inbox: Path) -> "Receiver":
    """The model's receiver for this session."""
    receiver = getattr(model, RECEIVER, None)
    if receiver is None or receiver.session != session:
        if receiver is not None:
            receiver.close()
        setattr(model, RECEIVER, None)
        receiver = Receiver(model, pickle.loads(inbox.read_bytes()), session)
        setattr(model, RECEIVER, receiver)
    return receiver


class Receiver:
    """Takes versions into a model's parameters.

    Raises:
        RefusedError: the share does not fill the model.
        LinkError: a trainer rank is gone, silent, or at another version.
    """

    def __init__(self, model: torch.nn.Module, told: InboxFile, session: str) -> None:
        self.session, self._model, self._share = session, model, told.share
        self._bound_to: tuple = ()
        self._views: list[list[list[torch.Tensor]]] = []  # by bucket, parcel, slice
        self._slot: Slot | None = None  # of adapters, where these are sent beside the weights
        self._holds_frozen = False
        self._checksums: dict[
            tuple[int, int], torch.Tensor
        ] = {}  # by bucket and parcel, of what was written last
        self._read_again = False
        device = next(model.parameters()).device.type
        self._inbox = Inbox(told.share, told.addresses, device, told.timeout)

    @property
    def buffer_bytes(self) -> int:
        """Memory for what arrives, on the device."""
        return self._inbox.buffer_bytes

    def close(self) -> None:
        self._inbox.close()

    @torch.no_grad()
    def receive(self, version: int, whole: bool = True) -> Received:
        """Write a version into the model's parameters and verify it there.

        A version that is refused is taken to its end all the same, so that no trainer rank waits for this one.

        Args:
            whole: false: what training leaves alone does not come; it is there from the last whole version.
        """
        received = Received(version)
        refusal = self._bind(whole)
        first = 0 if whole else self._share.frozen
        try:
            refusal = self._take(version, first, received, refusal)
            received.buffer_bytes = self._inbox.buffer_bytes
            self._inbox.end(version)
        except LinkError:
            self._holds_frozen = False
            self.close()  # the trainer ranks shall not wait for this one
            raise
        self._holds_frozen = refusal is None
        if refusal is not None:
            raise refusal
        if whole:
            renew_derived(self._model)
            set_cache_scales(self._model)
        return received

    @torch.no_grad()
    def verify_again(self) -> str | None:
        """After what SGLang did to the parameters at the end of an update: what of the last version is no longer there; None: nothing.

        Read are all slices, after the first version of a session and whenever a parameter is another tensor than it was.
        """
        if not self._holds_frozen:
            return None  # the version was refused
        moved = self._places() != self._bound_to
        if self._read_again and not moved:
            return None
        if moved and (refusal := self._find_views()) is not None:
            return f"SGLang's end_weight_update has changed the parameters: {refusal}"
        for (bucket, index), sums in self._checksums.items():
            parcel = self._share.buckets[bucket][index]
            found = torch.stack([checksum(view) for view in self._views[bucket][index]])
            for number in (found != sums).nonzero()[:1]:
                item = parcel.slices[int(number)]
                return f"SGLang's end_weight_update has changed {item.tensor} in {item.local}"
        self._read_again = True
        return None

    def _take(
        self, version: int, first: int, received: Received, refusal: RefusedError | None
    ) -> RefusedError | None:
        """Take all packets of a version from bucket `first` on; once there is a refusal they are left alone."""
        self._inbox.begin(first)
        for bucket, parcels in list(enumerate(self._share.buckets))[first:]:
            begun = time.perf_counter()
            for index, data in self._inbox.take(version, bucket):
                received.seconds["wait"] += time.perf_counter() - begun
                if refusal is None:
                    packet, views = Packet(data, parcels[index]), self._views[bucket][index]
                    refusal = self._write(packet, views, (version, bucket), received)
                    self._checksums[bucket, index] = packet.checksums.clone()
                begun = time.perf_counter()
            self._inbox.release(version, bucket)
        return refusal

    def _bind(self, whole: bool) -> RefusedError | None:
        """Find every slice's place in the model, unless they are known and it is as it was."""
        if (refusal := self._bind_adapters(whole)) is not None:
            return refusal
        if self._places() == self._bound_to:
            return None
        if not whole:
            return RefusedError(
                "adapters came alone, but the weights are not where they were: sync all of them"
            )
        return self._find_views()

    def _find_views(self) -> RefusedError | None:
        share, targets = self._share, self._targets()
        written: dict[str, list[Box]] = {}
        adapters = self._slot.tensors if self._slot is not None else {}
        try:
            self._views = [
                [[place(item, targets) for item in parcel.slices] for parcel in parcels]
                for parcels in share.buckets
            ]
            for parcels in share.buckets:
                for item in (item for parcel in parcels for item in parcel.slices):
                    written.setdefault(item.local, []).append(item.box)
            check_complete({**weights_of(self._model), **adapters}, written, share.padding)
        except RefusedError as error:
            return error
        self._bound_to = self._places()
        return None

    def _targets(self) -> dict[str, torch.Tensor]:
        adapters = self._slot.tensors if self._slot is not None else {}
        return {**dict(self._model.named_buffers()), **named_weights(self._model), **adapters}

    def _places(self) -> tuple:
        """Where the model's tensors are now."""
        return tuple((name, t.data_ptr(), t.shape, t.dtype) for name, t in self._targets().items())

    def _bind_adapters(self, whole: bool) -> RefusedError | None:
        """Find the adapters' slot; with a whole version it begins as zeros, which those that no slice fills stay."""
        scaling = self._share.scaling
        if (scaling is not None) != has_slot(self._model):
            here, sent = ("with", "without") if scaling is None else ("without", "with")
            return RefusedError(f"the engine was started {here} adapters, weights come {sent} them")
        if scaling is None:
            return None
        if whole:
            self._slot = Slot(self._model)
            for tensor in self._slot.tensors.values():
                tensor.zero_()
        elif not self._holds_frozen or self._slot is None:
            return RefusedError("adapters came alone, but the engine holds no verified weights for them")
        problem = self._slot.problem(scaling)
        return RefusedError(problem) if problem is not None else None

    def _write(
        self, packet: Packet, views: list[torch.Tensor], token: Token, received: Received
    ) -> RefusedError | None:
        """Write a packet's slices and compare what lies in the parameters then; what is wrong, if anything is."""
        source, found = packet.parcel.peer, tuple(packet.identity.tolist())
        if found != token:
            return RefusedError(
                f"trainer rank {source} sent {describe(found)} where {describe(token)} was due"
            )
        arrived = []
        for (item, elements), target in zip(packet.slices(), views, strict=True):
            begun = time.perf_counter()
            if elements is None:
                received.bytes_kept += item.nbytes
            else:
                target.copy_(elements)
                received.bytes_written += item.nbytes
            written = time.perf_counter()
            arrived.append(checksum(target))
            received.seconds["write"] += written - begun
            received.seconds["verify"] += time.perf_counter() - written
        # On a GPU this waits for all of the above, so the packet may be released.
        wrong = (torch.stack(arrived) != packet.checksums).nonzero()
        if len(wrong) == 0:
            return None
        index = int(wrong[0])
        item, sent = packet.parcel.slices[index], int(packet.checksums[index])
        what = "sent it" if packet.sent[index] else "did not send it, as unchanged"
        return RefusedError(
            f"{item.tensor}: checksum {int(arrived[index]):#x} in {item.local}, {sent:#x} on trainer rank {source}, "
            f"which {what}"
        )
