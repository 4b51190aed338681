"""Which shadow ranks a process runs; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field

SHARED = "critic_"  # prefix of the steps and parts of a critic in the actor's processes


@dataclass(frozen=True)
class Request:
    """Which ranks of a recipe to run, one after the other.

    Attributes:
        ranks: (role, rank).
        out: the file for the reports.
        together: whether the ranks of a role run at the same time, with uneven data, and receive their peers' data.
        command: the recipe's; None: the one that its keys belong to.
        transformer_engine: whether its layers are used, as on a machine where it is installed; else megarl's own in torch.
    """

    recipe: str
    overrides: list[str]
    ranks: list[tuple[str, int]]
    out: str
    micro_batches: int | None = None
    transformer_engine: bool = True
    together: bool = False
    card: dict[str, object] = field(default_factory=dict)
    command: str | None = None
