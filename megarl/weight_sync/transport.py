"""The interface of a transport: how bytes move between the members of an exchange, which all have joined."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Part(NamedTuple):
    """Bytes that move in one piece.

    Attributes:
        peer: the member at the other end.
        data: where the bytes are here (uint8).
        slot, start: which slot `data` is of, and its offset there [bytes].
        peer_start: its offset in the peer's slot [bytes].
    """

    peer: int
    data: torch.Tensor
    slot: int
    start: int
    peer_start: int


class Moving(Protocol):
    """Parts on their way."""

    def wait(self) -> None:
        """Return when all have arrived or may be changed again. May be called once."""


class Transport(Protocol):
    """Moves parts between members. Of a pair of members, both list their parts of a call in the same order."""

    def use(self, slots: Sequence[torch.Tensor]) -> None:
        """Say in which memory all parts lie until this is called again; none: before the memory is freed."""

    def move(self, sends: Sequence[Part], receives: Sequence[Part]) -> Moving:
        """Begin to move parts."""

    def close(self) -> None:
        """End all that waits, here and at other members; may be called again."""
