"""`megarl plan` (of a weight sync), `megarl plan memory` and `megarl plan step`: their options, tables and JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from megarl.config import TrainConfig, TuningConfig, check_config, load_config
from megarl.config.loading.recipes import shown
from megarl.config.model_fit import check_models
from megarl.costs.hardware import find_hardware, read_assumptions
from megarl.costs.speed import Machine
from megarl.layout.plan import LINKS
from megarl.plan.fit import as_words, changes, fit, layout_keys
from megarl.plan.inputs import PlanInputs, read_inputs, read_planned
from megarl.plan.job import (
    NOTE,
    JobPlan,
    as_json,
    assumed_text,
    assumed_words,
    pipeline_rows,
    plan_job,
    range_words,
    seconds_json,
    sync_rows,
    time_rows,
)
from megarl.plan.memory import GIB, MemoryPlan, memory_json, plan_memory, plan_of
from megarl.plan.page import page
from megarl.plan.search import Search
from megarl.plan.sync import LINK_WORDS, MethodCost, PlanReport, planned_sync, report, size_text
from megarl.util.files import write_text
from megarl.weight_sync.sync_plan import COLOCATED, MAPPED, SyncPlan


def _print_json(found: object) -> None:
    print(json.dumps(found, indent=2))


def _print_lines(console: Console, *lines: str) -> None:
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def _table(*columns: str) -> Table:
    """A table of numbers: all columns but the first are aligned on the right."""
    table = Table(*columns, box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def memory_limits(options: argparse.Namespace, memory: float) -> tuple[int, int | None]:
    """The bytes of a GPU (`memory` is in GiB) and of --reserve; None: the reserve follows from the processes on a GPU.

    Raises:
        ValueError: one is negative; names its option.
    """
    for name, value in (("gpu-memory", memory), ("reserve", options.reserve)):
        if value is not None and value < 0:
            raise ValueError(f"--{name} is {value:g} GiB; it must be at least 0")
    return round(memory * GIB), None if options.reserve is None else round(options.reserve * GIB)


def run_memory(options: argparse.Namespace) -> None:
    """Print the plan; with --fit the plan with the fewest nodes.

    Raises:
        ValueError: names the option or key and a right value; the memory does not fit.
    """
    limit, reserve = memory_limits(options, options.gpu_memory)
    if options.html is not None:
        raise ValueError(f"--html {options.html} is of shadow ranks: give --dry-run, too")
    if options.max_nodes < 1:
        raise ValueError(f"--max-nodes is {options.max_nodes}; it must be at least 1")
    config, inputs = read_planned(options.recipe, options.overrides, options.command)
    keys = []
    if options.fit:
        if not isinstance(config, TrainConfig):
            raise ValueError(
                "--fit looks for layouts of `megarl train` alone; give those of this recipe as megatron.*"
            )
        if len(config.resource_pools) > 1:
            raise ValueError("--fit looks for a layout of one resource pool; the recipe has several")
        found = fit(config, inputs, limit, reserve, options.max_nodes, not options.without_engines)
        if found is None:
            raise ValueError(
                f"on no number of nodes up to --max-nodes {options.max_nodes} does it fit {options.gpu_memory:g} GiB of each "
                f"device (less {reserve_words(options.reserve)})"
            )
        config, plan = found
        keys = layout_keys(load_config(TrainConfig, options.recipe, options.overrides), config)
    else:
        check_models(config, inputs.model, inputs.critic, inputs.reward, inputs.teachers)
        plan = plan_of(config, inputs, limit, reserve)
        plan = plan.without_engines() if options.without_engines else plan
    if options.json:
        _print_json(memory_json(plan, keys))
    else:
        print_plan(Console(), config, plan, keys)


def reserve_words(option: float | None) -> str:
    """The memory that is not planned owner by owner, in words."""
    return f"--reserve {option:g}" if option is not None else "the memory of CUDA, NCCL and fragments"


def print_plan(
    console: Console, config: TrainConfig | TuningConfig, plan: MemoryPlan, keys: list[str]
) -> None:
    """Print the owners by phase, in GiB of the fullest device."""
    devices = {name: pool.nnodes * pool.n_gpus_per_node for name, pool in plan.pools.items()}
    model = config.actor_rollout_ref.model if isinstance(config, TrainConfig) else config.model
    pools = ", ".join(f"{count} devices in pool {name}" for name, count in devices.items())
    _print_lines(console, f"{shown(model.path)}: {pools}; GiB of the fullest device", *keys)
    table = _table("GiB", *plan.phases)
    for owner in plan.owners:
        table.add_row(owner.name, *(_cell(max(owner.at(phase))) for phase in plan.phases))
    table.add_section()
    table.add_row("all of these", *(_cell(plan.fullest(phase)) for phase in plan.phases), style="bold")
    table.add_section()
    for name, size in plan.reserved:
        table.add_row(name, *(_cell(size) for _ in plan.phases))
    wide = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, wide)  # names are never cut
    console.print(table)
    room = (plan.limit - plan.reserve - plan.peak) / GIB
    cache = (
        f"engines' cache: {plan.kv_tokens:,} tokens of {plan.kv_token_bytes / 1024:.1f} KiB a device "
        f"({plan.kv_groups * (max(plan.group_tokens, 0) // plan.longest)} of the longest trajectories)"
    )
    _print_lines(
        console,
        *([cache] if plan.kv_token_bytes else []),
        *_host_lines(plan),
        f"of {plan.limit / GIB:.1f} GiB a device, {plan.reserve / GIB:.1f} of them for CUDA, NCCL and fragments: "
        f"{'fits, ' if plan.fits else 'does not fit, '}{abs(room):.1f} GiB {'are left' if room >= 0 else 'missing'}",
        *plan.problems(),
    )


def _host_lines(plan: MemoryPlan) -> list[str]:
    """By pool, the host memory that its nodes need for offloaded tensors."""
    return [
        f"on the host, page-locked: {plan.host(name) / GIB:.1f} GiB for the fullest device of pool {name}, so up to "
        f"{plan.host(name) * pool.n_gpus_per_node / GIB:.1f} a node"
        for name, pool in plan.pools.items()
        if plan.host(name)
    ]


def _cell(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def run_step(options: argparse.Namespace) -> None:
    """Print the report, or the search's proposals; with --html write the page.

    Raises:
        ValueError: names the option or key and a right value.
    """
    gpu, assumed = find_hardware(options.hardware), read_assumptions(options.assume)
    limit, reserve = memory_limits(
        options, gpu.memory_gib if options.gpu_memory is None else options.gpu_memory
    )
    # With --search the recipe's own layout need not be legal on these devices.
    config, inputs = read_inputs(options.recipe, options.overrides, check=not options.search)
    machine = Machine(gpu, assumed, config.trainer.n_gpus_per_node)
    if options.search:
        _search(options, inputs, machine, limit, reserve)
        return
    check_models(config, inputs.model, inputs.critic, inputs.reward, inputs.teachers)
    plan = plan_memory(config, inputs, limit, reserve)
    job = plan_job(config, inputs, machine, plan, sync=not options.without_sync)
    advice = [] if plan.fits else changes(options.recipe, options.overrides, config, plan, reserve)
    if options.html is not None:
        write_text(options.html, page(job, Path(options.recipe).name, advice))
    if options.json:
        found = [{"keys": change.keys, "peak": change.peak, "fits": change.fits} for change in advice]
        _print_json(as_json(job, found))
        return
    console = Console()
    _print_lines(console, f"{options.recipe} on {job.devices} {gpu.name}")
    print_plan(console, config, plan, [])
    print_job(console, job)
    lines = [f"would help: {as_words(change)}" for change in advice]
    if not plan.fits:
        lines.append("other layouts: --search; more nodes: megarl plan memory --fit")
    if lines:
        _print_lines(console, *lines)


def _search(
    options: argparse.Namespace, inputs: PlanInputs, machine: Machine, limit: int, reserve: int | None
) -> None:
    """Print the proposals of `Search`."""
    if options.html is not None:
        raise ValueError("--html beside --search: the page shows one layout; give its keys without --search")
    if options.top < 1:
        raise ValueError(f"--top is {options.top}; it must be at least 1")
    recipe = load_config(TrainConfig, options.recipe, options.overrides)
    search = Search(recipe, inputs, machine, limit, reserve)
    found = search.run(options.top)
    if not found:
        raise ValueError(_nothing(search))
    # The same proposals, for programs or for people.
    if options.json:
        proposals = [
            {
                **seconds_json(each.seconds),
                "phases": {phase.name: phase.seconds for phase in each.phases},
                "peak": each.memory.peak,
                "layout": each.words,
                "keys": each.keys,
            }
            for each in found
        ]
        _print_json({"note": NOTE, "layouts": search.seen, "proposals": proposals})
        return
    console = Console()
    table = _table("layout", "step, s", *(phase.name for phase in found[0].phases), "GiB")
    for number, each in enumerate(found, 1):
        times = (f"{phase.seconds:.1f}" for phase in each.phases)
        table.add_row(str(number), f"{each.seconds:.1f}", *times, f"{each.memory.peak / GIB:.1f}")
    console.print(f"of {search.seen:,} layouts the fastest that fit and are legal", highlight=False)
    console.print(table)
    _print_lines(
        console,
        *(f"{number}: {each.words}\n   {' '.join(each.keys)}" for number, each in enumerate(found, 1)),
        f"the first likely {range_words(found[0].seconds)} a step; differences within that are guesses",
        "weight syncs are assumed to send everything that engines serve; `megarl plan step` with a layout's keys plans them",
        f"{NOTE}: {assumed_text(machine)}",
    )


def _nothing(search: Search) -> str:
    """Why there is no layout to propose."""
    recipe, limit = search.recipe, search.limit / GIB
    words = reserve_words(None if search.reserve is None else search.reserve / GIB)
    text = f"no layout on the recipe's devices fits {limit:g} GiB of each (less {words})"
    if not search.trainers:
        text += "; the actor's weights, gradients and optimizer states take more: more or larger devices, or adapters"
    if not search.engines:
        rollout = recipe.actor_rollout_ref.rollout
        text += (
            f"; no engine has room in rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} of it for its "
            "weights and one of the longest trajectories"
        )
        text += ": rollout.quantization=fp8 halves the weights" if rollout.quantization is None else ""
    try:
        check_config(recipe, data_files=False)
    except ValueError as error:  # perhaps the layout is not the mistake
        text += f"\nthe recipe as it is: {error}"
    return text


def print_job(console: Console, job: JobPlan) -> None:
    """Print the fullest devices, the sync, seconds by phase and part, bubbles, and assumptions."""
    fullest = {phase: job.fullest(phase) for phase in job.memory.phases}
    _print_lines(
        console,
        *(f"{phase}: fullest is {device}, {size / GIB:.2f} GiB" for phase, (device, size) in fullest.items()),
    )
    if job.sync is not None:
        table = _table("weight sync", "all ranks", "max received", "seconds")
        for row in sync_rows(job):
            table.add_row(*row)
        console.print(table)
    table = _table("estimated", "seconds", "floor", "part of step", "tokens/s")
    for is_phase, (name, *cells) in time_rows(job):
        table.add_row(name if is_phase else f"  {name}", *cells, style="bold" if is_phase else None)
    table.add_section()
    rate = job.tokens / job.seconds
    step = (f"{job.seconds:.2f}", f"{job.floor:.2f}", "100%")
    table.add_row("step", *step, f"{rate:,.0f} ({rate / job.devices:,.0f} a GPU)")
    console.print(table)
    _print_lines(
        console,
        f"likely {range_words(job.seconds)} a step: so far are eight of ten public runs from their plans (docs/planning.md)",
    )
    table = _table("pipeline", "stages wait", "micro-batches", "optimizer steps")
    for name, *cells, steps in pipeline_rows(job):
        table.add_row(name, *cells, steps if name.endswith("updates") else "-")
    console.print(table)
    _print_lines(console, f"{NOTE}:\n{assumed_words(job)}")


def run_sync(options: argparse.Namespace) -> None:
    """Print the figures of a weight sync.

    Raises:
        ValueError: names the option and a right value.
    """
    rates = (options.bandwidth_local, options.bandwidth_intra, options.bandwidth_inter)
    bandwidths = dict(zip(LINKS, rates, strict=True))  # GB/s
    for link, rate in bandwidths.items():
        if rate <= 0:
            raise ValueError(f"--bandwidth-{link.split('_')[0]} is {rate:g} GB/s; it must be above 0")
    sync, draft = planned_sync(options)
    figures = report(sync, {link: rate * 1e9 for link, rate in bandwidths.items()})
    if options.json:
        _print_json(_sync_json(sync, figures) | {"draft": draft})
    else:
        print_sync(Console(), sync, figures)
        if draft:
            _print_lines(
                Console(),
                f"a draft of {size_text(draft)} on each engine rank comes from a folder: it is not sent, each sync verifies it there",
            )


def _sync_json(sync: SyncPlan, figures: PlanReport) -> dict[str, object]:
    return {
        "model": sync.config.architecture,
        "dtype": _dtype(sync),
        "train": {name: size for name, size in asdict(sync.parallel).items() if size not in (None, False)},
        "rollout": asdict(sync.engines),
        "engine_places": [f"{place.node}:{place.device}" for place in sync.target_places],
        **asdict(figures),
    }


def _dtype(sync: SyncPlan) -> str:
    name = str(sync.dtype).removeprefix("torch.")
    return name if sync.fp8_block is None else f"float8 and {name}"


def print_sync(console: Console, sync: SyncPlan, figures: PlanReport) -> None:
    """Print the figures as a table; bytes in GB (10^9)."""
    parallel, engines = sync.parallel, sync.engines
    _print_lines(
        console,
        f"{sync.config.architecture}: {figures.num_parameters / 1e9:,.1f}B parameters, M = {size_text(figures.model_bytes)} "
        f"({_dtype(sync)})",
        f"from {parallel.world} ranks: TP{parallel.tp} PP{parallel.pp} CP{parallel.cp} DP{parallel.dp}, experts EP"
        f"{parallel.ep} ETP{parallel.etp}",
        f"to {engines.num_engines} engines: TP{engines.tp} EP{engines.ep}, attention DP{engines.dp}",
    )
    table = _table("bytes by link", "all ranks", "max received", "max sent", "seconds")
    _add_method(table, "shard to shard", figures.reshard)
    _add_method(table, "full gather", figures.full_gather)
    console.print(table)
    reshard, full = figures.reshard, figures.full_gather
    _print_lines(
        console,
        f"most that a rank receives from other devices: {size_text(reshard.max_received)}; full gather (M minus what its "
        f"device holds): {size_text(full.max_received)}",
        *(
            f"engine rank {rank.rank} receives {name}: of {size_text(rank.serves)} that it serves {size_text(rank.local)} are on "
            f"its device, {size_text(rank.intra_node)} on its node"
            for name, rank in (("most", figures.most), ("least", figures.least))
        ),
        _way_text(figures),
        f"{figures.num_copies:,} slices in {figures.num_buckets:,} buckets of {size_text(figures.bucket_bytes)}; two buckets in "
        f"a row: at most {size_text(figures.in_flight[0])} on the rank that receives, {size_text(figures.in_flight[1])} on the one "
        "that sends",
    )


def _way_text(figures: PlanReport) -> str:
    average, most = figures.peers
    met = f"each process has {average:.0f} peers on average, {most} at most, in one communicator"
    if figures.way == MAPPED or not figures.communicators:
        return "on GPUs data crosses between processes only on the same GPU, by CUDA IPC"
    if figures.way == COLOCATED:
        return f"trainer ranks exchange slices among themselves, engine ranks read them by CUDA IPC; {met}"
    passing = f", {figures.chain} engines pass them on to each other" if figures.chain > 1 else ""
    return f"trainer ranks send each slice once{passing}; {met}"


def _add_method(table: Table, name: str, way: MethodCost) -> None:
    """Add rows to the table: the bytes between devices, then the bytes of each link."""
    between = way.links["intra_node"].total + way.links["inter_node"].total
    rows = [(name, between, way, "bold")]
    rows += [
        (f"  {words}", cost.total, cost, None)
        for words, cost in zip(LINK_WORDS, way.links.values(), strict=True)
    ]
    for words, total, cost, style in rows:
        sizes = map(size_text, (total, cost.max_received, cost.max_sent))
        table.add_row(words, *sizes, f"{cost.seconds:.2f}", style=style)
    table.add_section()
