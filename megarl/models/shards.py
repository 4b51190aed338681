"""Rows of weight tables, the shards that follow from them as pieces, and the ranks' places that decide which shard each holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.layout.boxes import Box, Piece

Shapes = dict[str, tuple[int, ...]]
"""Logical name -> shape, both of the Hugging Face tensors."""

PARTS = ("dense", "experts", "all")
"""Parts of a rank's weights: all but the routed experts, the routed experts alone, or both."""

ROWS, COLUMNS = "rows", "columns"


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
    whole_shared: whether each rank has the shared experts as a whole, as where DeepEP sends tokens to experts.
    dp_head: whether the ranks that cut attention cut the output layer, too (enable_dp_lm_head); else all tp ranks do.
    """

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    dp: int = 1
    whole_shared: bool = False
    dp_head: bool = False

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

    @property
    def head(self) -> tuple[int, int]:
        """How many ranks cut the output layer, and which of them this is."""
        return (self.attention_tp, self.attention_tp_rank) if self.dp_head else (self.tp, self.tp_rank)


class Weight(NamedTuple):
    """A row of a layer's weight table.

    Attributes:
        name: of the Hugging Face tensor, after the layer's name ("mlp.up_proj.weight").
        cut: how tensor parallel ranks cut it: by ROWS, by COLUMNS (the last dimension), or None: each has all of it.
        megatron, sglang: names of the local tensors, after the layer's. Tensors with the same local name lie in it one below the
            other, in the table's order.
        groups: query groups of attention. Megatron interleaves the tensors of a local tensor by these: first the rows of the first
            group of each, and so on.
        replicated: whether the ranks of an engine share groups where there are fewer groups than ranks (keys and values).
        units: equal blocks of rows, one below the other in the tensor, which are divided among ranks; 1: its rows are of one kind, or in sections.
        sections: rows of the parts of a unit. Megatron's local tensor has the first parts of all units of a rank, then their second parts,
            and so on; SGLang's has complete units, one below the other. The sections of a single unit are cut one by one in both.
        whole: whether each Megatron rank has all of it, though an engine's ranks cut it.
    """

    name: str
    shape: tuple[int, ...]
    cut: str | None
    megatron: str
    sglang: str
    groups: int | None = None
    replicated: bool = False
    units: int = 1
    sections: tuple[int, ...] = ()
    whole: bool = False


def megatron_shards(
    weights: Sequence[Weight], name: str, local: str, size: int, rank: int
) -> Iterable[Piece]:
    """The pieces of the layer `name` ("model.layers.3.") on rank `rank` of the `size` that cut it, which calls it `local`
    ("0:decoder.layers.1.")."""
    filled: dict[str, int] = {}
    tensors: dict[str, list[Weight]] = {}
    for weight in weights:
        held = weight._replace(cut=None, groups=None) if weight.whole else weight
        tensors.setdefault(weight.megatron, []).append(held)
    for parts in sorted(tensors.values(), key=_is_last):
        groups, cuts = parts[0].groups, [(size, rank)]
        if groups is not None:
            cuts = [(groups, group) for group in range(rank * groups // size, (rank + 1) * groups // size)]
        for count, shard in cuts:
            for weight in parts:
                yield from _shards(
                    weight, name, local + weight.megatron, count, shard, filled, by_section=True
                )


def sglang_shards(weights: Iterable[Weight], name: str, size: int, rank: int) -> Iterable[Piece]:
    """The pieces of the layer `name`, as SGLang calls it too, on rank `rank` of the `size` ranks of an engine that cut it."""
    filled: dict[str, int] = {}
    for weight in sorted(weights, key=lambda weight: _is_last([weight])):
        count = size // max(1, size // weight.groups) if weight.replicated and weight.groups else size
        yield from _shards(
            weight, name, name + weight.sglang, count, rank * count // size, filled, by_section=False
        )


def _is_last(parts: Sequence[Weight]) -> bool:
    """Whether a local tensor comes after the others of its layer, whatever place its parts have in the checkpoint."""
    return parts[0].cut == COLUMNS


def _shards(
    weight: Weight,
    name: str,
    local: str,
    count: int,
    rank: int,
    filled: dict[str, int],
    by_section: bool,
) -> Iterable[Piece]:
    """Shard `rank` of `count` equal ones, below what is in the local tensor already: `filled` counts its rows."""
    shape = weight.shape
    if weight.cut == ROWS:
        boxes = [Box.rows(first, rows, shape) for first, rows in _rows(weight, count, rank, by_section)]
    elif weight.cut == COLUMNS:
        boxes = [Box.columns(rank * (shape[-1] // count), shape[-1] // count, shape)]
    else:
        boxes = [Box.whole(shape)]
    for box in boxes:
        at = filled.get(local, 0)
        filled[local] = at + box.size[0]
        yield Piece(name + weight.name, box, local, Box.rows(at, box.size[0], box.size))


def _rows(weight: Weight, count: int, rank: int, by_section: bool) -> Iterable[tuple[int, int]]:
    """The (first row, rows) of shard `rank` of `count`, in the order of the local tensor."""
    unit = weight.shape[0] // weight.units
    first, end = rank * weight.units // count, (rank + 1) * weight.units // count
    if weight.units > 1 and not by_section:
        yield first * unit, (end - first) * unit
        return
    offset = 0
    for rows in weight.sections or (unit,):
        if weight.units == 1:
            yield offset + rank * (rows // count), rows // count
        else:
            yield from ((number * unit + offset, rows) for number in range(first, end))
        offset += rows


def vocab_shard(
    tensor: str, local: str, shape: tuple[int, ...], padded: int, tp: int, rank: int
) -> list[Piece]:
    """The real rows among this rank's share of the padded vocabulary (none, where all are padding)."""
    share = padded // tp
    count = min(share, shape[0] - rank * share)
    if count <= 0:
        return []
    return [Piece(tensor, Box.rows(rank * share, count, shape), local, Box.rows(0, count, shape))]
