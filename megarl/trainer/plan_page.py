"""The report of a job as one HTML page: tables, memory as bars, and every GPU in the colour of each of its groups.

How it looks, and what it needs, is in `megarl.trainer.html`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from megarl.hybrid_engine.plan_command import size_text
from megarl.layout.account import LINKS
from megarl.trainer.html import bullets, colour, document, svg, table, tag
from megarl.trainer.memory_plan import GIB
from megarl.trainer.plan_advice import Change, as_words
from megarl.trainer.plan_job import NOTE, Device, JobPlan, assumed_words
from megarl.trainer.plan_seconds import bubbles

WIDTH, CELL, GAP = 960, 24, 14  # pixels


def page(job: JobPlan, recipe: str, advice: Sequence[Change]) -> str:
    """The whole page.

    Args:
        recipe: what it is called. advice: `changes`, where the job does not fit.
    """
    memory, gpu = job.memory, job.machine.gpu
    room = (memory.limit - memory.reserve - memory.peak) / GIB
    verdict = (
        f"The memory fits: {room:.1f} GiB are left"
        if memory.fits
        else f"The memory does not fit: {max(0.0, -room):.1f} GiB are missing"
    )
    body = [
        tag("h1", f"{recipe} on {job.devices} {gpu.name}"),
        tag(
            "p",
            f"{verdict} of {memory.limit / GIB:.1f} GiB a device, {memory.reserve / GIB:.1f} of them for CUDA, NCCL and "
            f"fragments. A step is estimated to take {job.seconds:,.1f} s: {job.tokens / job.seconds:,.0f} tokens/s.",
        ),
        bullets([*memory.problems(), *(f"Would help: {as_words(change)}" for change in advice)]),
        tag("h2", "Memory of the fullest GPU"),
        _bars(job),
        _memory_table(job),
        tag("h2", "Time"),
        _time_table(job),
        _pipeline_table(job),
        tag("p", f"{NOTE}: {assumed_words(job)}", "quiet"),
        *_sync(job),
        tag("h2", "GPUs and their groups"),
        tag("p", "A number is that of a GPU's place in the group; the same colour, the same place.", "quiet"),
        *_pictures(job),
    ]
    return document(recipe, body)


def _memory_table(job: JobPlan) -> str:
    """Owners by phase, on the device that is fullest in it."""
    phases = job.memory.phases
    fullest = {phase: job.fullest(phase)[0] for phase in phases}
    held = {phase: job.held(phase)[device.pool, device.number] for phase, device in fullest.items()}
    names = [owner.name for owner in job.memory.owners if any(by.get(owner.name) for by in held.values())]
    rows = [
        [
            name,
            *(f"{held[phase].get(name, 0) / GIB:.2f}" if held[phase].get(name) else "-" for phase in phases),
        ]
        for name in names
    ]
    rows.append(["all of these", *(f"{sum(held[phase].values()) / GIB:.2f}" for phase in phases)])
    where = [f"{phase}: {device}" for phase, device in fullest.items()]
    return table(["GiB", *phases], rows) + "\n" + bullets(where)


def _time_table(job: JobPlan) -> str:
    rows = []
    for phase in job.phases:
        rate = f"{phase.tokens / phase.seconds:,.0f}" if phase.tokens and phase.seconds else "-"
        rows.append([phase.name, f"{phase.seconds:.2f}", f"{phase.seconds / job.seconds:.0%}", rate])
        rows += [[f"\N{NO-BREAK SPACE} {part.name}", f"{part.seconds:.2f}", "", ""] for part in phase.parts]
    rows.append(["step", f"{job.seconds:.2f}", "100%", f"{job.tokens / job.seconds:,.0f}"])
    return table(["estimated", "seconds", "part of step", "tokens/s"], rows)


def _pipeline_table(job: JobPlan) -> str:
    rows = [
        [name, f"{passes.bubble:.1%}", str(passes.micro_batches), str(passes.updates)]
        for name, passes in bubbles(job.phases).items()
    ]
    return table(["pipeline", "stages wait", "micro-batches", "times"], rows)


def _sync(job: JobPlan) -> list[str]:
    if job.sync is None:
        return []
    rows = []
    for link, words in zip(LINKS, ("same device", "same node", "other nodes"), strict=True):
        cost = job.sync.reshard.links[link]
        rows.append([words, size_text(cost.total), size_text(cost.max_received), f"{cost.seconds:.2f}"])
    return [tag("h2", "Weight sync"), table(["link", "all ranks", "max received", "seconds"], rows)]


def _bars(job: JobPlan) -> str:
    """A bar for each phase, a piece for each owner; the line is what there is without the reserve."""
    phases, names = job.memory.phases, [owner.name for owner in job.memory.owners]
    room = job.memory.limit - job.memory.reserve
    scale = (WIDTH - 150) / max(job.memory.peak, room)
    lines = []
    for row, phase in enumerate(phases):
        device, size = job.fullest(phase)
        top, left = 30 * row + 16, 130.0
        lines.append(f'<text x="0" y="{top + 15}">{escape(phase)}</text>')
        for name, held in job.held(phase)[device.pool, device.number].items():
            if not held:
                continue
            width, hue = held * scale, colour(names.index(name), len(names))
            words = f"{name}: {held / GIB:.2f} GiB"
            box = f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="22" fill="{hue}">'
            lines.append(f"{box}<title>{escape(words)}</title></rect>")
            if width > 6.5 * len(name):
                lines.append(
                    f'<text class="in" x="{left + width / 2:.1f}" y="{top + 15}">{escape(name)}</text>'
                )
            left += width
        lines.append(f'<text x="{left + 4:.1f}" y="{top + 15}">{size / GIB:.1f}</text>')
    at, height = 130 + room * scale, 30 * len(phases) + 16
    lines.append(f'<line class="limit" x1="{at:.1f}" y1="12" x2="{at:.1f}" y2="{height}"/>')
    lines.append(f'<text x="{at - 60:.1f}" y="10">{room / GIB:.1f} GiB</text>')
    return svg("Memory by phase", WIDTH + 40, height, lines)


def _pictures(job: JobPlan) -> list[str]:
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
    found = []
    for name, pool in job.memory.pools.items():
        count = pool.nnodes * pool.n_gpus_per_node
        devices = [job.device(name, number) for number in range(count)]
        for kind, (size, place) in sizes.items():
            if size > 1 and any(place(device) is not None for device in devices):
                found.append(tag("h3", f"Pool {name}: {kind}, {size}"))
                found.append(_grid(f"{kind} of each GPU", devices, size, place))
        most = job.memory.limit
        found.append(tag("h3", f"Pool {name}: memory in phase {phase}, % of {most / GIB:.1f} GiB"))

        def share(device: Device, of: int = most) -> int:
            return round(100 * held[device.pool, device.number] / of)

        found.append(_grid("memory of each GPU", devices, None, share))
    return found


def _grid(
    title: str, devices: Sequence[Device], size: int | None, place: Callable[[Device], int | None]
) -> str:
    """Nodes as rows of cells; `size` None: a cell is filled as far as its number says, in percent."""
    per_node = devices[0].per_node
    block = per_node * CELL + GAP
    columns = max(1, WIDTH // block)
    nodes = -(-len(devices) // per_node)
    lines = []
    for node in range(nodes):
        left, top = node % columns * block, node // columns * (CELL + 20)
        lines.append(f'<text x="{left}" y="{top + 12}">node {node}</text>')
        for device in devices[node * per_node : (node + 1) * per_node]:
            value = place(device)
            x, y = left + device.number % per_node * CELL, top + 16
            lines.append(_cell(x, y, value, size, str(device)))
    width = min(nodes, columns) * block
    return svg(title, width, -(-nodes // columns) * (CELL + 20) + 4, lines)


def _cell(x: int, y: int, value: int | None, size: int | None, words: str) -> str:
    side = CELL - 2
    frame = f'<rect class="frame" x="{x}" y="{y}" width="{side}" height="{side}"><title>{escape(words)}</title></rect>'
    if value is None:
        return frame
    full = side if size is not None else round(side * min(value, 100) / 100)
    hue = colour(value, size) if size is not None else "hsl(210 45% 42%)"
    box = f'<rect x="{x}" y="{y + side - full}" width="{side}" height="{full}" fill="{hue}"/>'
    kind = ' class="in"' if full > side / 2 else ' text-anchor="middle"'
    text = f'<text{kind} x="{x + side // 2}" y="{y + 15}">{value}</text>'
    return f"<g>{box}{text}{frame}</g>"
