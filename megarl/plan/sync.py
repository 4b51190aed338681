"""The bytes, buckets and seconds of a weight sync before anything runs, compared with gathering full tensors.

The sync is a recipe's, or one between layouts on the command line. No weight is needed, nor a GPU: all figures come from the plan that a
run would execute.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

import torch

from megarl.config import TrainConfig
from megarl.config.loading.recipes import recipe_path
from megarl.config.model_fit import check_model, check_models, check_rollout_model
from megarl.config.schema.models import MegatronConfig
from megarl.config.schema.rollout import RolloutConfig
from megarl.config.schema.run import PoolConfig
from megarl.costs.engine import engine_weight_bytes
from megarl.layout import Account, Layout, RankPlace, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.layout.placement import bytes_there
from megarl.layout.plan import LINKS, most_in_flight
from megarl.models import ModelConfig, logical_tensors, read_model_config
from megarl.plan.drafts import draft_folder
from megarl.plan.inputs import engine_layout, layout_of, precision, read_config, read_teachers
from megarl.util.memory import collection_paused
from megarl.weight_sync.layouts import EngineLayout, best_device_order, hf_layout, sglang_layout
from megarl.weight_sync.quantize import with_scales
from megarl.weight_sync.sync_plan import APART, SyncPlan

LINK_WORDS = ("same device", "same node", "other nodes")  # of LINKS


@dataclass(frozen=True)
class LinkCost:
    """One link of one way of syncing: bytes of all ranks, the most of any one rank, seconds."""

    total: int
    max_received: int
    max_sent: int
    seconds: float


@dataclass(frozen=True)
class MethodCost:
    """One way of syncing.

    Attributes:
        links: by the names in LINKS.
        max_received, max_sent: the most that one rank gets from other devices, gives to them.
        seconds: of the link that takes longest, as all are used at the same time.
    """

    links: dict[str, LinkCost]
    max_received: int
    max_sent: int
    seconds: float


@dataclass(frozen=True)
class RankCost:
    """An engine rank: the bytes that it serves, by their sources."""

    rank: int
    local: int
    intra_node: int
    inter_node: int

    @property
    def serves(self) -> int:
        return self.local + self.intra_node + self.inter_node


@dataclass(frozen=True)
class PlanReport:
    """Figures of one sync.

    Attributes:
        num_parameters, model_bytes: of the full model; in float8 the bytes include the scales.
        reshard, full_gather: megarl's sync, and one in which every rank materialises every full tensor.
        most, least: the engine ranks that get most and least from other devices.
        num_copies, num_buckets: slices that a trainer rank reads; buckets of `bucket_bytes` at most, for any rank that sends or receives.
        in_flight: most bytes that an engine rank and a trainer rank have in two buckets that follow each other: the
            extra memory of a double-buffered sync on either side.
        way: how weights reach the engines (`SyncPlan.way`).
        communicators: of each process, for the sync.
        peers: ranks with which a process exchanges data over the network: the average, and the most of any process.
        chain: engines that pass the same packets on, one after the other.
    """

    num_parameters: int
    model_bytes: int
    reshard: MethodCost
    full_gather: MethodCost
    most: RankCost
    least: RankCost
    num_copies: int
    num_buckets: int
    bucket_bytes: int
    in_flight: tuple[int, int]
    way: str
    communicators: int
    peers: tuple[float, int]
    chain: int


def pool_places(num_devices: int, per_node: int, first: int = 0) -> tuple[RankPlace, ...]:
    """`num_devices` devices from number `first` on, `per_node` of them on each node."""
    numbers = range(first, first + num_devices)
    return tuple(RankPlace(f"node{number // per_node}", str(number % per_node)) for number in numbers)


def best_places(sync: SyncPlan, devices: tuple[RankPlace, ...]) -> tuple[RankPlace, ...]:
    """Where the engines' ranks run if they get the devices that hold most of their weights."""
    order = best_device_order(sync.config, sync.parallel, sync.source_places, sync.engines, devices)
    return tuple(devices[index] for index in order)


@collection_paused()
def report(sync: SyncPlan, bandwidths: Mapping[str, float]) -> PlanReport:
    """The figures of `sync`.

    Args:
        bandwidths: of each of LINKS the bytes a second that one device sends and, at the same time, receives.
    """
    plan = sync.plan
    account = plan.account()
    ranks = [RankCost(rank, **received) for rank, received in enumerate(account.received)]
    ranks.sort(key=lambda rank: (rank.intra_node + rank.inter_node, rank.rank))
    received = most_in_flight(
        ((rank, nbytes) for item in bucket for nbytes in (plan.bytes_of(item),) for rank in item.target_ranks)
        for bucket in sync.buckets
    )
    packed = most_in_flight(
        ((item.source_rank, plan.bytes_of(item)) for item in bucket) for bucket in sync.buckets
    )
    peers = sync.peers()
    chain = sync.engines.num_engines if sync.way == APART else 1
    num_buckets = len(sync.buckets)
    return PlanReport(
        num_parameters=sum(map(prod, logical_tensors(sync.config).values())),
        model_bytes=sum(
            piece.box.numel * plan.itemsize(piece.tensor) for piece in _full_tensors(sync).pieces(0)
        ),
        # The last engine of a chain has its last bucket so many buckets after the first one.
        reshard=_cost(account, bandwidths, rounds=(num_buckets + chain - 1) / num_buckets),
        full_gather=_cost(full_gather(sync), bandwidths),
        most=ranks[-1],
        least=ranks[0],
        num_copies=sum(map(len, sync.buckets)),
        num_buckets=num_buckets,
        bucket_bytes=sync.bucket_limit,
        in_flight=(received, packed),
        way=sync.way,
        communicators=int(max(peers) > 0),
        peers=(sum(peers) / len(peers), max(peers)),
        chain=chain,
    )


