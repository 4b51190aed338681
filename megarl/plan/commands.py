"""`megarl plan memory` and `megarl plan step`: their options, the tables that they print, and the search for layouts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from megarl.config import TrainConfig, TuningConfig, check_config, load_config
from megarl.config.loading.recipes import shown
from megarl.config.model_fit import check_models
from megarl.costs.hardware import find_hardware, likely, read_assumptions
from megarl.costs.speed import Machine
from megarl.layout.plan import LINKS
from megarl.plan.fit import Change, as_words, changes, fit, layout_keys
from megarl.plan.inputs import PlanInputs, read_inputs, read_planned
from megarl.plan.job import NOTE, JobPlan, as_json, assumed_text, assumed_words, plan_job, range_words
from megarl.plan.memory import GIB, MemoryPlan, memory_json, plan_memory, plan_of
from megarl.plan.search import Search
from megarl.plan.seconds import bubbles
from megarl.plan.sync import size_text
from megarl.util.files import whole_file


def run_memory(options: argparse.Namespace) -> None:
    """Print the plan; with --fit that of the fewest nodes.

    Raises:
        ValueError: names the option or key and a right value; the memory does not fit.
    """
    for name, value in (("gpu-memory", options.gpu_memory), ("reserve", options.reserve)):
        if value is not None and value < 0:
            raise ValueError(f"--{name} is {value:g} GiB; it must be at least 0")
    if options.html is not None:
        raise ValueError(f"--html {options.html} is of shadow ranks: give --dry-run, too")
    if options.max_nodes < 1:
        raise ValueError(f"--max-nodes is {options.max_nodes}; it must be at least 1")
    config, inputs = read_planned(options.recipe, options.overrides, options.command)
    limit, reserve = round(options.gpu_memory * GIB), reserve_bytes(options.reserve)
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
        keys = layout_keys(config)
    else:
        check_models(config, inputs.model, inputs.critic, inputs.reward)
        plan = plan_of(config, inputs, limit, reserve)
        plan = plan.without_engines() if options.without_engines else plan
    if options.json:
        print(json.dumps(memory_json(plan, keys), indent=2))
    else:
        print_plan(Console(), config, plan, keys)


def reserve_bytes(option: float | None) -> int | None:
    """The bytes of --reserve, given in GiB; None: by the processes on a GPU."""
    return None if option is None else round(option * GIB)


def reserve_words(option: float | None) -> str:
    """The memory that is not planned with."""
    return f"--reserve {option:g}" if option is not None else "what CUDA, NCCL and fragments take"


def print_plan(
    console: Console, config: TrainConfig | TuningConfig, plan: MemoryPlan, keys: list[str]
) -> None:
    """The owners by phase, in GiB of the fullest device."""
    devices = {name: pool.nnodes * pool.n_gpus_per_node for name, pool in plan.pools.items()}
    model = config.actor_rollout_ref.model if isinstance(config, TrainConfig) else config.model
    lines = [
        f"{shown(model.path)}: {', '.join(f'{count} devices in pool {name}' for name, count in devices.items())}; GiB of the "
        "fullest device",
        *keys,
    ]
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
    table = Table("GiB", *plan.phases, box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
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
        f"({max(plan.kv_tokens, 0) // plan.longest} of the longest trajectories)"
    )
    lines = [
        *([cache] if plan.kv_token_bytes else []),
        *_host_lines(plan),
        f"of {plan.limit / GIB:.1f} GiB a device, {plan.reserve / GIB:.1f} of them for CUDA, NCCL and fragments: "
        f"{'fits, ' if plan.fits else 'does not fit, '}{abs(room):.1f} GiB {'are left' if room >= 0 else 'missing'}",
        *plan.problems(),
    ]
    console.print("\n".join(lines), soft_wrap=True, highlight=False)


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


Page = Callable[[JobPlan, str, Sequence[Change]], str]
"""Makes the HTML page of a plan: the job, the recipe's name, changes that would help a job that does not fit."""


