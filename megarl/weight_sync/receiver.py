"""Receives weights inside SGLang: runs in each of its schedulers, one for each TP rank.

SGLang calls `receive_weights` as a custom weight loader (`custom_weight_loader`, `load_format`) between
its `begin_weight_update` and `end_weight_update`, once a version. The tensor it passes is a small JSON, as bytes: the
version, the session, and by TP rank the file that says which slices the rank takes from which trainer ranks (`InboxFile`); it is
read once a session.

Guarantees, each asserted by a test:

- the parameters themselves are verified: each slice is read back from its parameter and its checksum compared; so is each
  slice that was not sent because it has not changed;
- nothing is skipped: an unknown name, type or place is an error (SGLang's own loaders ignore such names);
- a version is complete: over its buckets every element of every parameter is written exactly once, but for
  the padding that the share declares; a version of adapters alone is taken only on top of a complete one, from the same
  trainer and into the same memory;
- a draft that no version fills is what was loaded from its folder: it is verified with every version;
- tensors that SGLang derives from parameters are derived again from those of the version; scales of its cache, which no version
  has, are 1;
- the first version of a session, and any that SGLang moved afterwards, is compared once more when SGLang has ended its update:
  `end_weight_update` runs every layer's processing of loaded weights after the receiver has compared them. In sglang 0.5.21
  it leaves megarl's engines as they are; `verify_after_update` checks that;
- an error names the tensor and the rank, and reaches the engine's process, with the answers of all other ranks, through a file
  next to that of TP rank 0 (`results_path`): an exception would end the scheduler (sglang 0.5.21).
"""

import json
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.layout.boxes import Box
from megarl.models import DRAFT
from megarl.weight_sync.gpu_buckets import Taken, TakenBucket
from megarl.weight_sync.inbox import Inbox
from megarl.weight_sync.links import Token, describe_token
from megarl.weight_sync.packets import Address, Packet, Slice, SyncShare, checksum
from megarl.weight_sync.served_model import (
    AdapterSlot,
    RefusedError,
    check_complete,
    clear_biases,
    draft_of,
    draft_weights,
    has_slot,
    named_weights,
    place,
    renew_derived,
    set_cache_scales,
    verify_draft,
    weights_of,
)
from megarl.weight_sync.slice_kernels import checksums_in_place

LOADER = "megarl.weight_sync.receiver.receive_weights"
RECEIVER = "_megarl_receiver"  # attribute of the model; SGLang gives a loader no other place to keep state


@dataclass(frozen=True)
class InboxFile:
    """A rank's instructions for one connection of trainer and engine; written to the path that the request names.

    Attributes:
        addresses: of the trainer ranks whose memory it maps.
        hub: where the members of the exchange meet (None: there is no exchange).
        timeout: seconds that the rank waits for another one.
    """

    share: SyncShare
    addresses: dict[int, Address]
    hub: tuple[str, int] | None
    timeout: float

    def write(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))


@dataclass
class ReceiveReport:
    """A rank's figures for one received version.

    Attributes:
        bytes_written, bytes_kept: bytes of slices that were sent, and of slices that were not sent because they have not changed.
        bytes_draft: of a draft's parameters that no version has; they were verified, too.
        buffer_bytes: memory for packets.
        seconds: by phase: wait, write, verify.
    """

    version: int
    bytes_written: int = 0
    bytes_kept: int = 0
    bytes_draft: int = 0
    buffer_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"wait": 0.0, "write": 0.0, "verify": 0.0})


def request_bytes(version: int, session: str, inboxes: Sequence[Path], complete: bool = True) -> bytes:
    """The message that carries a request through SGLang to a rank: a pickle of a uint8 tensor with a name.

    SGLang's own serializer puts tensors into shared memory and sends its name, which ranks on other nodes cannot open (0.5.21).

    Args:
        session: names the connection of trainer and engine; a new one replaces the old one.
        inboxes: each TP rank's file, on the rank's own node.
        complete: false: the weights that training does not change are not sent (`SyncShare.frozen`).
    """
    paths = [str(path) for path in inboxes]
    request = {"version": version, "session": session, "inboxes": paths, "complete": complete}
    tensor = torch.tensor(list(json.dumps(request).encode()), dtype=torch.uint8)
    return pickle.dumps([("request", tensor)])


def results_path(inbox: Path) -> Path:
    """The file into which TP rank 0, whose inbox file is `inbox`, writes all ranks' answers: {"ok", "error", "rank"} and the fields of
    `ReceiveReport`."""
    return inbox.with_name(inbox.name + ".results")


