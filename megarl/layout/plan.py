"""Plans: the copies that fill one layout from another.

Guarantees, each asserted by a test of the same name:
- every target element is written exactly once, or the plan is refused (`exactly_once`);
- every copy's source holds what the copy says (`right_source`);
- among replicas the nearest serves: same device, same node, other node; among equals the one that has
  sent least so far (`nearest_then_least_loaded`);
- the same layouts give the same plan everywhere (`deterministic`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megarl.layout.boxes import Box, Piece


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs: what "same device" and "same node" are judged by."""

    node: str
    device: str


@dataclass(frozen=True)
class Layout:
    """`pieces(rank)`: what each of `num_ranks` ranks holds; `places`: where they run (None: unknown)."""

    name: str
    num_ranks: int
    pieces: Callable[[int], list[Piece]]
    places: tuple[RankPlace, ...] | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """`box` of logical `tensor`: from a slice of a source rank's tensor to a slice of a target rank's."""

    tensor: str
    box: Box
    source_rank: int
    source_local: str
    source_box: Box
    target_rank: int
    target_local: str
    target_box: Box


@dataclass(frozen=True)
class Plan:
    """All copies of a transition, in target rank order; within a rank in the order of its pieces."""

    source: Layout
    target: Layout
    copies: tuple[Copy, ...]

    def buckets(self, bytes_of: Callable[[Copy], int], bucket_bytes: int) -> list[tuple[Copy, ...]]:
        """The copies in order, cut so that no target rank receives over `bucket_bytes` in one bucket.

        A single copy above the limit is a bucket of its own.
        """
        buckets: list[list[Copy]] = []
        at: dict[int, int] = {}  # target rank -> its current bucket
        filled: dict[int, int] = {}
        for copy in self.copies:
            rank, size = copy.target_rank, bytes_of(copy)
            if rank not in at:
                at[rank], filled[rank] = 0, 0
            elif filled[rank] and filled[rank] + size > bucket_bytes:
                at[rank], filled[rank] = at[rank] + 1, 0
            while len(buckets) <= at[rank]:
                buckets.append([])
            buckets[at[rank]].append(copy)
            filled[rank] += size
        return [tuple(bucket) for bucket in buckets]

    def bytes_by_link(self, bytes_of: Callable[[Copy], int]) -> dict[str, int]:
        """Bytes that stay on a device, cross devices of a node, and cross nodes."""
        total = {"local": 0, "intra_node": 0, "inter_node": 0}
        for copy in self.copies:
            total[_LINKS[_distance(self, copy)]] += bytes_of(copy)
        return total

    def bytes_received(self, bytes_of: Callable[[Copy], int]) -> list[int]:
        """Bytes that each target rank receives, local copies included."""
        received = [0] * self.target.num_ranks
        for copy in self.copies:
            received[copy.target_rank] += bytes_of(copy)
        return received


_LINKS = ("local", "intra_node", "inter_node")


def _rank_distance(source: RankPlace | None, target: RankPlace | None) -> int:
    if source is None or target is None or source.node != target.node:
        return 2
    return 0 if source.device == target.device else 1


def _distance(plan: Plan, copy: Copy) -> int:
    source = plan.source.places[copy.source_rank] if plan.source.places else None
    target = plan.target.places[copy.target_rank] if plan.target.places else None
    return _rank_distance(source, target)


def _holders(source: Layout) -> dict[str, dict[Box, list[tuple[int, Piece]]]]:
    """tensor -> distinct box -> the ranks (and their pieces) that hold it."""
    held: dict[str, dict[Box, list[tuple[int, Piece]]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(source.num_ranks):
        for piece in source.pieces(rank):
            held[piece.tensor][piece.box].append((rank, piece))
    return held


def make_plan(source: Layout, target: Layout, target_ranks: Iterable[int] | None = None) -> Plan:
    """The copies that fill `target` (or only its `target_ranks`) from `source`.

    The distinct boxes of a tensor in the source must not overlap (shards with identical replicas, which
    is what Megatron's layouts and files are).

    Raises:
        ValueError: the source does not hold a piece of the target, or holds part of it twice.
    """
    held = _holders(source)
    sent = [0] * source.num_ranks
    copies: list[Copy] = []
    for rank in range(target.num_ranks) if target_ranks is None else target_ranks:
        place = target.places[rank] if target.places else None
        for piece in target.pieces(rank):
            found = 0
            for box, replicas in held.get(piece.tensor, {}).items():
                common = piece.box.intersect(box)
                if common is None:
                    continue
                found += common.numel
                source_rank, source_piece = min(
                    replicas,
                    key=lambda held_by: (
                        _rank_distance(source.places[held_by[0]] if source.places else None, place),
                        sent[held_by[0]],
                        held_by[0],
                    ),
                )
                sent[source_rank] += common.numel
                copies.append(
                    Copy(
                        tensor=piece.tensor,
                        box=common,
                        source_rank=source_rank,
                        source_local=source_piece.local,
                        source_box=common.inside(source_piece.box, source_piece.local_box),
                        target_rank=rank,
                        target_local=piece.local,
                        target_box=common.inside(piece.box, piece.local_box),
                    )
                )
            if found != piece.box.numel:
                raise ValueError(
                    f"{target.name} rank {rank} needs {piece.box.numel} elements of {piece.tensor} at "
                    f"{piece.box}, but {source.name} holds {found} of them"
                )
    return Plan(source, target, tuple(copies))
