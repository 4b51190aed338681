"""The layouts of adapters, beside those of the weights that they belong to: in Megatron's ranks and in SGLang's."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megarl.config.schema.lora import LoraConfig
from megarl.layout import Layout, Piece, Shard
from megarl.models import ModelConfig, sglang_pieces
from megarl.models.lora import adapted_weights, adapter_pieces
from megarl.models.sglang_lora import sglang_adapter_padding, sglang_adapters
from megarl.weight_sync.model_layouts import EngineLayout


def megatron_adapters(weights: Layout, config: ModelConfig, lora: LoraConfig) -> Layout:
    """Where Megatron's ranks have the adapters. `weights`: `megatron_layout`."""
    shapes = adapted_weights(config, lora)
    return _beside(weights, lambda pieces: adapter_pieces(pieces, shapes, lora))


def served_adapters(weights: Layout, config: ModelConfig, lora: LoraConfig) -> Layout:
    """Where SGLang's ranks serve them from. `weights`: `sglang_layout`."""
    shapes = adapted_weights(config, lora)
    return _beside(weights, lambda pieces: sglang_adapters(pieces, shapes, lora.rank))


def served_padding(config: ModelConfig, engines: EngineLayout, rank: int, lora: LoraConfig) -> dict[str, int]:
    """What of an engine rank's slot no adapter fills."""
    pieces = sglang_pieces(config, engines.place(rank))
    return sglang_adapter_padding(pieces, adapted_weights(config, lora), lora.rank)


def _beside(weights: Layout, adapters: Callable[[Sequence[Piece]], list[Piece]]) -> Layout:
    def with_adapters(shard: Shard) -> Shard:
        return Shard(shard.ranks, lambda: adapters(shard.pieces))

    shards = tuple(with_adapters(shard) for shard in weights.shards)
    return replace(weights, name=f"{weights.name} adapters", shards=shards)