def run_step(options: argparse.Namespace, page: Page) -> None:
    """Print the report, or the search's proposals; with --html write the page.

    Raises:
        ValueError: names the option or key and a right value.
    """
    gpu, assumed = find_hardware(options.hardware), read_assumptions(options.assume)
    memory = gpu.memory_gib if options.gpu_memory is None else options.gpu_memory
    for name, value in (("gpu-memory", memory), ("reserve", options.reserve)):
        if value is not None and value < 0:
            raise ValueError(f"--{name} is {value:g} GiB; it must be at least 0")
    # A layout that is searched for may stand in place of one that is not legal on these devices.
    config, inputs = read_inputs(options.recipe, options.overrides, check=not options.search)
    machine = Machine(gpu, assumed, config.trainer.n_gpus_per_node)
    limit, reserve = round(memory * GIB), reserve_bytes(options.reserve)
    if options.search:
        _search(options, inputs, machine, limit, reserve)
        return
    check_models(config, inputs.model, inputs.critic, inputs.reward)
    plan = plan_memory(config, inputs, limit, reserve)
    job = plan_job(config, inputs, machine, plan, sync=not options.without_sync)
    advice = [] if plan.fits else changes(options.recipe, options.overrides, config, limit, reserve)
    if options.html is not None:
        with whole_file(Path(options.html)) as temporary:
            temporary.write_text(page(job, Path(options.recipe).name, advice), encoding="utf-8")
    if options.json:
        found = [{"keys": change.keys, "peak": change.peak, "fits": change.fits} for change in advice]
        print(json.dumps(as_json(job, found), indent=2))
        return
    console = Console()
    console.print(f"{options.recipe} on {job.devices} {gpu.name}", soft_wrap=True, highlight=False)
    print_plan(console, config, plan, [])
    print_job(console, job)
    lines = [f"would help: {as_words(change)}" for change in advice]
    if not plan.fits:
        lines.append("other layouts: --search; more nodes: megarl plan memory --fit")
    if lines:
        console.print("\n".join(lines), soft_wrap=True, highlight=False)


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
                "seconds": each.seconds,
                "seconds_low": likely(each.seconds)[0],
                "seconds_high": likely(each.seconds)[1],
                "phases": {phase.name: phase.seconds for phase in each.phases},
                "peak": each.memory.peak,
                "layout": each.words,
                "keys": each.keys,
            }
            for each in found
        ]
        print(json.dumps({"note": NOTE, "layouts": search.seen, "proposals": proposals}, indent=2))
        return
    console = Console()
    table = Table("layout", "step, s", *(phase.name for phase in found[0].phases), "GiB", box=SIMPLE_HEAD)
    _right(table)
    for number, each in enumerate(found, 1):
        times = (f"{phase.seconds:.1f}" for phase in each.phases)
        table.add_row(str(number), f"{each.seconds:.1f}", *times, f"{each.memory.peak / GIB:.1f}")
    console.print(f"of {search.seen:,} layouts the fastest that fit and are legal", highlight=False)
    console.print(table)
    lines = [f"{number}: {each.words}\n   {' '.join(each.keys)}" for number, each in enumerate(found, 1)]
    lines.append(
        f"the first likely {range_words(found[0].seconds)} a step; differences within that are guesses"
    )
    lines.append(
        "weight syncs are taken to send all that engines serve; `megarl plan step` with a layout's keys plans them"
    )
    console.print("\n".join([*lines, f"{NOTE}: {assumed_text(machine)}"]), soft_wrap=True, highlight=False)


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
    """Fullest devices, the sync, seconds by phase and part, bubbles, and assumptions."""
    lines = []
    for phase in job.memory.phases:
        device, size = job.fullest(phase)
        lines.append(f"{phase}: fullest is {device}, {size / GIB:.2f} GiB")
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
    if job.sync is not None:
        table = Table("weight sync", "all ranks", "max received", "seconds", box=SIMPLE_HEAD)
        for link, words in zip(LINKS, ("same device", "same node", "other nodes"), strict=True):
            cost = job.sync.reshard.links[link]
            table.add_row(words, size_text(cost.total), size_text(cost.max_received), f"{cost.seconds:.2f}")
        _right(table)
        console.print(table)
    table = Table("estimated", "seconds", "part of step", "tokens/s", box=SIMPLE_HEAD)
    _right(table)
    for phase in job.phases:
        rate = f"{phase.tokens / phase.seconds:,.0f}" if phase.tokens and phase.seconds else "-"
        table.add_row(
            phase.name, f"{phase.seconds:.2f}", f"{phase.seconds / job.seconds:.0%}", rate, style="bold"
        )
        for part in phase.parts:
            table.add_row(f"  {part.name}", f"{part.seconds:.2f}", "", "")
    table.add_section()
    rate = job.tokens / job.seconds
    table.add_row("step", f"{job.seconds:.2f}", "100%", f"{rate:,.0f} ({rate / job.devices:,.0f} a GPU)")
    console.print(table)
    console.print(
        f"likely {range_words(job.seconds)} a step: so far are eight of ten public runs from their plans (docs/planning.md)",
        soft_wrap=True,
        highlight=False,
    )
    table = Table("pipeline", "stages wait", "micro-batches", "optimizer steps", box=SIMPLE_HEAD)
    _right(table)
    for name, passes in bubbles(job.phases).items():
        steps = str(passes.updates) if name.endswith("updates") else "-"
        table.add_row(name, f"{passes.bubble:.1%}", str(passes.micro_batches), steps)
    console.print(table)
    console.print(f"{NOTE}:\n{assumed_words(job)}", soft_wrap=True, highlight=False)


def _right(table: Table) -> None:
    for column in table.columns[1:]:
        column.justify = "right"
