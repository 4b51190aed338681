"""`megarl plan memory --dry-run --html`: each shadow rank's peak by owner and by line compared with the plan, as one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.plan.memory import GIB
from megarl.plan.page import stacked
from megarl.report.html import render
from megarl.shadow import engine

if TYPE_CHECKING:
    from megarl.shadow.comparison import Comparison

NOTE = (
    "Each rank's own code ran on a CUDA device that is there by name only: bytes are those of tensors, rounded as torch's "
    "allocator rounds them. Fragments, CUDA's context, NCCL's buffers and scratch memory of kernels are not in them."
)


def page(recipe: str, found: Sequence[Comparison], reports: Sequence[Mapping], tolerance: float) -> str:
    """The page's HTML.

    Args:
        recipe: its name.
        found: of all ranks; `reports` of the same, in the same order.
        tolerance: percent by which a plan may be too small.
    """
    names = list(dict.fromkeys(row.rank for row in found))
    small = [row for row in found if row.difference < -tolerance / 100]
    unfit = [problem for report in reports for problem in report.get("problems", ())]
    charts: list[dict[str, Any]] = []
    ranks = []
    for name, report in zip(names, reports, strict=True):
        rows = [row for row in found if row.rank == name]
        of_engine = report["role"] == engine.ROLE
        largest = [] if of_engine else report["phases"][fullest(report)]["largest"]
        ranks.append(
            {
                "name": name,
                "charts": range(len(charts), len(charts) + (1 if of_engine else 2)),
                "rows": [_cells(row) for row in rows],
                "largest": [[size_text(size), made[0], f"{made[2]}, {made[1]}"] for made, size in largest],
                "facts": list(engine.details(report)) if of_engine else _facts(report),
            }
        )
        charts.append(_owners(name, rows))
        if not of_engine:
            charts.append(_lines(name, report))
    context = {
        "title": f"{recipe}: plan and dry run",
        "verdict": (
            "the plan is too small"
            if small
            else "weights do not fit the engines"
            if unfit
            else "the plan holds"
        ),
        "wrong": [
            *(f"{row.rank}: {row.owner} in {row.phase}, {row.difference:+.1%}" for row in small),
            *unfit,
        ],
        "note": NOTE,
        "ranks": ranks,
        "charts": charts,
    }
    return render("shadow.html", context, {"runs": [recipe], "charts": charts, "series": {}})


def fullest(report: Mapping) -> str:
    """The phase whose peak is told: an update's, or the evaluation's where the role has no other."""
    return "update" if "update" in report["phases"] else "evaluate"


def _owners(name: str, rows: Sequence[Comparison]) -> dict[str, Any]:
    """Two bars, a piece for each owner: the memory in an update at its peak."""
    phases = {row.phase for row in rows}
    there = [row for row in rows if row.phase in ("always", "update" if "update" in phases else "evaluate")]
    return {
        "kind": "rows",
        "title": f"{name}: the peak by owner",
        "about": "GiB; what is always there, and what an update takes beside it, or an evaluation where there is none",
        "rows": ["plan", "dry run"],
        **stacked((row.owner, [row.planned, row.found]) for row in there),
    }


def _lines(name: str, report: Mapping) -> dict[str, Any]:
    """A bar for each of the largest lines of code, in the colour of the phase in which it ran."""
    sizes: dict[str, dict[str, int]] = {}
    peak = fullest(report)
    for (phase, _, line), size in report["phases"][peak]["largest"]:
        by_phase = sizes.setdefault(line, {})
        by_phase[phase] = by_phase.get(phase, 0) + size
    phases = list(dict.fromkeys(phase for by_phase in sizes.values() for phase in by_phase))
    return {
        "kind": "rows",
        "title": f"{name}: the peak by line, in phase {peak}",
        "about": "GiB on the device at the peak, by the line that made it and the phase in which it did",
        "rows": list(sizes),
        **stacked((phase, [by_phase.get(phase, 0) for by_phase in sizes.values()]) for phase in phases),
    }


def _cells(row: Comparison) -> list[str]:
    return [row.owner, row.phase, size_text(row.planned), size_text(row.found), f"{row.difference:+.1%}"]


def _facts(report: Mapping) -> list[str]:
    kept = [
        f"{size_text(size)} by {made[2]}"
        for made, size in report["kept_by"]
        if size >= report["released"] / 100
    ]
    return [
        f"stays when everything is released: {size_text(report['released'])}"
        + (f" ({'; '.join(kept)})" if kept else ""),
        *(f"assumed {times} times: {what}" for what, times in report["assumed"].items()),
    ]


def size_text(size: int) -> str:
    return f"{size / GIB:.3f} GiB" if size >= GIB // 10 else f"{size / 2**20:.2f} MiB"
