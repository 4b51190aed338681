"""The layouts that weights are moved between, as pieces by rank."""

from megarl.layout import Box, Layout, Piece, RankPlace
from megarl.layout.grid import ParallelLayout, coords_of, layers_of
from megarl.models import ModelConfig, logical_tensors, megatron_pieces, sglang_pieces


def megatron_layout(
    config: ModelConfig,
    parallel: ParallelLayout,
    head: str = "lm",
    places: tuple[RankPlace, ...] | None = None,
) -> Layout:
    """The shards of a Megatron model over all its ranks; replicas (DP, CP) hold equal pieces."""

    def pieces(rank: int) -> list[Piece]:
        coords = coords_of(parallel, rank)
        return megatron_pieces(
            config,
            tp=parallel.tp,
            tp_rank=coords.tp,
            layers=layers_of(parallel, config.num_layers, coords.pp),
            first_stage=coords.pp == 0,
            last_stage=coords.pp == parallel.pp - 1,
            head=head,
        )

    return Layout("Megatron", parallel.world, pieces, places)


def sglang_layout(config: ModelConfig, tp: int, places: tuple[RankPlace, ...] | None = None) -> Layout:
    """The shards of one SGLang engine over its `tp` ranks."""
    return Layout("SGLang", tp, lambda rank: sglang_pieces(config, tp=tp, tp_rank=rank), places)


def hf_layout(config: ModelConfig, head: str = "lm") -> Layout:
    """A Hugging Face checkpoint: one holder of every whole tensor under its own name."""
    shapes = logical_tensors(config, head)
    whole = [Piece(name, Box.whole(shape), name, Box.whole(shape)) for name, shape in shapes.items()]
    return Layout("Hugging Face checkpoint", 1, lambda rank: whole)
