"""`megarl plan step`: memory, weight sync and seconds of a recipe on stated hardware; and its search for layouts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megarl.config import TrainConfig, check_config, load_config
from megarl.config.model_fit import check_models
from megarl.costs.hardware import find_hardware, likely, read_assumptions
from megarl.costs.speed import Machine
from megarl.layout.plan import LINKS
from megarl.plan.advice import Change, as_words, changes
from megarl.plan.inputs import PlanInputs, read_inputs
from megarl.plan.job import NOTE, JobPlan, as_json, assumed_text, assumed_words, plan_job, range_words
from megarl.plan.memory import GIB, plan_memory
from megarl.plan.memory_command import print_plan, reserve_bytes, reserve_words
from megarl.plan.search import Search
from megarl.plan.seconds import bubbles
from megarl.plan.sync import size_text
from megarl.util.files import whole_file

Page = Callable[[JobPlan, str, Sequence[Change]], str]
"""Makes the HTML page of a plan: the job, what the recipe is called, what would help a job that does not fit."""


def run_step(options: argparse.Namespace, page: Page) -> None:
    """Print the report, or what the search found; with --html write the page.

    Raises:
        ValueError: names the option or key, and what would be right.
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
    """Print what `Search` finds."""
    if options.html is not None:
        raise ValueError("--html beside --search: the page shows one layout; give its keys without --search")
    if options.top < 1:
        raise ValueError(f"--top is {options.top}; it must be at least 1")
    recipe = load_config(TrainConfig, options.recipe, options.overrides)
    search = Search(recipe, inputs, machine, limit, reserve)
    found = search.run(options.top)
    if not found:
        raise ValueError(_nothing(search))
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
    except ValueError as error:  # perhaps what is wrong is not the layout
        text += f"\nthe recipe as it is: {error}"
    return text


def print_job(console: Console, job: JobPlan) -> None:
    """What is fullest, the sync, seconds by phase and part, bubbles, and what was assumed."""
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
