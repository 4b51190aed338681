"""Stacked bars of memory: a piece for each owner or phase."""

from collections.abc import Iterable, Sequence
from typing import Any

from megarl.plan.memory import GIB

COLOURS = 10  # of the page's style


def stacked(pieces: Iterable[tuple[str, Sequence[int]]]) -> dict[str, Any]:
    """The parts of a chart of rows, and each row's total, in GiB.

    Args:
        pieces: (label, bytes by row).
    """
    named = list(pieces)
    rows = zip(*(sizes for _, sizes in named), strict=True)
    return {
        "unit": "GiB",
        "parts": [
            {
                "colour": f"c{number % COLOURS}",
                "label": label,
                "values": [round(size / GIB, 4) for size in sizes],
            }
            for number, (label, sizes) in enumerate(named)
        ],
        "totals": [round(sum(sizes) / GIB, 4) for sizes in rows],
    }
