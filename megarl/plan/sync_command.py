"""`megarl plan`: what the weight sync of a recipe, or of layouts on the command line, will move."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megarl.config import TrainConfig, check_config, load_config, resolve
from megarl.config.loading.hub import fetch_models
from megarl.config.loading.recipes import recipe_path
from megarl.config.model_fit import check_model, check_models, check_rollout_model
from megarl.config.schema.sections import MegatronConfig, PoolConfig, RolloutConfig
from megarl.layout.account import LINKS
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, read_model_config
from megarl.plan.sync_report import PlanReport, WayCost, best_places, pool_places, report
from megarl.weight_sync.layouts import EngineLayout, sglang_layout
from megarl.weight_sync.sync_plan import SyncPlan

T = TypeVar("T")

_TRAIN_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
}
_ROLLOUT_SIZES = ("tp", "ep", "dp")
_LAYOUT_OPTIONS = ("train", "rollout", "devices", "engines", "separate")


def run(options: argparse.Namespace) -> None:
    """Print the table.

    Raises:
        ValueError: names the option and what would be right.
    """
    for name, bandwidth in _bandwidths(options).items():
        if bandwidth <= 0:
            raise ValueError(f"--bandwidth-{name.split('_')[0]} is {bandwidth:g} GB/s; it must be above 0")
    if options.bucket_mb is not None and options.bucket_mb < 1:
        raise ValueError(f"--bucket-mb is {options.bucket_mb}; it must be at least 1")
    sync = _from_recipe(options) if options.recipe is not None else _from_options(options)
    figures = report(sync, {link: rate * 1e9 for link, rate in _bandwidths(options).items()})
    if options.json:
        print(json.dumps(_as_json(sync, figures), indent=2))
    else:
        print_report(Console(), sync, figures)


def _bandwidths(options: argparse.Namespace) -> dict[str, float]:
    """Of each link, in GB/s."""
    return dict(
        zip(LINKS, (options.bandwidth_local, options.bandwidth_intra, options.bandwidth_inter), strict=True)
    )


def _from_recipe(options: argparse.Namespace) -> SyncPlan:
    given = [f"--{name}" for name in ("model", *_LAYOUT_OPTIONS) if getattr(options, name)]
    if given:
        raise ValueError(f"{', '.join(given)} beside the recipe {options.recipe}: give key=value instead")
    config = load_config(TrainConfig, options.recipe, options.overrides)
    check_config(config, data_files=False)
    config = fetch_models(resolve(config), weights=False)
    policy = config.actor_rollout_ref
    model = read_model_config(policy.model.path)
    check_models(config, model, critic=model)
    rollout = policy.rollout
    if options.dtype is not None:
        rollout = replace(rollout, dtype=options.dtype)
    if options.fp8:
        rollout = replace(rollout, quantization="fp8")
    if options.bucket_mb is not None:
        rollout = replace(rollout, sync_bucket_mb=options.bucket_mb)
    return configured_sync(config, model, rollout)


def configured_sync(config: TrainConfig, model: ModelConfig, rollout: RolloutConfig) -> SyncPlan:
    """The weight sync of a resolved configuration's actor to engines that are as `rollout` says."""
    policy, pools = config.actor_rollout_ref, config.resource_pools
    train, serve = pools[policy.actor.resource_pool], pools[rollout.resource_pool]
    places = _places(train)
    shared = policy.actor.resource_pool == rollout.resource_pool
    return _sync_plan(
        model,
        ParallelLayout.from_config(policy.actor.megatron, len(places)),
        EngineLayout(
            rollout.tensor_model_parallel_size, rollout.expert_parallel_size, num_engines=rollout.num_engines
        ),
        rollout,
        places,
        places if shared else _places(serve, first_node=train.nnodes),
    )


def _places(pool: PoolConfig, first_node: int = 0) -> tuple:
    per_node = pool.n_gpus_per_node
    return pool_places(pool.nnodes * per_node, per_node, first_node * per_node)


