"""What a transition costs in bytes, rank by rank."""

from collections.abc import Iterable
from dataclasses import dataclass

LINKS = ("local", "intra_node", "inter_node")


@dataclass(frozen=True)
class Account:
    """Bytes over each of LINKS: by target rank what it receives, by source rank what it sends.

    What stays on a device (local) counts on both sides.
    """

    received: tuple[dict[str, int], ...]
    sent_by_link: tuple[dict[str, int], ...]

    @property
    def by_link(self) -> dict[str, int]:
        return {link: sum(received[link] for received in self.received) for link in LINKS}

    @property
    def received_from_others(self) -> tuple[int, ...]:
        """By target rank what comes from other devices."""
        return tuple(received["intra_node"] + received["inter_node"] for received in self.received)

    @property
    def sent(self) -> tuple[int, ...]:
        """By source rank what leaves its device."""
        return tuple(sent["intra_node"] + sent["inter_node"] for sent in self.sent_by_link)


def most_in_flight(buckets: Iterable[Iterable[tuple[int, int]]]) -> int:
    """The most bytes that any rank has in two buckets that follow each other: what double buffering needs.

    Args:
        buckets: of each bucket (rank, bytes) pairs; a rank's pairs are added up.
    """
    most = 0
    before: dict[int, int] = {}
    for bucket in buckets:
        now: dict[int, int] = {}
        for rank, nbytes in bucket:
            now[rank] = now.get(rank, 0) + nbytes
        most = max((most, *(nbytes + before.get(rank, 0) for rank, nbytes in now.items())))
        before = now
    return most
