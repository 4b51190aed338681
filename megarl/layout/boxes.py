"""Boxes: slices of tensors, one (start, size) pair a dimension."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
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
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The common part, or None where there is none."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        size = tuple(
            min(a + m, b + n) - s
            for a, m, b, n, s in zip(self.start, self.size, other.start, other.size, start, strict=True)
        )
        return Box(start, size) if all(extent > 0 for extent in size) else None

    def inside(self, outer: "Box", place: "Box") -> "Box":
        """Where this box, a part of `outer`, lies when `outer` itself lies at `place`.

        `place` may have more leading dimensions than `outer` (an expert's index, say): there its size is 1.
        """
        extra = len(place.size) - len(outer.size)
        assert all(extent == 1 for extent in place.size[:extra]) and place.size[extra:] == outer.size
        shift = tuple(p + s - o for p, s, o in zip(place.start[extra:], self.start, outer.start, strict=True))
        return Box(place.start[:extra] + shift, (1,) * extra + self.size)


@dataclass(frozen=True, slots=True)
class Piece:
    """Box `box` of the logical tensor `tensor` lies at `local_box` of the local tensor `local`."""

    tensor: str
    box: Box
    local: str
    local_box: Box
