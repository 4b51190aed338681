"""Plans: the copies that fill one layout from another, their cost in bytes by rank and link, and their buckets.

A `Copy` fills a slice of one target rank. A `Delivery` is what a source rank reads once: the copies of one slice from that rank into all
target ranks that hold the slice in the same place. Target ranks may also pass on to one another: where `Plan.previous` names
another target rank for a rank, it gets all that it needs from that one, and only the first rank of such a chain is sent to.

Guarantees, each asserted by a test of the same name:
- every target element is written exactly once, or the plan is refused (`exactly_once`);
- every copy's source holds the slice that the copy names (`right_source`);
- among replicas the nearest serve: same device, same node, other node; equally near ones share the sends evenly
  (`nearest_then_evenly`), but with `most_senders` a target rank exchanges data with few of them (`few_senders`);
- a source rank sends a slice once to a chain of target ranks, however long it is (`sent_once_to_a_chain`);
- the same layouts give the same plan everywhere, and a rank's part computed alone equals its part of the
  full plan (`deterministic`).

The input of one target shard is computed once (`Flow`s), whatever the number of ranks that hold the shard; copies
are written out for the requested ranks only.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

from megarl.layout.boxes import Box, Piece
from megarl.layout.flows import Candidates, Flow, Part, Route, Transfer, make_routes
from megarl.layout.layouts import Layout
from megarl.util.memory import collection_paused

LINKS = ("local", "intra_node", "inter_node")
# Of pieces of the target: their tensors' kind (`Holdings.kind`), bytes of an element, box and local box.
_Kind = tuple[int, int, Box, Box]


@dataclass(frozen=True)
class Account:
    """Bytes over each of LINKS: received, by target rank; sent, by source rank; passed on to other target ranks, by target rank.

    Bytes that stay on a device (local) count on both sides.
    """

    received: tuple[dict[str, int], ...]
    sent_by_link: tuple[dict[str, int], ...]
    passed_on: tuple[dict[str, int], ...]

    @property
    def by_link(self) -> dict[str, int]:
        """Bytes that stay on a device, cross devices of a node, and cross nodes."""
        return {link: sum(received[link] for received in self.received) for link in LINKS}

    @property
    def received_from_others(self) -> tuple[int, ...]:
        """Bytes received from other devices, by target rank."""
        return tuple(received["intra_node"] + received["inter_node"] for received in self.received)

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes sent to other devices, by source rank."""
        return tuple(sent["intra_node"] + sent["inter_node"] for sent in self.sent_by_link)


def most_in_flight(buckets: Iterable[Iterable[tuple[int, int]]]) -> int:
    """The most bytes that any rank has in two consecutive buckets: the memory that double buffering needs.

    Args:
        buckets: of each bucket (rank, bytes) pairs; a rank's pairs are added up.
    """
    most = 0
    before: dict[int, int] = {}
    for bucket in buckets:
        now: dict[int, int] = {}
        for rank, nbytes in bucket:
            now[rank] = now.get(rank, 0) + nbytes
        most = max((most, *(nbytes + before.get(rank, 0) for rank, nbytes in now.items())))
        before = now
    return most


def fill_buckets(
    sources: Sequence[int], targets: Sequence[Sequence[int]], sizes: Sequence[int], limit: int
) -> list[int]:
    """For each delivery the number of its bucket: the first in which its source and all of its targets have room.

    In no bucket has a source or a target deliveries of more than `limit` bytes in all; one that is larger by itself is
    alone at all its ends. How few buckets there are depends on the order of the deliveries: neighbours should be of
    different sources and targets.

    Args:
        sources, targets, sizes: of each delivery its ranks and its bytes (at least 1).
    """
    sizes = [min(size, limit) for size in sizes]
    classes = sorted(set(sizes))
    class_of = {size: index for index, size in enumerate(classes)}
    source_ends: dict[int, _Endpoint] = defaultdict(lambda: _Endpoint(classes, limit))
    target_ends: dict[int, _Endpoint] = defaultdict(lambda: _Endpoint(classes, limit))
    buckets = []
    for source, ranks, size in zip(sources, targets, sizes, strict=True):
        ends, index = [source_ends[source], *(target_ends[rank] for rank in ranks)], class_of[size]
        full = 0
        for end in ends:
            full |= end.full[index]
        bit = ~full & (full + 1)  # the lowest bucket that no end has full
        bucket = bit.bit_length() - 1
        for end in ends:
            end.take(bucket, bit, size)
        buckets.append(bucket)
    return buckets


