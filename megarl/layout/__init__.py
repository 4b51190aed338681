"""Which rank holds which slice of which weight, and the copies that lead from one layout to another.

Promises: every element of every target piece is written exactly once, from a source that holds it; the
same inputs give the same plan on every rank. Works on names, shapes and numbers only: no weight is ever
touched here, so a plan for any number of ranks is computed on a laptop.
Must not know: torch, model families, transports.
"""

from megarl.layout.boxes import Box, Piece
from megarl.layout.layouts import Layout, RankPlace, Shard
from megarl.layout.placement import place_engines
from megarl.layout.plan import Account, Copy, Delivery, Plan, make_plan

__all__ = [
    "Account",
    "Box",
    "Copy",
    "Delivery",
    "Layout",
    "Piece",
    "Plan",
    "RankPlace",
    "Shard",
    "make_plan",
    "place_engines",
]
