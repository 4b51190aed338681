"""Layouts: which ranks hold which pieces, where the ranks run, and which shards hold a given box of a tensor.

Ranks that hold the same (replicas) share one shard, and a rank may have several: a model of 671B parameters
over 512 ranks has 256 shards, so that its pieces are listed a few times instead of 512 times.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from megarl.layout.boxes import Box, Piece


class RankPlace(NamedTuple):
    """Where a rank runs: decides whether two ranks are on the "same device" or the "same node"."""

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
    """The pieces of `num_ranks` ranks; `places`: where the ranks run (None: unknown, no two ranks are near each other)."""

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
        """A layout in which each rank holds the pieces `pieces(rank)`."""
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

    @cached_property
    def holdings(self) -> "Holdings":
        return Holdings(self)

    def pieces(self, rank: int) -> list[Piece]:
        """All pieces that a rank holds."""
        return [piece for index in self.shards_of[rank] for piece in self.shards[index].pieces]


Holders = list[tuple[int, Piece]]
"""The shards that hold a box, each with its piece of it."""


class Holdings:
    """The distinct boxes of every tensor of a layout, with their holders."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout.name
        self._held: dict[str, dict[Box, Holders]] = {}
        held = self._held
        self._disjoint: set[str] = set()
        self._kind_of: dict[str, int] = {}
        self._kinds: dict[tuple[Any, ...], int] = {}
        for index, shard in enumerate(layout.shards):
            for piece in shard.pieces:
                boxes = held.get(piece.tensor)
                if boxes is None:
                    held[piece.tensor] = {piece.box: [(index, piece)]}
                elif (holders := boxes.get(piece.box)) is not None:
                    holders.append((index, piece))
                else:
                    boxes[piece.box] = [(index, piece)]

    def kind(self, tensor: str) -> int:
        """A number that tensors share if the same shards hold them alike: as equal boxes, at equal boxes of their local tensors.

        A model has few kinds, each with as many tensors as a stage has layers that are alike.
        """
        kind = self._kind_of.get(tensor)
        if kind is None:
            held = tuple(
                [
                    (box, tuple([(index, piece.local_box) for index, piece in holders]))
                    for box, holders in self._held.get(tensor, {}).items()
                ]
            )
            kind = self._kind_of[tensor] = self._kinds.setdefault(held, len(self._kinds))
        return kind

    def local_names(self, tensor: str, box: Box) -> list[str]:
        """The local tensors in which the holders of `box` store it."""
        return [piece.local for _, piece in self._held[tensor][box]]

    def parts(self, piece: Piece, owner: str) -> list[tuple[Box, Holders]]:
        """The parts of a target's piece, disjoint and together all of it, each with its holders.

        Raises:
            ValueError: the layout does not hold all of it (the message names `owner`), or holds its tensor in boxes that overlap.
        """
        boxes = self._held.get(piece.tensor, {})
        if len(boxes) > 1 and piece.tensor not in self._disjoint:
            self._refuse_overlap(piece.tensor, boxes)
        if (exact := boxes.get(piece.box)) is not None:
            return [(piece.box, exact)]
        parts, found = [], 0
        for box, holders in boxes.items():
            common = piece.box.intersect(box)
            if common is not None:
                found += common.numel
                parts.append((common, holders))
        if found != piece.box.numel:
            raise ValueError(
                f"{owner} needs {piece.box.numel} elements of {piece.tensor} at {tuple(piece.box)}, but "
                f"{self._layout} holds {found} of them"
            )
        return parts

    def _refuse_overlap(self, tensor: str, boxes: Iterable[Box]) -> None:
        """Refuse overlapping boxes, in a sweep along dimension 0 that does not compare every two of a tensor's many row shards."""
        active: list[Box] = []
        for box in sorted(boxes):
            active = [other for other in active if other.start[0] + other.size[0] > box.start[0]]
            for other in active:
                if box.intersect(other) is not None:
                    raise ValueError(
                        f"{self._layout} holds a part of {tensor} twice: the boxes {tuple(other)} and {tuple(box)} overlap"
                    )
            active.append(box)
        self._disjoint.add(tensor)