class _Endpoint:
    """The room that one end has left; `full[i]` has bit b set where bucket b has none for a copy of `classes[i]`."""

    __slots__ = ("classes", "full", "limit", "room")

    def __init__(self, classes: list[int], limit: int) -> None:
        self.classes, self.limit = classes, limit
        self.full = [0] * len(classes)
        self.room: dict[int, int] = {}

    def take(self, bucket: int, bit: int, size: int) -> None:
        before = self.room.get(bucket, self.limit)
        self.room[bucket] = after = before - size
        for index in range(bisect_right(self.classes, after), bisect_right(self.classes, before)):
            self.full[index] |= bit


def even_pace(sources: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """An order of the copies in which all sources have sent about equal fractions of their bytes at any time.

    The copies of one source stay in the order that they have.
    """
    totals: dict[int, int] = defaultdict(int)
    for source, size in zip(sources, sizes, strict=True):
        totals[source] += size
    sent: dict[int, int] = defaultdict(int)
    progress = []
    for source, size in zip(sources, sizes, strict=True):
        progress.append(sent[source] / totals[source])
        sent[source] += size
    return sorted(range(len(progress)), key=progress.__getitem__)


class Copy(NamedTuple):
    """`box` of logical `tensor`: from a slice of a source rank's tensor to a slice of a target rank's."""

    tensor: str
    box: Box
    source_rank: int
    source_local: str
    source_box: Box
    target_rank: int
    target_local: str
    target_box: Box


class Delivery(NamedTuple):
    """`box` of logical `tensor`: from a slice of a source rank's tensor to the same slice of each target rank's."""

    tensor: str
    box: Box
    source_rank: int
    source_local: str
    source_box: Box
    target_ranks: tuple[int, ...]
    target_local: str
    target_box: Box


@dataclass(frozen=True)
class Plan:
    """The transition from `source` to `target`; see `make_plan`."""

    source: Layout
    target: Layout
    itemsize: Callable[[str], int]
    max_copy_bytes: int | None
    most_senders: int | None = None
    previous: Mapping[int, int] = field(default_factory=dict)
    # Worked out when they are asked for.
    _flows: dict[int, list[Flow]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _candidates: dict[tuple[int, ...], Candidates] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _parts_of: dict[_Kind, list[Part]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def bytes_of(self, copy: Copy | Delivery) -> int:
        """Bytes of the slice."""
        return copy.box.numel * self._itemsize(copy.tensor)

    @cached_property
    @collection_paused()
    def copies(self) -> tuple[Copy, ...]:
        """All copies, in target rank order; within a rank in the order of its pieces."""
        return tuple([copy for rank in range(self.target.num_ranks) for copy in self.copies_to(rank)])

    @collection_paused()
    def copies_to(self, rank: int) -> list[Copy]:
        """The copies into a target rank, in the order of its pieces."""
        copies = []
        for shard in self.target.shards_of[rank]:
            ordered = [pair for flow in self.flows(shard) for pair in self._expand(flow, rank)]
            ordered.sort(key=_first)
            copies += [copy for _, copy in ordered]
        return copies

    @cached_property
    @collection_paused()
    def deliveries(self) -> list[Delivery]:
        """All deliveries, in the order of the target's shards; within a shard in the order of its pieces."""
        return [
            found for shard in range(len(self.target.shards)) for found in self._deliver(self.flows(shard))
        ]

    @collection_paused()
    def deliveries_from(self, rank: int) -> list[Delivery]:
        """The deliveries of a source rank, in the same order."""
        held = {
            piece.tensor
            for shard in self.source.shards_of[rank]
            for piece in self.source.shards[shard].pieces
        }
        found: list[Delivery] = []
        for shard in range(len(self.target.shards)):
            flows = [
                flow for flow in self._make_flows(shard, held) if rank in self.candidates(flow.sources).holder
            ]
            found += self._deliver(flows, only=rank)
        return found

    def flows(self, shard: int) -> list[Flow]:
        """The input of a target shard, by the source shards that hold it."""
        if shard not in self._flows:
            self._flows[shard] = self._make_flows(shard)
        return self._flows[shard]

    def bytes_from(self, shard: int) -> dict[tuple[int, ...], int]:
        """Bytes that a target shard needs, by the source shards that hold them; its transfers are not worked out."""
        found: dict[tuple[int, ...], int] = {}
        owner, alike = self._owner(shard), Counter[_Kind]()
        one_of: dict[_Kind, Piece] = {}
        for piece in self.target.shards[shard].pieces:
            kind = self._kind(piece)
            alike[kind] += 1
            one_of[kind] = piece
        for kind, number in alike.items():
            for part in self._parts(kind, one_of[kind], owner):
                nbytes = sum([nbytes for _, nbytes, _, _ in part.slices])
                found[part.sources] = found.get(part.sources, 0) + number * nbytes
        return found

    def candidates(self, sources: tuple[int, ...]) -> Candidates:
        """The ranks of source shards."""
        if sources not in self._candidates:
            self._candidates[sources] = Candidates(self.source, sources)
        return self._candidates[sources]

    def account(self) -> Account:
        """The transition's bytes, without writing out its copies."""
        return self._account

    @cached_property
    @collection_paused()
    def _account(self) -> Account:
        received, passed_on = ([[0] * len(LINKS) for _ in range(self.target.num_ranks)] for _ in range(2))
        sent = [[0] * len(LINKS) for _ in range(self.source.num_ranks)]
        for index, shard in enumerate(self.target.shards):
            nbytes = 0
            for flow in self.flows(index):
                nbytes += flow.nbytes
                for route in self._routes(flow):
                    for rank in route.targets:
                        received[rank][route.link] += flow.nbytes
                    for sender, load in zip(route.senders, route.share.loads, strict=True):
                        sent[sender][route.link] += load * len(route.targets)
            for rank in shard.ranks:
                if (before := self.previous.get(rank)) is not None:
                    link = link_between(self.target, before, rank)
                    received[rank][link] += nbytes
                    passed_on[before][link] += nbytes
        sides = [
            tuple(dict(zip(LINKS, rank, strict=True)) for rank in side)
            for side in (received, sent, passed_on)
        ]
        return Account(*sides)

    @collection_paused()
    def pairs(self) -> set[tuple[int, int]]:
        """Pairs of a source rank and a target rank that it sends to."""
        return {
            (sender, target)
            for index in range(len(self.target.shards))
            for flow in self.flows(index)
            for route in self._routes(flow)
            for sender, load in zip(route.senders, route.share.loads, strict=True)
            if load
            for target in route.targets
        }

    def bytes_received(self) -> list[int]:
        """Bytes that each target rank receives, local copies included."""
        return [sum(received.values()) for received in self.account().received]

    @collection_paused()
    def buckets(self, bucket_bytes: int) -> list[tuple[Delivery, ...]]:
        """All deliveries, cut so that in one bucket no rank receives, and none sends, more than `bucket_bytes`.

        A source rank's bytes count once, however many target ranks it sends them to: it has them in its memory once. All
        senders send at an even pace, so that every bucket keeps as many of them busy as possible. A single delivery above
        the limit is alone in its bucket at all its ends.
        """
        names = dict.fromkeys(piece.tensor for shard in self.target.shards for piece in shard.pieces)
        number = {name: index for index, name in enumerate(names)}
        # In the order of targets the senders' lists would follow one another; in the order of tensors they are mixed.
        deliveries = sorted(self.deliveries, key=lambda delivery: number[delivery.tensor])
        sources = [delivery.source_rank for delivery in deliveries]
        sizes = [self.bytes_of(delivery) for delivery in deliveries]
        order = even_pace(sources, sizes)
        # The ranks of a chain receive the same: the room of the first stands for all.
        first = cache(lambda ranks: tuple(rank for rank in ranks if rank not in self.previous))
        numbers = fill_buckets(
            [sources[at] for at in order],
            [first(deliveries[at].target_ranks) for at in order],
            [sizes[at] for at in order],
            bucket_bytes,
        )
        buckets: list[list[Delivery]] = [[] for _ in range(max(numbers, default=-1) + 1)]
        for at, bucket in zip(order, numbers, strict=True):
            buckets[bucket].append(deliveries[at])
        return [tuple(bucket) for bucket in buckets]

    @cached_property
    def _itemsize(self) -> Callable[[str], int]:
        """`itemsize`, asked once for each tensor: a plan has many copies of one."""
        return cache(self.itemsize)

    def _make_flows(self, shard: int, tensors: Collection[str] | None = None) -> list[Flow]:
        """The flows of a target shard; of `tensors` only, unless all are known already."""
        if shard in self._flows:
            return self._flows[shard]
        flows: dict[tuple[int, ...], Flow] = {}
        owner, names_of = self._owner(shard), self.source.holdings.local_names
        for order, piece in enumerate(self.target.shards[shard].pieces):
            tensor, _, local, _ = piece
            if tensors is not None and tensor not in tensors:
                continue
            for sources, held, slices in self._parts(self._kind(piece), piece, owner):
                flow = flows.get(sources)
                if flow is None:
                    flow = flows[sources] = Flow(shard, sources)
                names = names_of(tensor, held)
                for box, nbytes, places, place in slices:
                    at = tuple(zip(names, places, strict=True))
                    flow.transfers.append(Transfer(order, tensor, box, nbytes, at, local, place))
        return list(flows.values())

    def _kind(self, piece: Piece) -> _Kind:
        """A key that pieces of the target share if they get the same parts."""
        tensor, box, _, local_box = piece
        return self.source.holdings.kind(tensor), self._itemsize(tensor), box, local_box

    def _parts(self, kind: _Kind, piece: Piece, owner: str) -> list[Part]:
        """The parts of the target's pieces of a kind; `piece` is one of them."""
        known = self._parts_of.get(kind)
        if known is None:
            itemsize, known = self._itemsize(piece.tensor), []
            for common, holders in self.source.holdings.parts(piece, owner):
                slices = [
                    (
                        box,
                        box.numel * itemsize,
                        tuple([box.inside(held.box, held.local_box) for _, held in holders]),
                        box.inside(piece.box, piece.local_box),
                    )
                    for box in self._split(common, itemsize)
                ]
                known.append(Part(tuple([index for index, _ in holders]), holders[0][1].box, slices))
            self._parts_of[kind] = known
        return known

    def _owner(self, shard: int) -> str:
        """The name of a target shard's rank, for messages."""
        return f"{self.target.name} rank {self.target.shards[shard].ranks[0]}"

    def _split(self, box: Box, itemsize: int) -> Iterable[Box]:
        return (box,) if self.max_copy_bytes is None else box.split(max(1, self.max_copy_bytes // itemsize))

    def _routes(self, flow: Flow) -> list[Route]:
        if not flow.routes:
            flow.routes += make_routes(
                flow, self.candidates(flow.sources), self.target, self.previous, self.most_senders
            )
        return flow.routes

    @cached_property
    def _next(self) -> dict[int, int]:
        """By target rank the one that it passes on to."""
        return {before: rank for rank, before in self.previous.items()}

    def _chain(self, rank: int) -> Iterator[int]:
        """A target rank that source ranks send to, and all that get the same through it, in that order."""
        yield rank
        while rank in self._next:
            rank = self._next[rank]
            yield rank

    def _expand(self, flow: Flow, rank: int) -> Iterator[tuple[int, Copy]]:
        """A flow's copies into target rank `rank`, each after its place in the order."""
        first = rank
        while first in self.previous:
            first = self.previous[first]
        (route,) = [route for route in self._routes(flow) if first in route.targets]
        holder = self.candidates(flow.sources).holder
        senders = [(sender, holder[sender]) for sender in route.senders]
        for transfer, at in zip(flow.transfers, route.share.sender_of, strict=True):
            source, which = senders[at]
            order, tensor, box, _, sources, target_local, target_box = transfer
            source_local, source_box = sources[which]
            yield (
                order,
                Copy(tensor, box, source, source_local, source_box, rank, target_local, target_box),
            )

    def _deliver(self, flows: Sequence[Flow], only: int | None = None) -> Iterator[Delivery]:
        """The deliveries of a target shard's flows (from source rank `only`), in the order of its pieces."""
        found: list[tuple[int, Delivery]] = []
        for flow in flows:
            holder = self.candidates(flow.sources).holder
            for route in self._routes(flow):
                if only is not None and only not in route.senders:
                    continue
                senders = [(sender, holder[sender]) for sender in route.senders]
                targets = tuple([rank for first in route.targets for rank in self._chain(first)])
                for transfer, at in zip(flow.transfers, route.share.sender_of, strict=True):
                    source, which = senders[at]
                    if only is None or source == only:
                        order, tensor, box, _, sources, target_local, target_box = transfer
                        local, held_at = sources[which]
                        found.append(
                            (
                                order,
                                Delivery(
                                    tensor, box, source, local, held_at, targets, target_local, target_box
                                ),
                            )
                        )
        found.sort(key=_first)
        for _, delivery in found:
            yield delivery


def link_between(layout: Layout, rank: int, other: int) -> int:
    """The link of two ranks of a layout, as an index in LINKS."""
    if layout.places is None:
        return LINKS.index("inter_node")
    here, there = layout.places[rank], layout.places[other]
    return LINKS.index(
        "local" if here == there else "intra_node" if here.node == there.node else "inter_node"
    )


def _first(pair: tuple[Any, ...]) -> Any:
    return pair[0]


def make_plan(
    source: Layout,
    target: Layout,
    itemsize: Callable[[str], int] = lambda tensor: 1,
    max_copy_bytes: int | None = None,
    most_senders: int | None = None,
    previous: Mapping[int, int] | None = None,
) -> Plan:
    """The copies that fill `target` from `source`; each is worked out when it is asked for.

    Args:
        itemsize: bytes of an element of a logical tensor as it travels.
        max_copy_bytes: larger copies are split (None: none is).
        most_senders: ranks that share out the sends of one source shard to one target rank, at most (None: any number).
        previous: target rank -> the target rank with the same pieces that passes them on to it (None: all are sent to).

    The distinct boxes of a tensor in the source must not overlap (shards with identical replicas, as in
    Megatron's layouts and files). Where they do, or the source does not hold a piece of the target, the
    plan's methods raise ValueError.
    """
    before = dict(previous or {})
    assert all(target.shards_of[rank] == target.shards_of[other] for rank, other in before.items())
    return Plan(source, target, itemsize, max_copy_bytes, most_senders, before)
