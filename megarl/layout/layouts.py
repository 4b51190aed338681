"""Layouts: which ranks hold which pieces, and where the ranks run.

Ranks that hold the same (replicas) share one shard, and a rank may have several: a model of 671B parameters
over 512 ranks has 256 shards, so that its pieces are listed a few times instead of 512 times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from megarl.layout.boxes import Piece


class RankPlace(NamedTuple):
    """Where a rank runs: what "same device" and "same node" are judged by."""

    node: str
    device: str


class Shard:
    """Pieces that each of `ranks` holds; they are listed when they are first asked for."""

    def __init__(self, ranks: Sequence[int], make_pieces: Callable[[], Sequence[Piece]]) -> None:
        self.ranks = tuple(ranks)
        self._make_pieces = make_pieces

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self._make_pieces())


@dataclass(frozen=True)
class Layout:
    """What each of `num_ranks` ranks holds; `places`: where they run (None: unknown, nobody's neighbour)."""

    name: str
    num_ranks: int
    shards: tuple[Shard, ...]
    places: tuple[RankPlace, ...] | None = None

    def __post_init__(self) -> None:
        assert self.places is None or len(self.places) == self.num_ranks, (self.name, self.places)

    @staticmethod
    def by_rank(
        name: str,
        num_ranks: int,
        pieces: Callable[[int], Sequence[Piece]],
        places: tuple[RankPlace, ...] | None = None,
    ) -> "Layout":
        """A layout in which each rank holds what `pieces(rank)` says."""
        shards = tuple(Shard((rank,), partial(pieces, rank)) for rank in range(num_ranks))
        return Layout(name, num_ranks, shards, places)

    @cached_property
    def shards_of(self) -> tuple[tuple[int, ...], ...]:
        """By rank the indices of its shards."""
        found: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for index, shard in enumerate(self.shards):
            for rank in shard.ranks:
                found[rank].append(index)
        return tuple(tuple(indices) for indices in found)

    def pieces(self, rank: int) -> list[Piece]:
        """All that a rank holds."""
        return [piece for index in self.shards_of[rank] for piece in self.shards[index].pieces]
