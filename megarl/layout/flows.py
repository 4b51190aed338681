"""The copies that a shard of the target needs from shards of the source, and the ranks that send them.

A `Flow` is worked out once, however many ranks hold the target shard. Its transfers are shared out among equally
near holders so that, over the targets that they serve, no holder sends more than an equal share and the largest
transfer (`share_out`).
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.layout.boxes import Box, Piece
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

    @staticmethod
    def between(order: int, box: Box, nbytes: int, holders: Sequence[Piece], target: Piece) -> "Transfer":
        """The transfer of `box`, a part that each of `holders` and `target` have."""
        sources = tuple([(piece.local, box.inside(piece.box, piece.local_box)) for piece in holders])
        target_box = box.inside(target.box, target.local_box)
        return Transfer(order, target.tensor, box, nbytes, sources, target.local, target_box)


class Share(NamedTuple):
    """Transfers shared out among senders: the sender of each, and the bytes of each sender."""

    sender_of: list[int]
    loads: list[int]


class Route(NamedTuple):
    """How a flow reaches one target rank: over LINKS[link], from `senders` by `share`; sender 0 comes first."""

    link: int
    senders: tuple[int, ...]
    share: Share


@dataclass
class Flow:
    """The input of the target's shard `shard` from the source's shards `sources`, which are replicas of it."""

    shard: int
    sources: tuple[int, ...]
    transfers: list[Transfer] = field(default_factory=list)
    routes: dict[int, Route] = field(default_factory=dict)

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


def make_routes(flow: Flow, candidates: Candidates, target: Layout) -> dict[int, Route]:
    """How the flow reaches each rank of its target shard."""
    groups: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for rank in target.shards[flow.shard].ranks:
        groups[candidates.nearest(target.places[rank] if target.places else None)].append(rank)
    routes = {}
    sizes = [transfer.nbytes for transfer in flow.transfers]
    for (link, where), ranks in groups.items():
        senders = candidates.near[where]
        for index, (rank, share) in enumerate(
            zip(ranks, share_out(sizes, len(senders), len(ranks)), strict=True)
        ):
            # Each target begins with another sender, each shard too, or the first would get all that is left over.
            turn = (flow.shard + index) % len(senders)
            routes[rank] = Route(link, senders[turn:] + senders[:turn], share)
    return routes


def share_out(sizes: Sequence[int], num_senders: int, num_targets: int) -> list[Share]:
    """For each target the transfers of each of `num_senders` senders; target t's sender s is number (s + t) modulo all.

    The same for each full round of `num_senders` targets, which by their turns come out exactly equal. In the last
    round that is not full the largest transfer goes first, to the sender with the least load: by Graham's bound none
    sends more than an equal share and the largest transfer (R. L. Graham, 1969, "Bounds on multiprocessing
    timing anomalies").
    """
    last = num_targets % num_senders
    shares = [_largest_first(sizes, num_senders, 1)[0]] * (num_targets - last) if num_targets > last else []
    return shares + (_largest_first(sizes, num_senders, last) if last else [])


def _largest_first(sizes: Sequence[int], num_senders: int, num_targets: int) -> list[Share]:
    """See `share_out`: targets 0 to `num_targets` - 1, with as many senders or more."""
    if num_senders == 1:
        return [Share([0] * len(sizes), [sum(sizes)])]
    loads = [(0, sender) for sender in range(num_senders)]
    shares = [Share([0] * len(sizes), [0] * num_senders) for _ in range(num_targets)]
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        for target, share in enumerate(shares):
            load, sender = loads[0]
            heapq.heapreplace(loads, (load + sizes[at], sender))
            own = (sender - target) % num_senders  # as this target counts them
            share.sender_of[at] = own
            share.loads[own] += sizes[at]
    return shares
