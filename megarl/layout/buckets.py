"""Copies cut into buckets: bounded at both ends, with as many ends busy in each as can be."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence


def fill_buckets(
    sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], limit: int
) -> list[int]:
    """For each copy the number of its bucket: the first in which both its source and its target have room.

    In no bucket has a source or a target copies of more than `limit` bytes in all; one that is larger by itself is
    alone at both its ends. How few buckets there are depends on the order of the copies: neighbours should be of
    different sources and targets.

    Args:
        sources, targets, sizes: of each copy its ranks and its bytes (at least 1).
    """
    sizes = [min(size, limit) for size in sizes]
    classes = sorted(set(sizes))
    class_of = {size: index for index, size in enumerate(classes)}
    source_ends: dict[int, _End] = defaultdict(lambda: _End(classes, limit))
    target_ends: dict[int, _End] = defaultdict(lambda: _End(classes, limit))
    buckets = []
    for source, target, size in zip(sources, targets, sizes, strict=True):
        first, second, index = source_ends[source], target_ends[target], class_of[size]
        free = ~(first.full[index] | second.full[index])
        bit = free & -free  # the lowest that is set
        bucket = bit.bit_length() - 1
        first.take(bucket, bit, size)
        second.take(bucket, bit, size)
        buckets.append(bucket)
    return buckets


class _End:
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
    """An order of the copies in which all sources are about equally far through what they send, in bytes.

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
