"""`megarl plan memory`: its options, and the table that it prints."""

from __future__ import annotations

import argparse
import json
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from megarl.config import TrainConfig, TuningConfig, check_config, load_config, resolve
from megarl.config.loading.hub import fetch_models
from megarl.config.loading.load import TRAINING, recipe_command
from megarl.config.loading.recipes import shown
from megarl.config.model_fit import check_models
from megarl.plan.fit import fit, layout_keys
from megarl.plan.inputs import PlanInputs
from megarl.plan.memory import GIB, MemoryPlan
from megarl.plan.supervised import plan_of

C = TypeVar("C", bound=TrainConfig | TuningConfig)


def run(options: argparse.Namespace) -> None:
    """Print the plan; with --fit that of the fewest nodes.

    Raises:
        ValueError: names the option or key, and what would be right; the memory does not fit.
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
        print(json.dumps(as_json(plan, keys), indent=2))
    else:
        print_plan(Console(), config, plan, keys)


def reserve_bytes(option: float | None) -> int | None:
    """Of --reserve, in GiB; None: by what is on a GPU."""
    return None if option is None else round(option * GIB)


def reserve_words(option: float | None) -> str:
    """What is taken off a GPU's memory."""
    return f"--reserve {option:g}" if option is not None else "what CUDA, NCCL and fragments take"


def read_inputs(recipe: str, overrides: list[str], check: bool = True) -> tuple[TrainConfig, PlanInputs]:
    """A recipe, resolved and (without the files of its data) checked, and the facts of its models."""
    return _read(TrainConfig, recipe, overrides, check)


def read_planned(
    recipe: str, overrides: list[str], command: str | None = None, check: bool = True
) -> tuple[TrainConfig | TuningConfig, PlanInputs]:
    """`read_inputs`, also of the recipes of `megarl sft`, `rm` and `dpo`.

    Args:
        command: whose recipe it is; None: what its keys say (`recipe_command`).

    Raises:
        ValueError: besides what `load_config` and `check_config` raise, nothing says which command it is of.
    """
    return _read(TRAINING[command or recipe_command(recipe, overrides)], recipe, overrides, check)


def _read(schema: type[C], recipe: str, overrides: list[str], check: bool) -> tuple[C, PlanInputs]:
    config = load_config(schema, recipe, overrides)
    if check:
        check_config(config, data_files=False)
    config = fetch_models(resolve(config), weights=False)
    return config, PlanInputs.read(config)


def as_json(plan: MemoryPlan, keys: list[str]) -> dict[str, object]:
    """The plan in bytes."""
    return {
        "fits": plan.fits,
        "problems": plan.problems(),
        "phases": {
            phase: {
                "total": plan.fullest(phase),
                **{owner.name: max(owner.at(phase)) for owner in plan.owners if max(owner.at(phase))},
            }
            for phase in plan.phases
        },
        "host": {
            name: {"device": plan.host(name), "node": plan.host(name) * pool.n_gpus_per_node}
            for name, pool in plan.pools.items()
        },
        "peak": plan.peak,
        "reserve": plan.reserve,
        "reserved": dict(plan.reserved),
        "limit": plan.limit,
        "kv_tokens": plan.kv_tokens,
        "kv_token_bytes": plan.kv_token_bytes,
        "layout": keys,
    }


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
    """By pool, what its nodes must have for what is not on the devices, or not always."""
    return [
        f"on the host, page-locked: {plan.host(name) / GIB:.1f} GiB for the fullest device of pool {name}, so up to "
        f"{plan.host(name) * pool.n_gpus_per_node / GIB:.1f} a node"
        for name, pool in plan.pools.items()
        if plan.host(name)
    ]


def _cell(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"