def full_gather(sync: SyncPlan) -> Account:
    """The cost where every rank of the engines materialises every full tensor.

    A rank receives M minus the bytes on its device, of M bytes in total. This is the best case: data that a node lacks
    comes into it once, an equal part to each of the k engine ranks there, which pass it on to the others; so a
    rank receives (M - node's) / k from other nodes and the rest from its own. As in a ring, each rank passes on as
    much as it gets.
    """
    plan, everything = sync.plan, _full_tensors(sync)
    there = bytes_there(make_plan(plan.source, everything, plan.itemsize), shard=0)
    ranks_on = Counter(place.node for place in sync.target_places)
    received = []
    for place in sync.target_places:
        local = there[place]
        inter = (there[None] - there[place.node]) // ranks_on[place.node]
        received.append({"local": local, "intra_node": there[None] - local - inter, "inter_node": inter})
    return Account(tuple(received), tuple(received), ())


def _full_tensors(sync: SyncPlan) -> Layout:
    """The layout of one rank that holds every tensor that travels."""
    layout, block = hf_layout(sync.config), sync.fp8_block
    return layout if block is None else with_scales(layout, logical_tensors(sync.config), block)


def _cost(account: Account, bandwidths: Mapping[str, float], rounds: float = 1.0) -> MethodCost:
    """`rounds`: factor of the seconds."""
    links = {}
    for link in LINKS:
        received = max(by_link[link] for by_link in account.received)
        sent = max(by_link[link] for by_link in (*account.sent_by_link, *account.passed_on))
        seconds = rounds * max(received, sent) / bandwidths[link]
        links[link] = LinkCost(account.by_link[link], received, sent, seconds)
    seconds = max(cost.seconds for cost in links.values())
    return MethodCost(links, max(account.received_from_others), max(account.sent), seconds)


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


def planned_sync(options: argparse.Namespace) -> tuple[SyncPlan, int]:
    """The sync of a recipe, or of the layouts among the options; and the bytes of a draft that it only verifies (`kept_draft`).

    Raises:
        ValueError: names the option or key and a right value.
    """
    if options.bucket_mb is not None and options.bucket_mb < 1:
        raise ValueError(f"--bucket-mb is {options.bucket_mb}; it must be at least 1")
    return _from_recipe(options) if options.recipe is not None else (_from_options(options), 0)


def _from_recipe(options: argparse.Namespace) -> tuple[SyncPlan, int]:
    given = [f"--{name}" for name in ("model", *_LAYOUT_OPTIONS) if getattr(options, name)]
    if given:
        raise ValueError(f"{', '.join(given)} beside the recipe {options.recipe}: give key=value instead")
    config = read_config(TrainConfig, options.recipe, options.overrides)
    model = read_model_config(config.actor_rollout_ref.model.path)
    check_models(config, model, critic=model, teachers=read_teachers(config))
    over = {
        "dtype": options.dtype,
        "quantization": "fp8" if options.fp8 else None,
        "sync_bucket_mb": options.bucket_mb,
    }
    over = {name: value for name, value in over.items() if value is not None}
    rollout = replace(config.actor_rollout_ref.rollout, **over)
    return configured_sync(config, model, rollout), kept_draft(config, model, rollout)


@collection_paused()
def configured_sync(config: TrainConfig, model: ModelConfig, rollout: RolloutConfig) -> SyncPlan:
    """The weight sync of a resolved configuration's actor to engines that are as `rollout` says."""
    policy, pools = config.actor_rollout_ref, config.resource_pools
    train, serve = pools[policy.actor.resource_pool], pools[rollout.resource_pool]
    places = _places(train)
    shared = policy.actor.resource_pool == rollout.resource_pool
    engines, trains_layer = engine_layout(rollout), policy.model.mtp == "train"
    return _sync_plan(
        model,
        layout_of(policy.actor.megatron, train),
        # A layer that is not trained is in no sync: the engines have it from the model's folder.
        replace(engines, draft=engines.draft and trains_layer),
        rollout,
        places,
        places if shared else _places(serve, first_node=train.nnodes),
        mtp=trains_layer,
    )


def kept_draft(config: TrainConfig, model: ModelConfig, rollout: RolloutConfig) -> int:
    """Bytes of a draft that a rank of an engine has from a folder: no sync sends them, each verifies them where they lie."""
    layout = engine_layout(rollout)
    if not layout.draft or config.actor_rollout_ref.model.mtp == "train":
        return draft_folder(rollout).weights
    block = rollout.quantization_block_size if rollout.quantization == "fp8" else None
    with_draft, without = (
        engine_weight_bytes(model, one, precision(rollout.dtype), block)
        for one in (layout, replace(layout, draft=False))
    )
    return with_draft - without


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
    # Layouts are read and refused as a recipe's are, under the option's name.
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
        attention_data_parallel_size=layout.dp,
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
    """The result of `make`; its ValueErrors begin with the option."""
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
    mtp: bool = False,
) -> SyncPlan:
    sync = SyncPlan(
        config=model,
        parallel=parallel,
        engines=engines,
        dtype=getattr(torch, rollout.dtype or "bfloat16"),
        bucket_bytes=rollout.sync_bucket_mb << 20,
        source_places=devices,
        device="cuda",
        fp8_block=rollout.quantization_block_size if rollout.quantization == "fp8" else None,
        mtp=mtp,
    )
    return sync.with_engines_at(best_places(sync, engine_devices))


def size_text(nbytes: int) -> str:
    """Bytes as text, in GB (10^9) or MB."""
    if nbytes >= 1e7:
        return f"{nbytes / 1e9:,.2f} GB"
    return f"{nbytes / 1e6:,.3f} MB" if nbytes else "0"
