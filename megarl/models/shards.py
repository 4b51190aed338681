"""Shards of tensors as pieces, and the ranks' places that decide which shard each holds."""

from collections.abc import Callable
from dataclasses import dataclass

from megarl.layout.boxes import Box, Piece
from megarl.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
"""Logical name -> shape, both of the Hugging Face tensors."""

PARTS = ("dense", "experts", "all")
"""Parts of a rank's weights: all but the routed experts, the routed experts alone, or both."""


@dataclass(frozen=True)
class MegatronPlace:
    """A Megatron rank's place in the groups that cut tensors."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0


@dataclass(frozen=True)
class SGLangPlace:
    """A rank of an SGLang engine.

    ep: ranks that share the experts (SGLang's ep_size); the tp // ep ranks of one share cut each expert.
    dp: data parallel parts of attention (SGLang's dp_size with enable_dp_attention); tp // dp ranks cut attention.
    """

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    dp: int = 1

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank % self.moe_tp

    @property
    def ep_rank(self) -> int:
        return self.tp_rank // self.moe_tp

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp

    @property
    def attention_tp_rank(self) -> int:
        return self.tp_rank % self.attention_tp


@dataclass(frozen=True)
class Block:
    """The weight table of a part of a layer, such as its attention.

    Attributes:
        tensors: (config, name) -> the tensors of the layer `name` ("model.layers.3.") and their shapes.
        megatron: (config, place, name, local) -> the layer's pieces on a rank, where it is called `local` ("0:decoder.layers.1.").
        sglang: (config, place, name) -> the layer's pieces on an engine's rank.
    """

    tensors: Callable[[ModelConfig, str], Shapes]
    megatron: Callable[[ModelConfig, MegatronPlace, str, str], list[Piece]]
    sglang: Callable[[ModelConfig, SGLangPlace, str], list[Piece]]


def replicated(tensor: str, local: str, shape: tuple[int, ...]) -> Piece:
    """The full tensor, on every rank."""
    return Piece(tensor, Box.whole(shape), local, Box.whole(shape))


def row_shard(tensor: str, local: str, shape: tuple[int, ...], tp: int, rank: int, at: int = 0) -> Piece:
    """Shard `rank` of `tp` equal row shards, lying from row `at` of the local tensor."""
    count = shape[0] // tp
    return Piece(tensor, Box.rows(rank * count, count, shape), local, Box.rows(at, count, shape))


def column_shard(tensor: str, local: str, shape: tuple[int, ...], tp: int, rank: int) -> Piece:
    """Shard `rank` of `tp` equal shards of the last dimension, being all of the local tensor."""
    count = shape[-1] // tp
    return Piece(tensor, Box.columns(rank * count, count, shape), local, Box.columns(0, count, shape))


def vocab_shard(
    tensor: str, local: str, shape: tuple[int, ...], padded: int, tp: int, rank: int
) -> list[Piece]:
    """The real rows among this rank's share of the padded vocabulary (none, where all are padding)."""
    share = padded // tp
    count = min(share, shape[0] - rank * share)
    if count <= 0:
        return []
    return [Piece(tensor, Box.rows(rank * share, count, shape), local, Box.rows(0, count, shape))]