def _from_options(options: argparse.Namespace) -> SyncPlan:
    missing = [
        f"--{name}" for name in ("model", "train", "rollout", "devices") if getattr(options, name) is None
    ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing: give a recipe, or --model, --train, --rollout and --devices, such as "
            "--model recipe:models/deepseek-v3 --train tp8-pp16-ep8-first3-last2 --rollout tp32-ep32 --devices 512"
        )
    for name in ("devices", "devices_per_node", "engines"):
        size = getattr(options, name)
        if size is not None and size < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {size}; it must be at least 1")
    model = _read_model(options.model)
    sizes = _sizes("--train", options.train, tuple(_TRAIN_SIZES))
    megatron = MegatronConfig(**{_TRAIN_SIZES[name]: size for name, size in sizes.items()})
    check_model(megatron, model, key="--train")
    parallel = _named("--train", options.train, lambda: ParallelLayout.from_config(megatron, options.devices))
    sizes = _sizes("--rollout", options.rollout, _ROLLOUT_SIZES)
    tp = sizes.get("tp", 1)
    engines = options.engines or options.devices // tp
    if engines * tp < 1 or (engines * tp > options.devices and not options.separate):
        raise ValueError(
            f"--rollout {options.rollout}: {max(engines, 1)} engines of {tp} devices do not fit the --devices "
            f"{options.devices}; give fewer --engines, or --separate for devices of their own"
        )
    layout = _named("--rollout", options.rollout, lambda: EngineLayout(num_engines=engines, **sizes))
    _named("--rollout", options.rollout, lambda: sglang_layout(model, layout))
    rollout = RolloutConfig(
        tensor_model_parallel_size=tp,
        expert_parallel_size=layout.ep,
        dtype=options.dtype,
        quantization="fp8" if options.fp8 else None,
        sync_bucket_mb=options.bucket_mb or RolloutConfig().sync_bucket_mb,
    )
    check_rollout_model(rollout, model, key="--rollout")
    per_node = options.devices_per_node
    devices = pool_places(options.devices, per_node)
    nodes = -(-options.devices // per_node)
    theirs = pool_places(layout.num_ranks, per_node, nodes * per_node) if options.separate else devices
    return _sync_plan(model, parallel, layout, rollout, devices, theirs)


def _read_model(path: str) -> ModelConfig:
    file = _named("--model", path, lambda: recipe_path(path)).expanduser()
    if file.is_file() and file.name != "config.json":
        raise ValueError(f"--model {path} is a file; a Hugging Face folder or its config.json is needed")
    return _named("--model", path, lambda: read_model_config(str(file.parent if file.is_file() else file)))


def _sizes(option: str, text: str, names: tuple[str, ...]) -> dict[str, int]:
    """ "tp8-pp2" as {"tp": 8, "pp": 2}."""
    sizes: dict[str, int] = {}
    for part in text.split("-"):
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        if match is None or match[1] not in names or match[1] in sizes or int(match[2]) < 1:
            raise ValueError(
                f"{option} {text}: {part!r} is not right there; sizes of at least 1 joined by -, each of "
                f"{', '.join(names)} at most once, such as {'-'.join(f'{name}2' for name in names[:2])}"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def _named(option: str, value: str, make: Callable[[], T]) -> T:
    """What `make` returns; its ValueErrors begin with the option."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{option} {value}: {error}") from None


def _sync_plan(
    model: ModelConfig,
    parallel: ParallelLayout,
    engines: EngineLayout,
    rollout: RolloutConfig,
    devices: tuple,
    engine_devices: tuple,
) -> SyncPlan:
    sync = SyncPlan(
        config=model,
        parallel=parallel,
        engines=engines,
        dtype=getattr(torch, rollout.dtype or "bfloat16"),
        bucket_bytes=rollout.sync_bucket_mb << 20,
        source_places=devices,
        fp8_block=rollout.quantization_block_size if rollout.quantization == "fp8" else None,
    )
    return replace(sync, target_places=best_places(sync, engine_devices))


def _as_json(sync: SyncPlan, figures: PlanReport) -> dict[str, object]:
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


def print_report(console: Console, sync: SyncPlan, figures: PlanReport) -> None:
    """The figures as a table; bytes in GB (10^9)."""
    parallel, engines = sync.parallel, sync.engines
    lines = [
        f"{sync.config.architecture}: {figures.num_parameters / 1e9:,.1f}B parameters, M = {size_text(figures.model_bytes)} "
        f"({_dtype(sync)})",
        f"from {parallel.world} ranks: TP{parallel.tp} PP{parallel.pp} CP{parallel.cp} DP{parallel.dp}, experts EP"
        f"{parallel.ep} ETP{parallel.etp}",
        f"to {engines.num_engines} engines: TP{engines.tp} EP{engines.ep}, attention DP{engines.dp}",
    ]
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
    table = Table("bytes by link", "all ranks", "max received", "max sent", "seconds", box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    _add_way(table, "shard to shard", figures.reshard)
    _add_way(table, "full gather", figures.full_gather)
    console.print(table)
    reshard, full = figures.reshard, figures.full_gather
    lines = [
        f"most that a rank receives from other devices: {size_text(reshard.max_received)}; full gather (M minus what its "
        f"device holds): {size_text(full.max_received)}",
        *(
            f"engine rank {rank.rank} receives {name}: of {size_text(rank.serves)} that it serves {size_text(rank.local)} are on "
            f"its device, {size_text(rank.intra_node)} on its node"
            for name, rank in (("most", figures.most), ("least", figures.least))
        ),
        f"{figures.num_copies:,} copies in {figures.num_buckets:,} buckets of {size_text(figures.bucket_bytes)}; two buckets in "
        f"a row: at most {size_text(figures.in_flight[0])} on the rank that receives, {size_text(figures.in_flight[1])} on the one "
        "that sends",
    ]
    console.print("\n".join(lines), soft_wrap=True, highlight=False)


def _add_way(table: Table, name: str, way: WayCost) -> None:
    """What goes between devices, and of all bytes those of each link."""
    between = way.links["intra_node"].total + way.links["inter_node"].total
    table.add_row(
        name,
        size_text(between),
        size_text(way.max_received),
        size_text(way.max_sent),
        f"{way.seconds:.2f}",
        style="bold",
    )
    for link, words in zip(LINKS, ("same device", "same node", "other nodes"), strict=True):
        cost = way.links[link]
        sizes = (size_text(nbytes) for nbytes in (cost.total, cost.max_received, cost.max_sent))
        table.add_row(f"  {words}", *sizes, f"{cost.seconds:.2f}")
    table.add_section()


def size_text(nbytes: int) -> str:
    """In GB (10^9) or MB."""
    if nbytes >= 1e7:
        return f"{nbytes / 1e9:,.2f} GB"
    return f"{nbytes / 1e6:,.3f} MB" if nbytes else "0"
