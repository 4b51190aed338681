"""The copies that a shard of the target needs from shards of the source, and the ranks that send them.

A `Flow` is worked out once, however many ranks hold the target shard. Equally near holders get equally many targets
each; for each target that is left over they share out its transfers, so that no holder sends more than an equal share plus
the largest transfer (`share_out`).

All target ranks of a `Route` get the same transfers from the same senders: a sender reads a transfer once for all of them.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.layout.boxes import Box
from megarl.layout.layouts import Layout, RankPlace


class Transfer(NamedTuple):
    """A copy before its ranks are chosen.

    Attributes:
        order: which piece of the target shard it fills.
        sources: for each source shard of the flow the local tensor that holds `box`, and where in it.
    """

    order: int
    tensor: str
    box: Box
    nbytes: int
    sources: tuple[tuple[str, Box], ...]
    target_local: str
    target_box: Box


class Part(NamedTuple):
    """The slices that a target's piece gets from one box of the source; the same for all pieces of tensors of a kind.

    Attributes:
        sources: the source shards that hold the box `held`.
        slices: of each transfer its box, its bytes, where it lies in the tensor of each of `sources`, and where in the target's.
    """

    sources: tuple[int, ...]
    held: Box
    slices: list[tuple[Box, int, tuple[Box, ...], Box]]


class Share(NamedTuple):
    """Transfers shared out among senders: the sender of each, and the bytes of each sender."""

    sender_of: list[int]
    loads: list[int]


class Route(NamedTuple):
    """How a flow reaches target ranks over LINKS[link]: each of `targets` gets all of it, from `senders` by `share`."""

    link: int
    senders: tuple[int, ...]
    share: Share
    targets: tuple[int, ...]


@dataclass
class Flow:
    """The input of the target's shard `shard` from the source's shards `sources`, which are replicas of it."""

    shard: int
    sources: tuple[int, ...]
    transfers: list[Transfer] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum([transfer.nbytes for transfer in self.transfers])


class Candidates:
    """The ranks of some source shards, by where they run."""

    def __init__(self, source: Layout, shards: tuple[int, ...]) -> None:
        self.holder: dict[int, int] = {}  # rank -> which of `shards` it is in
        for index, shard in enumerate(shards):
            for rank in source.shards[shard].ranks:
                self.holder.setdefault(rank, index)
        near: dict[Hashable, list[int]] = defaultdict(list)
        for rank in sorted(self.holder):
            near[None].append(rank)
            if source.places is not None:
                near[source.places[rank]].append(rank)
                near[source.places[rank].node].append(rank)
        self.near = {where: tuple(ranks) for where, ranks in near.items()}

    def nearest(self, place: RankPlace | None) -> tuple[int, Hashable]:
        """The link of the candidates nearest to `place`, as an index in LINKS, and their key in `near`."""
        if place is not None:
            for link, where in enumerate((place, place.node)):
                if where in self.near:
                    return link, where
        return 2, None


def make_routes(
    flow: Flow, candidates: Candidates, target: Layout, passed_on: Collection[int], most_senders: int | None
) -> list[Route]:
    """How the flow reaches the ranks of its target shard.

    Args:
        passed_on: target ranks that get the flow from another target rank; no route leads to them.
        most_senders: senders of one flow to one target, at most (None: any number).
    """
    groups: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for rank in target.shards[flow.shard].ranks:
        if rank not in passed_on:
            groups[candidates.nearest(target.places[rank] if target.places else None)].append(rank)
    routes = []
    sizes = [transfer.nbytes for transfer in flow.transfers]
    for (link, where), ranks in groups.items():
        senders = candidates.near[where]
        # Each shard, and each stage that sends to it, begins with another sender, or the first would get all that is left over.
        turn = (flow.shard + flow.sources[0]) % len(senders)
        senders = senders[turn:] + senders[:turn]
        dealt = len(ranks) - len(ranks) % len(senders)
        if dealt:
            everything = share_out(sizes, 1)
            for index, sender in enumerate(senders):
                routes.append(Route(link, (sender,), everything, tuple(ranks[index : dealt : len(senders)])))
        if rest := tuple(ranks[dealt:]):
            number = len(senders) if most_senders is None else min(most_senders, len(senders))
            routes.append(Route(link, senders[:number], share_out(sizes, number), rest))
    return routes


def share_out(sizes: Sequence[int], num_senders: int) -> Share:
    """Transfers shared out among senders: the largest goes first, to the sender with the least load.

    By Graham's bound no sender has more than an equal share plus the largest transfer (R. L. Graham, 1969, "Bounds on
    multiprocessing timing anomalies").
    """
    if num_senders == 1:
        return Share([0] * len(sizes), [sum(sizes)])
    loads = [(0, sender) for sender in range(num_senders)]
    share = Share([0] * len(sizes), [0] * num_senders)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        load, sender = loads[0]
        heapq.heapreplace(loads, (load + sizes[at], sender))
        share.sender_of[at] = sender
        share.loads[sender] += sizes[at]
    return share