def receive_weights(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry point: receive the version that the request announces."""
    from sglang.srt.runtime_context import get_parallel

    ((_, tensor),) = named_tensors
    parallel = get_parallel()
    rank = parallel.tp_rank
    request = json.loads(bytes(tensor.cpu().numpy()))
    inbox = Path(request["inboxes"][rank])
    result = {"ok": True, "error": "", "rank": rank}
    # Any exception that left this function would end SGLang's scheduler, and with it the engine.
    try:
        receiver = connected(model, request["session"], inbox)
        result |= vars(receiver.receive(request["version"], request["complete"]))
    except Exception as error:
        kind = "" if isinstance(error, RefusedError) else f"{type(error).__name__}: "
        result |= {"ok": False, "error": f"{kind}{error} (TP rank {rank})"}
    results = every_rank(result, parallel.tp_group.cpu_group)
    if rank == 0:
        building = results_path(inbox).with_suffix(".building")
        building.write_text(json.dumps(results))
        os.replace(building, results_path(inbox))


def every_rank(result: dict, group: torch.distributed.ProcessGroup) -> list[dict]:
    """Gather the results of all TP ranks on each of them: some may be on other nodes, where files are not shared."""
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

    def __init__(self, model: torch.nn.Module, instructions: InboxFile, session: str) -> None:
        self.session, self._model, self._share = session, model, instructions.share
        self._fills_draft = any(
            item.local.startswith(DRAFT)
            for specs in instructions.share.buckets
            for spec in specs
            for item in spec.slices
        )
        self._bound_to: tuple = ()
        self._views: list[list[list[torch.Tensor]]] = []  # by bucket, packet, slice
        self._slot: AdapterSlot | None = None  # where adapters are sent separately from the weights
        self._holds_frozen = False
        # By bucket and packet, the checksums of the slices that were written last.
        self._checksums: dict[tuple[int, int], torch.Tensor] = {}
        self._read_again = False
        self._taken: dict[int, TakenBucket] = {}  # on a GPU: by bucket, where its slices go
        self._device = next(model.parameters()).device.type
        self._at_once = self._device != "cpu"  # whether a bucket is taken by kernels
        self._inbox = Inbox(
            instructions.share, instructions.addresses, instructions.hub, self._device, instructions.timeout
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device for packets that arrive."""
        return self._inbox.buffer_bytes

    def close(self) -> None:
        self._inbox.close()

    @torch.no_grad()
    def receive(self, version: int, complete: bool = True) -> ReceiveReport:
        """Write a version into the model's parameters and verify it there.

        A version that is refused is taken to its end all the same, so that no trainer rank waits for this rank.

        Args:
            complete: false: the weights that training does not change are not sent; the engine has them from the last complete
                version.
        """
        received = ReceiveReport(version)
        first = 0 if complete else self._share.frozen
        try:
            refusal = self._bind(complete)
            refusal = self._take(version, first, received, refusal)
            if refusal is None and not self._fills_draft:
                refusal = self._verify_draft(received)
            received.buffer_bytes = self._inbox.buffer_bytes
            self._inbox.end(version)
        except BaseException:
            self._holds_frozen = False
            self.close()  # so that the trainer ranks do not wait for this one
            raise
        self._holds_frozen = refusal is None
        if refusal is not None:
            raise refusal
        draft = draft_of(self._model) if self._fills_draft else None
        for model in (self._model, draft) if complete else ():
            if model is not None:
                renew_derived(model)
                set_cache_scales(model)
                clear_biases(model)
        return received

    @torch.no_grad()
    def verify_again(self) -> str | None:
        """Verify the last version again after SGLang's end of an update; returns the first difference, None if there is none.

        All slices are read after the first version of a session, and whenever a parameter has become another tensor.
        """
        if not self._holds_frozen:
            return None  # the version was refused
        moved = self._places() != self._bound_to
        if self._read_again and not moved:
            return None
        if moved and (refusal := self._find_views()) is not None:
            return f"SGLang's end_weight_update has changed the parameters: {refusal}"
        for (bucket, index), sums in self._checksums.items():
            spec = self._share.buckets[bucket][index]
            views = self._views[bucket][index]
            for number in (checksums_in_place(views) != sums).nonzero()[:1]:
                item = spec.slices[int(number)]
                return f"SGLang's end_weight_update has changed {item.tensor} in {item.local}"
        self._read_again = True
        return None

    def _verify_draft(self, received: ReceiveReport) -> RefusedError | None:
        """Verify a draft that stays as it was loaded: memory may have been released and taken back since the last version."""
        if draft_of(self._model) is None:
            return None
        begun = time.perf_counter()
        try:
            received.bytes_draft = verify_draft(self._model)
        except RefusedError as error:
            return error
        received.seconds["verify"] += time.perf_counter() - begun
        return None

    def _take(
        self, version: int, first: int, received: ReceiveReport, refusal: RefusedError | None
    ) -> RefusedError | None:
        """Take all packets of a version from bucket `first` on; after a refusal they are taken, but not written."""
        self._inbox.begin(first)
        unchecked: list[tuple[Token, Taken]] = []
        for bucket in range(first, len(self._share.buckets)):
            token = version, bucket
            if not self._at_once:
                refusal = self._take_bucket(token, received, refusal)
            elif (taken := self._take_bucket_at_once(token, received, refusal)) is not None:
                unchecked.append((token, taken))
                # A shared slot is given back once the host has seen that its packets were taken. Packets from the network are
                # ordered by the stream, and are checked at the end: the host has waited for their arrival already.
                if self._share.mapped[bucket]:
                    refusal = _first_difference(unchecked, self._share)
                    unchecked = []
            self._inbox.release(version, bucket)
        return refusal if refusal is not None else _first_difference(unchecked, self._share)

    def _take_bucket_at_once(
        self, token: Token, received: ReceiveReport, refusal: RefusedError | None
    ) -> Taken | None:
        """Take a bucket on a GPU; returns the results to check: None after a refusal, or without packets."""
        bucket, specs = token[1], self._share.buckets[token[1]]
        begun = time.perf_counter()
        slot = self._inbox.take_slot(*token)
        received.seconds["wait"] += time.perf_counter() - begun
        if refusal is not None or slot is None or not specs:
            return None
        begun = time.perf_counter()
        if bucket not in self._taken:
            self._taken[bucket] = TakenBucket(
                specs, [view for views in self._views[bucket] for view in views]
            )
        taken = self._taken[bucket].take(token, slot, self._share.skip_unchanged)
        for index, sums in enumerate(taken.checksums.split([len(spec.slices) for spec in specs])):
            self._checksums[bucket, index] = sums
        for item, came in zip((item for spec in specs for item in spec.slices), taken.came, strict=True):
            received.bytes_written += item.nbytes if came else 0
            received.bytes_kept += 0 if came else item.nbytes
        received.seconds["write"] += time.perf_counter() - begun
        return taken

    def _take_bucket(
        self, token: Token, received: ReceiveReport, refusal: RefusedError | None
    ) -> RefusedError | None:
        """Take a bucket slice by slice; returns the first difference, or `refusal`."""
        taken: list[tuple[int, torch.Tensor]] = []
        differences: list[torch.Tensor] = []
        begun = time.perf_counter()
        for index, data in self._inbox.take(*token):
            received.seconds["wait"] += time.perf_counter() - begun
            if refusal is None:
                differences += self._write(index, data, token, received)
                taken.append((index, data))
            begun = time.perf_counter()
        received.seconds["wait"] += time.perf_counter() - begun
        begun = time.perf_counter()
        wrong = bool(torch.cat(differences).any()) if differences else False
        received.seconds["verify"] += time.perf_counter() - begun
        return self._difference(taken, token) if wrong else refusal

    def _bind(self, complete: bool) -> RefusedError | None:
        """Find the place of every slice in the model, unless the places are known and the model's tensors have not moved."""
        if (refusal := self._bind_adapters(complete)) is not None:
            return refusal
        if self._places() == self._bound_to:
            return None
        if not complete:
            return RefusedError(
                "adapters came alone, but the weights are not where they were: sync all of them"
            )
        return self._find_views()

    def _find_views(self) -> RefusedError | None:
        share, targets = self._share, self._targets()
        written: dict[str, list[Box]] = defaultdict(list)
        try:
            self._views = [
                [[place(item, targets) for item in spec.slices] for spec in specs] for specs in share.buckets
            ]
            for item in (item for specs in share.buckets for spec in specs for item in spec.slices):
                written[item.local].append(item.box)
            check_complete(weights_of(self._model) | self._draft | self._adapters, written, share.padding)
        except RefusedError as error:
            return error
        self._taken = {}
        self._bound_to = self._places()
        return None

    def _targets(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_buffers()) | named_weights(self._model) | self._draft | self._adapters

    @property
    def _draft(self) -> dict[str, torch.Tensor]:
        """The parameters of the model that drafts tokens, where they come with the weights."""
        return draft_weights(self._model) if self._fills_draft else {}

    @property
    def _adapters(self) -> dict[str, torch.Tensor]:
        """The adapters' slot, where they are sent separately from the weights."""
        return self._slot.tensors if self._slot is not None else {}

    def _places(self) -> tuple:
        """The current addresses, shapes and types of the model's tensors."""
        return tuple((name, t.data_ptr(), t.shape, t.dtype) for name, t in self._targets().items())

    def _bind_adapters(self, complete: bool) -> RefusedError | None:
        """Find the adapters' slot. A complete version begins with zeros in it, so that elements that no slice fills are zero."""
        scaling = self._share.scaling
        if (scaling is not None) != has_slot(self._model):
            here, sent = ("with", "without") if scaling is None else ("without", "with")
            return RefusedError(f"the engine was started {here} adapters, weights come {sent} them")
        if scaling is None:
            return None
        if complete:
            self._slot = AdapterSlot(self._model)
            for tensor in self._slot.tensors.values():
                tensor.zero_()
        elif not self._holds_frozen or self._slot is None:
            return RefusedError("adapters came alone, but the engine holds no verified weights for them")
        problem = self._slot.problem(scaling)
        return RefusedError(problem) if problem is not None else None

    def _write(
        self, index: int, data: torch.Tensor, token: Token, received: ReceiveReport
    ) -> list[torch.Tensor]:
        """Write a packet's slices and compare the parameters' checksums with the packet's; returns where they differ (bool)."""
        bucket = token[1]
        spec, views = self._share.buckets[bucket][index], self._views[bucket][index]
        packet, sums = Packet(data, spec.slices), []
        follows = packet.sent.tolist() if self._share.skip_unchanged else [True] * len(views)
        for (item, elements), target, came in zip(packet.places(), views, follows, strict=True):
            begun = time.perf_counter()
            if came:
                target.copy_(elements)
                received.bytes_written += item.nbytes
            else:
                received.bytes_kept += item.nbytes
            written = time.perf_counter()
            sums.append(checksum(target))
            received.seconds["write"] += written - begun
            received.seconds["verify"] += time.perf_counter() - written
        found = self._checksums[bucket, index] = torch.stack(sums)
        return [packet.identity != torch.tensor(token, device=data.device), found != packet.checksums]

    def _difference(self, packets: Sequence[tuple[int, torch.Tensor]], token: Token) -> RefusedError | None:
        """The first difference between a bucket's packets and the parameters into which they were written, as an error."""
        for index, data in packets:
            spec = self._share.buckets[token[1]][index]
            packet, arrived = Packet(data, spec.slices), self._checksums[token[1], index]
            found = tuple(packet.identity.tolist())
            if found != token:
                return RefusedError(
                    f"trainer rank {spec.source} sent {describe_token(found)} where {describe_token(token)} was due"
                )
            for number in (arrived != packet.checksums).nonzero()[:1].flatten().tolist():
                item, sent = spec.slices[number], int(packet.checksums[number])
                what = "sent it" if packet.sent[number] else "did not send it, as unchanged"
                return RefusedError(_wrong_checksum(item, spec.source, int(arrived[number]), sent, what))
        return None


def _first_difference(buckets: Sequence[tuple[Token, Taken]], share: SyncShare) -> RefusedError | None:
    """The first difference between buckets on a GPU and the parameters into which they were written. The host waits for them here."""
    if not buckets or not bool(torch.cat([taken.different for _, taken in buckets]).any()):
        return None
    for token, taken in buckets:
        specs = share.buckets[token[1]]
        for number in taken.different.nonzero()[:1].flatten().tolist():
            if number < 2 * len(specs):
                source = specs[number % len(specs)].source
                return RefusedError(
                    f"trainer rank {source} sent another packet where {describe_token(token)} was due"
                )
            at = number - 2 * len(specs)
            spec, item = [(spec, item) for spec in specs for item in spec.slices][at]
            what = "sent it" if taken.came[at] else "did not send it, as unchanged"
            found, sent = int(taken.checksums[at]), int(taken.expected[at])
            return RefusedError(_wrong_checksum(item, spec.source, found, sent, what))
    return None


def _wrong_checksum(item: Slice, source: int, found: int, sent: int, what: str) -> str:
    return f"{item.tensor}: checksum {found:#x} in {item.local}, {sent:#x} on trainer rank {source}, which {what}"


def verify_after_update(result: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's answer to `end_weight_update`, turned into a refusal if any rank finds other weights than it received.

    SGLang sends rank 0's answer, so each rank gathers the findings of all of them.
    """
    receiver = getattr(updater.tp_worker.model_runner.model, RECEIVER, None)
    problem = receiver.verify_again() if receiver is not None else None
    problems = [answer["problem"] for answer in every_rank({"problem": problem}, updater.tp_cpu_group)]
    messages = [f"{problem} (TP rank {rank})" for rank, problem in enumerate(problems) if problem is not None]
    if result.success and messages:
        return type(result)(success=False, message="; ".join(messages))
    return result
