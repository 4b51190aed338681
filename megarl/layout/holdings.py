"""Where in a layout each part of a tensor is to be found."""

from collections.abc import Iterable

from megarl.layout.boxes import Box, Piece
from megarl.layout.layouts import Layout

Holders = list[tuple[int, Piece]]
"""The shards that hold a box, each with its piece of it."""


class Holdings:
    """The distinct boxes of every tensor of a layout, with their holders."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout.name
        self._held: dict[str, dict[Box, Holders]] = {}
        self._disjoint: set[str] = set()
        for index, shard in enumerate(layout.shards):
            for piece in shard.pieces:
                boxes = self._held.setdefault(piece.tensor, {})
                if piece.box in boxes:
                    boxes[piece.box].append((index, piece))
                else:
                    boxes[piece.box] = [(index, piece)]

    def parts(self, piece: Piece, owner: str) -> list[tuple[Box, Holders]]:
        """The parts of a target's piece, disjoint and together all of it, each with its holders.

        Raises:
            ValueError: not all of it is held, or some of its tensor by boxes that overlap; `owner` says whose it is.
        """
        boxes = self._held.get(piece.tensor, {})
        if len(boxes) > 1 and piece.tensor not in self._disjoint:
            self._refuse_overlap(piece.tensor, boxes)
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
        """A sweep along dimension 0, so that the many row shards of a tensor are not compared with each other all."""
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
