"""The layouts between which weights and adapters move, as shards with the ranks that hold them."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from megarl.config.schema.models import LoraConfig
from megarl.config.schema.rollout import RolloutConfig
from megarl.layout import Box, Layout, Piece, RankPlace, Shard, place_engines
from megarl.layout.grid import ParallelLayout, coords_of, layers_of
from megarl.models import (
    MegatronPlace,
    ModelConfig,
    SGLangPlace,
    logical_tensors,
    megatron_pieces,
    mtp_copies,
    sglang_pieces,
)
from megarl.models.layers import layer_name
from megarl.models.lora import adapted_weights, adapter_pieces, sglang_adapter_padding, sglang_adapters
from megarl.models.table import kinds_of_layers, layer_tensors


@dataclass(frozen=True)
class EngineLayout:
    """How the ranks of each of `num_engines` equal SGLang engines share the model.

    tp: ranks of an engine. ep: ranks among them that share the experts. dp: data parallel parts of attention.
    whole_shared: whether each rank has the shared experts as a whole. dp_head: whether each part of attention has the whole output layer.
    draft: whether the model's layer for further tokens drafts tokens.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    num_engines: int = 1
    whole_shared: bool = False
    draft: bool = False
    dp_head: bool = False

    def __post_init__(self) -> None:
        for name, size in (("ep", self.ep), ("dp", self.dp)):
            if size < 1 or self.tp % size:
                raise ValueError(
                    f"an engine of tp={self.tp} ranks cannot have {name}={size}; it must divide tp"
                )

    @classmethod
    def of(cls, rollout: RolloutConfig, draft: bool = False) -> "EngineLayout":
        """The layout that a resolved section `rollout` asks for."""
        assert rollout.num_engines is not None, "resolved"
        return cls(
            tp=rollout.tensor_model_parallel_size,
            ep=rollout.expert_parallel_size,
            dp=rollout.attention_data_parallel_size,
            num_engines=rollout.num_engines,
            whole_shared=rollout.moe_a2a_backend is not None,
            draft=draft,
            dp_head=rollout.data_parallel_lm_head,
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of all engines; rank r is rank r % tp of engine r // tp."""
        return self.tp * self.num_engines

    def place(self, rank: int) -> SGLangPlace:
        return SGLangPlace(self.tp, rank % self.tp, self.ep, self.dp, self.whole_shared, self.dp_head)


def megatron_layout(
    config: ModelConfig,
    parallel: ParallelLayout,
    head: str = "lm",
    places: tuple[RankPlace, ...] | None = None,
    mtp: bool = False,
    only: Collection[int] | None = None,
) -> Layout:
    """The shards of a Megatron model over all its ranks; replicas (DP, CP) hold equal pieces.

    mtp: whether it is built with its multi-token prediction layers. only: the other layers to include; None: all.
    """
    dense, experts = defaultdict(list), defaultdict(list)
    for rank in range(parallel.world):
        at = coords_of(parallel, rank)
        dense[at.pp, MegatronPlace(tp=parallel.tp, tp_rank=at.tp)].append(rank)
        place = MegatronPlace(ep=parallel.ep, ep_rank=at.ep, etp=parallel.etp, etp_rank=at.etp)
        experts[at.pp, place].append(rank)
    shards = []
    for part, groups in (("dense", dense), ("experts", experts if config.moe is not None else {})):
        for (stage, place), ranks in groups.items():
            make = partial(
                megatron_pieces,
                config,
                place,
                layers=[
                    [layer for layer in chunk if only is None or layer in only]
                    for chunk in layers_of(parallel, config.num_layers, stage)
                ],
                first_stage=stage == 0,
                last_stage=stage == parallel.pp - 1,
                head=head,
                part=part,
                mtp=mtp,
            )
            shards.append(Shard(ranks, make))
    return Layout("Megatron", parallel.world, tuple(shards), places)


def sglang_layout(
    config: ModelConfig,
    engines: EngineLayout,
    places: tuple[RankPlace, ...] | None = None,
    only: Collection[int] | None = None,
) -> Layout:
    """The shards of SGLang engines over all their ranks, engine by engine. `only`: the model's layers to include; None: all.

    Raises:
        ValueError: data parallel attention, which SGLang does not have for this family; a draft without a layer that could be one.
    """
    if engines.dp > 1 and not config.data_parallel_attention:
        raise ValueError(
            f"SGLang has no data parallel attention (dp={engines.dp}) for {config.family} models"
        )
    dense, experts = defaultdict(list), defaultdict(list)
    for rank in range(engines.num_ranks):
        place = engines.place(rank)
        dense[place].append(rank)
        experts[place.ep_rank, place.moe_tp_rank].append(rank)
    pieces = partial(sglang_pieces, config, draft=engines.draft, layers=only)
    shards = [Shard(ranks, partial(pieces, place, "dense")) for place, ranks in dense.items()]
    if config.moe is not None:
        for ranks in experts.values():
            shards.append(Shard(ranks, partial(pieces, engines.place(ranks[0]), "experts")))
    return Layout("SGLang", engines.num_ranks, tuple(shards), places)


def hf_layout(config: ModelConfig, head: str = "lm", mtp: bool = False) -> Layout:
    """A Hugging Face checkpoint: a single holder of every complete tensor, under its own name.

    mtp: with the multi-token prediction layers; tensors of the model that they repeat are replicas under another name.
    """

    def pieces() -> Sequence[Piece]:
        shapes = logical_tensors(config, head, mtp)
        copies = mtp_copies(config) if mtp else {}
        return [
            Piece(copies.get(name, name), Box.whole(shape), name, Box.whole(shape))
            for name, shape in shapes.items()
        ]

    return Layout("Hugging Face checkpoint", 1, (Shard((0,), pieces),))


def best_device_order(
    config: ModelConfig,
    parallel: ParallelLayout,
    source_places: tuple[RankPlace, ...],
    engines: EngineLayout,
    devices: tuple[RankPlace, ...],
) -> tuple[int, ...]:
    """The device of each engine rank, chosen so that most of the weights that it serves are on that device already.

    Layers of a kind in a stage lie on the same ranks in the same way, so one of them counts as all.

    Args:
        source_places: where the ranks of the trained model are.
    """
    number = _numbers_of_a_kind(config, parallel)
    source = megatron_layout(config, parallel, "lm", source_places, only=number)
    # A draft is a small part, if it is sent at all.
    served = sglang_layout(config, replace(engines, draft=False), only=number)
    elements = {
        layer_name(config, layer) + tensor: layers
        for layer, layers in number.items()
        for tensor in layer_tensors(config, layer)
    }
    return place_engines(source, served, devices, engines.tp, lambda tensor: elements.get(tensor, 1))


def _numbers_of_a_kind(config: ModelConfig, parallel: ParallelLayout) -> dict[int, int]:
    """The first layer of each kind in each stage -> how many layers of this kind the stage has."""
    number: dict[int, int] = {}
    for stage in range(parallel.pp):
        layers = chain.from_iterable(layers_of(parallel, config.num_layers, stage))
        number |= {alike[0]: len(alike) for alike in kinds_of_layers(config, layers)}
    return number


def megatron_adapters(weights: Layout, config: ModelConfig, lora: LoraConfig) -> Layout:
    """The layout of the adapters in Megatron's ranks. `weights`: `megatron_layout`."""
    shapes = adapted_weights(config, lora)
    return _adapter_layout(weights, lambda pieces: adapter_pieces(pieces, shapes, lora))


def served_adapters(weights: Layout, config: ModelConfig, lora: LoraConfig) -> Layout:
    """The layout of the adapters in SGLang's ranks. `weights`: `sglang_layout`."""
    shapes = adapted_weights(config, lora)
    return _adapter_layout(weights, lambda pieces: sglang_adapters(pieces, shapes, lora.rank))


def served_padding(config: ModelConfig, engines: EngineLayout, rank: int, lora: LoraConfig) -> dict[str, int]:
    """Number of elements of an engine rank's adapter slot that no adapter fills, by tensor."""
    pieces = sglang_pieces(config, engines.place(rank))
    return sglang_adapter_padding(pieces, adapted_weights(config, lora), lora.rank)


def _adapter_layout(weights: Layout, adapters: Callable[[Sequence[Piece]], list[Piece]]) -> Layout:
    def adapted(shard: Shard) -> Shard:
        return Shard(shard.ranks, lambda: adapters(shard.pieces))

    shards = tuple(adapted(shard) for shard in weights.shards)
    return replace(weights, name=f"{weights.name} adapters", shards=shards)
