"""Boxes: slices of tensors, one (start, size) pair a dimension.

Named tuples, since a plan for hundreds of ranks makes a million of them.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """The part `[start, start + size)` of a tensor, per dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Box":
        return Box((0,) * len(shape), tuple(shape))

    @staticmethod
    def rows(first: int, count: int, shape: tuple[int, ...]) -> "Box":
        """`count` rows of dimension 0 from `first`, everything of the other dimensions of `shape`."""
        return Box((first,) + (0,) * (len(shape) - 1), (count, *shape[1:]))

    @staticmethod
    def columns(first: int, count: int, shape: tuple[int, ...]) -> "Box":
        """`count` columns of the last dimension from `first`, everything of the other dimensions of `shape`."""
        return Box((0,) * (len(shape) - 1) + (first,), (*shape[:-1], count))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple([slice(start, start + size) for start, size in zip(self.start, self.size, strict=True)])

    def intersect(self, other: "Box") -> "Box | None":
        """The common part, or None where there is none."""
        if self == other:
            return self
        start, size = [], []
        for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True):
            # Conditions in place of max and min, whose calls would take most of the time of a large plan's intersections.
            first = a if a > b else b
            end, other_end = a + m, b + n
            extent = (end if end < other_end else other_end) - first
            if extent <= 0:
                return None
            start.append(first)
            size.append(extent)
        return Box(tuple(start), tuple(size))

    def inside(self, outer: "Box", place: "Box") -> "Box":
        """Where this box, a part of `outer`, lies when `outer` itself lies at `place`.

        `place` may have more leading dimensions than `outer` (an expert's index, say), or fewer: sizes are 1 there.
        """
        if self == outer:
            return place
        extra = len(place.size) - len(outer.size)
        if extra < 0:
            assert all(extent == 1 for extent in outer.size[:-extra])
            part, rest = (Box(box.start[-extra:], box.size[-extra:]) for box in (self, outer))
            return part.inside(rest, place)
        assert all(extent == 1 for extent in place.size[:extra]) and place.size[extra:] == outer.size
        shift = tuple(p + s - o for p, s, o in zip(place.start[extra:], self.start, outer.start, strict=True))
        return Box(place.start[:extra] + shift, (1,) * extra + self.size)

    def split(self, max_numel: int) -> "Iterator[Box]":
        """Parts of at most `max_numel` elements in row-major order, full rows first; together they are this box."""
        if self.numel <= max_numel:
            yield self
            return
        rows, per_row = self.size[0], self.numel // self.size[0]
        step = max(1, max_numel // per_row)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            part = Box((self.start[0] + first, *self.start[1:]), (count, *self.size[1:]))
            if part.numel <= max_numel or len(self.size) == 1:
                yield part
                continue
            head = part.start[:1]
            for rest in Box(part.start[1:], part.size[1:]).split(max_numel):
                yield Box(head + rest.start, (1, *rest.size))


class Piece(NamedTuple):
    """Box `box` of the logical tensor `tensor` lies at `local_box` of the local tensor `local`."""

    tensor: str
    box: Box
    local: str
    local_box: Box
