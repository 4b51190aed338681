"""The report of a job as one HTML page: tables, memory as stacked bars, and every GPU in the colour of each of its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megarl.plan.fit import Change, as_words
from megarl.plan.job import (
    NOTE,
    Device,
    JobPlan,
    assumed_words,
    pipeline_rows,
    range_words,
    sync_rows,
    time_rows,
)
from megarl.plan.memory import GIB
from megarl.report.html import render

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


_FILLED = "hsl(210 45% 42%)"


def page(job: JobPlan, recipe: str, advice: Sequence[Change]) -> str:
    """The page's HTML.

    Args:
        recipe: its name. advice: `changes`, where the job does not fit.
    """
    memory, gpu = job.memory, job.machine.gpu
    room = (memory.limit - memory.reserve - memory.peak) / GIB
    verdict = (
        f"The memory fits: {room:.1f} GiB are left"
        if memory.fits
        else f"The memory does not fit: {max(0.0, -room):.1f} GiB are missing"
    )
    held = _fullest(job)
    charts = [_bars(job, held)]
    times = [
        [name if is_phase else f"\N{NO-BREAK SPACE} {name}", *cells]
        for is_phase, (name, *cells) in time_rows(job)
    ]
    context = {
        "title": f"{recipe} on {job.devices} {gpu.name}",
        "fits": memory.fits,
        "verdict": f"{verdict} of {memory.limit / GIB:.1f} GiB a device, {memory.reserve / GIB:.1f} of them for CUDA, NCCL and "
        f"fragments. A step is estimated to take {job.seconds:,.1f} s, likely "
        f"{range_words(job.seconds)}: {job.tokens / job.seconds:,.0f} tokens/s.",
        "advice": [*memory.problems(), *(f"Would help: {as_words(change)}" for change in advice)],
        "charts": charts,
        "phases": list(memory.phases),
        "memory": list(_memory_rows(held)),
        "fullest": [f"{phase}: {job.fullest(phase)[0]}" for phase in memory.phases],
        "time": [
            *times,
            ["step", f"{job.seconds:.2f}", f"{job.floor:.2f}", "100%", f"{job.tokens / job.seconds:,.0f}"],
        ],
        "pipeline": pipeline_rows(job),
        "note": f"{NOTE}: {assumed_words(job)}",
        "sync": sync_rows(job),
        "pictures": list(_pictures(job)),
    }
    return render("plan.html", context, {"runs": [recipe], "charts": charts, "series": {}})


def _fullest(job: JobPlan) -> dict[str, dict[str, int]]:
    """By phase, the bytes of each owner on the phase's fullest device; owners that hold nothing in any phase are left out."""
    devices = {phase: job.fullest(phase)[0] for phase in job.memory.phases}
    held = {phase: job.held(phase)[device.pool, device.number] for phase, device in devices.items()}
    names = [owner.name for owner in job.memory.owners if any(by.get(owner.name) for by in held.values())]
    return {phase: {name: by.get(name, 0) for name in names} for phase, by in held.items()}


def _bars(job: JobPlan, held: dict[str, dict[str, int]]) -> dict[str, Any]:
    """A bar for each phase, a piece for each owner; the line is the memory without the reserve."""
    names = next(iter(held.values()))
    return {
        "kind": "rows",
        "title": "Memory by phase",
        "about": "GiB by owner; the dashed line is the memory of a GPU without the reserve",
        "rows": list(held),
        **stacked((name, [by[name] for by in held.values()]) for name in names),
        "limit": (job.memory.limit - job.memory.reserve) / GIB,
    }


def _memory_rows(held: dict[str, dict[str, int]]) -> Iterator[list[str]]:
    """Owners by phase, on the phase's fullest device."""
    for name in next(iter(held.values())):
        yield [name, *(f"{by[name] / GIB:.2f}" if by[name] else "-" for by in held.values())]
    yield ["all of these", *(f"{sum(by.values()) / GIB:.2f}" for by in held.values())]


def _pictures(job: JobPlan) -> Iterator[dict[str, Any]]:
    """For each pool its GPUs, once for each kind of group that it has, and by how full they are."""
    layout, policy = job.actor_layout, job.config.actor_rollout_ref
    sizes = {
        "tensor parallel": (layout.tp, lambda device: device.actor and device.actor.tp),
        "pipeline stage": (layout.pp, lambda device: device.actor and device.actor.pp),
        "context parallel": (layout.cp, lambda device: device.actor and device.actor.cp),
        "data parallel": (layout.dp, lambda device: device.actor and device.actor.dp),
        "expert parallel": (layout.ep, lambda device: device.actor and device.actor.ep),
        "engine": (policy.rollout.num_engines, lambda device: device.engine),
    }
    phase = max(job.memory.phases, key=job.memory.fullest)
    held = {place: sum(owners.values()) for place, owners in job.held(phase).items()}
    for name, pool in job.memory.pools.items():
        devices = [job.device(name, number) for number in range(pool.nnodes * pool.n_gpus_per_node)]
        for kind, (size, place) in sizes.items():
            if size > 1 and any(place(device) is not None for device in devices):
                yield {"title": f"Pool {name}: {kind}, {size}", "nodes": _nodes(devices, size, place)}
        most = job.memory.limit

        def share(device: Device, of: int = most) -> int:
            return round(100 * held[device.pool, device.number] / of)

        title = f"Pool {name}: memory in phase {phase}, % of {most / GIB:.1f} GiB"
        yield {"title": title, "nodes": _nodes(devices, None, share)}


def _nodes(
    devices: Sequence[Device], size: int | None, place: Callable[[Device], int | None]
) -> list[list[dict[str, str]]]:
    """The cells of each node; `size` None: a cell is filled as far as its number says, in percent."""
    cells = [_cell(place(device), size, str(device)) for device in devices]
    per_node = devices[0].per_node
    return [cells[first : first + per_node] for first in range(0, len(cells), per_node)]


def _cell(value: int | None, size: int | None, words: str) -> dict[str, str]:
    if value is None:
        return {"text": "", "background": "", "words": words}
    if size is not None:  # hues as far apart as can be, dark enough for white digits
        background = f"hsl({round(360 * value / size)} 50% 42%)"
    else:
        background = f"linear-gradient(to top, {_FILLED} {min(value, 100)}%, hsl(210 12% 38%) 0)"
    return {"text": str(value), "background": background, "words": words}
