"""What a weight sync will move, before anything runs: bytes by link, buckets, seconds, beside the full-gather way.

No weight is needed, nor a GPU: all figures come from the plan that a run would execute.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megarl.layout import Account, Layout, RankPlace, make_plan
from megarl.layout.account import LINKS, most_in_flight
from megarl.layout.placement import bytes_there
from megarl.models import logical_tensors
from megarl.weight_sync.layouts import best_device_order, hf_layout
from megarl.weight_sync.quantize import with_scales
from megarl.weight_sync.sync_plan import SyncPlan


@dataclass(frozen=True)
class LinkCost:
    """One link of one way of syncing: bytes of all ranks, the most of any one rank, seconds."""

    total: int
    max_received: int
    max_sent: int
    seconds: float


@dataclass(frozen=True)
class WayCost:
    """One way of syncing.

    Attributes:
        links: by the names in LINKS.
        max_received, max_sent: the most that one rank gets from other devices, gives to them.
        seconds: of the link that takes longest, as all are used at the same time.
    """

    links: dict[str, LinkCost]
    max_received: int
    max_sent: int
    seconds: float


@dataclass(frozen=True)
class RankCost:
    """An engine rank: what it serves, and where that comes from, in bytes."""

    rank: int
    local: int
    intra_node: int
    inter_node: int

    @property
    def serves(self) -> int:
        return self.local + self.intra_node + self.inter_node


@dataclass(frozen=True)
class PlanReport:
    """Figures of one sync.

    Attributes:
        num_parameters, model_bytes: of the whole model; in float8 the bytes include the scales.
        reshard, full_gather: what megarl does, and what is done where every rank materialises every full tensor.
        most, least: the engine ranks that get most and least from other devices.
        num_copies, num_buckets: of `bucket_bytes` at most, for any rank that sends or receives.
        in_flight: most bytes that an engine rank and a trainer rank have in two buckets that follow each other: the
            extra memory of a double-buffered sync on either side.
    """

    num_parameters: int
    model_bytes: int
    reshard: WayCost
    full_gather: WayCost
    most: RankCost
    least: RankCost
    num_copies: int
    num_buckets: int
    bucket_bytes: int
    in_flight: tuple[int, int]


def pool_places(num_devices: int, per_node: int, first: int = 0) -> tuple[RankPlace, ...]:
    """`num_devices` devices from number `first` on, `per_node` of them on each node."""
    numbers = range(first, first + num_devices)
    return tuple(RankPlace(f"node{number // per_node}", str(number % per_node)) for number in numbers)


def best_places(sync: SyncPlan, devices: tuple[RankPlace, ...]) -> tuple[RankPlace, ...]:
    """Where the engines' ranks run if they get the devices that hold most of what they serve."""
    order = best_device_order(sync.config, sync.parallel, sync.source_places, sync.engines, devices)
    return tuple(devices[index] for index in order)


def report(sync: SyncPlan, bandwidths: Mapping[str, float]) -> PlanReport:
    """The figures of `sync`.

    Args:
        bandwidths: of each of LINKS what one device sends, and at the same time receives, in bytes a second.
    """
    plan = sync.plan
    account = plan.account()
    ranks = [RankCost(rank, **received) for rank, received in enumerate(account.received)]
    ranks.sort(key=lambda rank: (rank.intra_node + rank.inter_node, rank.rank))
    in_flight = tuple(
        most_in_flight(
            ((getattr(copy, end), plan.bytes_of(copy)) for copy in bucket) for bucket in sync.buckets
        )
        for end in ("target_rank", "source_rank")
    )
    return PlanReport(
        num_parameters=sum(map(prod, logical_tensors(sync.config).values())),
        model_bytes=sum(
            piece.box.numel * plan.itemsize(piece.tensor) for piece in _whole_tensors(sync).pieces(0)
        ),
        reshard=_cost(account, bandwidths),
        full_gather=_cost(full_gather(sync), bandwidths),
        most=ranks[-1],
        least=ranks[0],
        num_copies=sum(map(len, sync.buckets)),
        num_buckets=len(sync.buckets),
        bucket_bytes=sync.bucket_limit,
        in_flight=in_flight,
    )


def full_gather(sync: SyncPlan) -> Account:
    """What it costs where every rank of the engines materialises every full tensor.

    A rank receives M minus what lies on its device, of M bytes in all. This is the best case: what a node lacks
    comes into it once, an equal part to each of the k engine ranks there, which pass it on to the others; so a
    rank receives (M - node's) / k from other nodes and the rest from its own. As in a ring, each rank passes on as
    much as it gets.
    """
    plan, everything = sync.plan, _whole_tensors(sync)
    there = bytes_there(make_plan(plan.source, everything, plan.itemsize), shard=0)
    ranks_on = Counter(place.node for place in sync.target_places)
    received = []
    for place in sync.target_places:
        local = there[place]
        inter = (there[None] - there[place.node]) // ranks_on[place.node]
        received.append({"local": local, "intra_node": there[None] - local - inter, "inter_node": inter})
    return Account(tuple(received), tuple(received))


def _whole_tensors(sync: SyncPlan) -> Layout:
    """All that travels, as one rank would have it."""
    layout = hf_layout(sync.config)
    return (
        layout
        if sync.fp8_block is None
        else with_scales(layout, logical_tensors(sync.config), sync.fp8_block)
    )


def _cost(account: Account, bandwidths: Mapping[str, float]) -> WayCost:
    links = {}
    for link in LINKS:
        received = max(by_link[link] for by_link in account.received)
        sent = max(by_link[link] for by_link in account.sent_by_link)
        links[link] = LinkCost(account.by_link[link], received, sent, max(received, sent) / bandwidths[link])
    seconds = max(cost.seconds for cost in links.values())
    return WayCost(links, max(account.received_from_others), max(account.sent), seconds)
