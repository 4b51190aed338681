"""Adapters of linear layers: their tensors, and their places in Megatron and SGLang, which follow from the places of the weights.

Next to a weight W [out, in] are A [rank, in] and B [out, rank] (LoRA, arXiv:2106.09685) and, with DoRA
(arXiv:2402.09353), magnitudes [out]; their names are PEFT's, without its prefix. Where W is cut by rows, B is cut with it
and A is replicated; where it is cut by columns, A is cut with it and B is replicated. So no family says anything about adapters.

In a Megatron rank the adapters of all tensors in one linear layer are together: `a` has their As one above the other,
`b` and `m` have the rows of the layer's weight, in its order, as far as their tensors have adapters.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import count

from megarl.config.problems import did_you_mean
from megarl.config.schema.models import ALL_LINEAR, LoraConfig
from megarl.layout.boxes import Box, Piece
from megarl.models.config import ModelConfig
from megarl.models.layers import INDEXER
from megarl.models.shards import COLUMNS, ROWS, Shapes
from megarl.models.table import logical_tensors

A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
IN_CHECKPOINTS = "adapters."  # prefix of these names in Megatron's distributed checkpoints
ADAPTER = "lora"  # the submodule of a linear layer that holds its adapters
_LINEAR = (
    "_proj",
    "_proj_with_mqa",
    "_proj_qkvz",
    "_proj_ba",
    *("_proj_qkv", "_proj_z", "_proj_b", "_proj_a"),
    *(".w1", ".w2", ".w3"),
)  # how the names of all families' linear layers end, but for heads and routers


_ROUTER = "gate"  # the last part of a router's name; patterns that end in it alone choose routers


@dataclass(frozen=True)
class AdapterSlot:
    """The adapters in one linear layer of a Megatron rank.

    Attributes:
        weight: the local name of the layer's weight.
        module: the local name of the layer ("0:decoder.layers.1.mlp.linear_fc1").
        number: which of the layer's experts, or groups of experts; None: it has no experts.
        tensors: the adapted weights (logical names) in the order in which `a` has them.
        rows: the layer's rows that `b` has, in its order: (number of the tensor, first row, count).
        in_features: columns of the layer's weight.
    """

    weight: str
    module: str
    number: int | None
    tensors: tuple[str, ...]
    rows: tuple[tuple[int, int, int], ...]
    in_features: int

    @cached_property
    def num_rows(self) -> int:
        return sum(num for _, _, num in self.rows)


def sharded_dimension(slot: AdapterSlot, shape: tuple[int, ...]) -> str | None:
    """Whether tensor parallel ranks have cut the slot's first weight, of this shape, by ROWS or by COLUMNS; None: by neither."""
    if sum(count for number, _, count in slot.rows if number == 0) < shape[0]:
        return ROWS
    return COLUMNS if slot.in_features < shape[1] else None


def scaling(lora: LoraConfig) -> float:
    """The factor of an adapter's output."""
    alpha = float(lora.rank if lora.alpha is None else lora.alpha)
    return alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)


def linear_weights(config: ModelConfig) -> Shapes:
    """The weights of all linear layers but the head, routers and indexers, with their shapes."""
    return linear_of(logical_tensors(config))


def linear_of(tensors: Shapes) -> Shapes:
    """The linear layers' weights among some tensors."""
    ends = tuple(f"{end}.weight" for end in _LINEAR)
    return {
        name: shape for name, shape in tensors.items() if name.endswith(ends) and f".{INDEXER}" not in name
    }


def adaptable_weights(config: ModelConfig) -> Shapes:
    """The weights that may have adapters: linear layers' and routers'.

    gpt-oss's experts have none: in its files and for PEFT 0.21 they are parameters of a layer, not layers, which "all-linear" leaves out there,
    too.
    """
    linear, end = linear_weights(config), f".{_ROUTER}.weight"
    whole = config.moe is not None and config.moe.biases
    return {
        name: shape
        for name, shape in logical_tensors(config).items()
        if (name in linear and not (whole and ".experts." in name)) or name.endswith(end)
    }


def adapted_weights(config: ModelConfig, lora: LoraConfig) -> Shapes:
    """The weights that have adapters, with their shapes.

    Raises:
        ValueError: a pattern fits no linear layer, no layer is left, or some experts of a layer have adapters and the
            others have none.
    """
    linear = {name.removesuffix(".weight"): shape for name, shape in adaptable_weights(config).items()}
    for key, patterns in (("target_modules", lora.target_modules), ("exclude_modules", lora.exclude_modules)):
        for pattern in patterns:
            if not any(_fits(name, pattern) for name in linear):
                if any(_fits(name.removesuffix(".weight"), pattern) for name in linear_weights(config)):
                    raise ValueError(
                        f"lora.{key}: {pattern!r} fits experts alone, and {config.family} models have no adapters of experts: they are "
                        "parameters of a layer in the model's files and for PEFT, not layers; leave it out"
                    )
                known = list(dict.fromkeys(name.rsplit(".", 1)[1] for name in linear))
                raise ValueError(
                    f"lora.{key}: {pattern!r} fits no linear layer of the model; there are {', '.join(known)}"
                    f"{_advice(pattern, known)}"
                )
    chosen = {
        f"{name}.weight": shape
        for name, shape in linear.items()
        if any(_fits(name, pattern) for pattern in lora.target_modules)
        and not any(_fits(name, pattern) for pattern in lora.exclude_modules)
    }
    if not chosen:
        raise ValueError("lora.exclude_modules leaves no linear layer that has an adapter")
    if config.moe is not None:
        _check_experts(chosen, config.moe.num_experts)
    return chosen


def _check_experts(chosen: Shapes, num_experts: int) -> None:
    """Experts of a layer are one layer in Megatron, spread over ranks: all of them have an adapter, or none."""
    found: dict[tuple[str, str], int] = {}
    for name in chosen:
        layer, experts, rest = name.partition(".experts.")
        if experts:
            key = (layer, rest.split(".", 1)[1])
            found[key] = found.get(key, 0) + 1
    for (layer, projection), chosen_experts in found.items():
        if chosen_experts < num_experts:
            raise ValueError(
                "lora.target_modules and lora.exclude_modules choose "
                f"{projection.removesuffix('.weight')} of {chosen_experts} of the {num_experts} experts in {layer}; "
                "either all experts of a layer have adapters, or none"
            )


def _advice(pattern: str, known: list[str]) -> str:
    """Likely intended names for a pattern that fits nothing, given the last parts of the layers' names."""
    if "," in pattern:
        return "; several are a list: [q_proj, v_proj]"
    if any(sign in pattern for sign in "\\^$(|)+"):
        return "; it is no regular expression: * stands for any characters, ? for one, [ab] for one of these"
    if "." in pattern and "*" not in pattern:
        return f"; a pattern is of the whole name: *.{pattern.lstrip('.')}"
    return did_you_mean(pattern, [*known, ALL_LINEAR])


def _fits(module: str, pattern: str) -> bool:
    if module.rsplit(".", 1)[1] == _ROUTER and pattern.rsplit(".", 1)[-1] != _ROUTER:
        return False
    return pattern == ALL_LINEAR or module.rsplit(".", 1)[1] == pattern or fnmatchcase(module, pattern)


def logical_adapters(config: ModelConfig, lora: LoraConfig) -> Shapes:
    """The adapters' tensors with their shapes, weight by weight."""
    shapes: Shapes = {}
    for weight, (rows, columns) in adapted_weights(config, lora).items():
        name = weight.removesuffix(".weight")
        shapes |= {name + A: (lora.rank, columns), name + B: (rows, lora.rank)}
        if lora.use_dora:
            shapes[name + MAGNITUDE] = (rows,)
    return shapes


def adapter_slots(pieces: Iterable[Piece], weights: Shapes) -> list[AdapterSlot]:
    """The linear layers of a Megatron rank that have adapters.

    Args:
        pieces: all of the rank's pieces (`megatron_pieces`).
        weights: `adapted_weights`.
    """
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.tensor in weights:
            found.setdefault(piece.local, []).append(piece)
    slots = []
    for local, parts in found.items():
        parts.sort(key=lambda piece: piece.local_box.start[0])
        tensors = tuple(dict.fromkeys(piece.tensor for piece in parts))
        rows = tuple(
            (tensors.index(piece.tensor), piece.local_box.start[0], piece.local_box.size[0])
            for piece in parts
        )
        module, kind = local.rsplit(".", 1)
        number = kind.removeprefix("weight")
        slots.append(
            AdapterSlot(
                local, module, int(number) if number else None, tensors, rows, parts[0].local_box.size[1]
            )
        )
    return slots


def adapter_pieces(
    pieces: Iterable[Piece], weights: Shapes, lora: LoraConfig, adapter: str = ADAPTER
) -> list[Piece]:
    """Where a Megatron rank has the adapters of its weights; local names are "<layer>.<adapter>.a", ".b", ".m". For experts
    `a` and `b` have a first dimension that counts the layer's experts, or groups of them, which have ".m0", ".m1", ... in place of ".m".

    With `lora.shared_a` or `lora.expert_groups` several tensors lie in one place: they are equal.
    """
    every = [piece for piece in pieces if piece.tensor in weights]
    slots = {slot.weight: slot for slot in adapter_slots(every, weights)}
    sizes = {
        slot.module: group_size(weights, lora, slot.tensors[0]) for slot in slots.values() if slot.number == 0
    }
    out: dict[Piece, None] = {}  # in order, each once
    for piece in every:
        slot = slots[piece.local]
        number = None if slot.number is None else slot.number // sizes[slot.module]
        out |= dict.fromkeys(_pieces_of(piece, slot, lora, f"{slot.module}.{adapter}.", number))
    return list(out)


def _pieces_of(
    piece: Piece, slot: AdapterSlot, lora: LoraConfig, local: str, number: int | None
) -> list[Piece]:
    """Where the adapter of a weight's piece lies, in parameters of the module `local`.

    Args:
        number: of the expert, or group of experts; None: the layer has none.
    """
    name, rank = piece.tensor.removesuffix(".weight"), lora.rank
    (row, column), (rows, columns) = piece.box
    above = 0 if lora.shared_a else slot.tensors.index(piece.tensor) * rank
    at = _compact(slot, piece.local_box.start[0])
    first, one = ((), ()) if number is None else ((number,), (1,))
    found = [
        Piece(name + A, Box((0, column), (rank, columns)), local + "a",
              Box((*first, above, 0), (*one, rank, columns))),
        Piece(name + B, Box((row, 0), (rows, rank)), local + "b", Box((*first, at, 0), (*one, rows, rank))),
    ]  # fmt: skip
    if lora.use_dora:
        magnitudes = local + ("m" if number is None else f"m{number}")
        found.append(Piece(name + MAGNITUDE, Box((row,), (rows,)), magnitudes, Box((at,), (rows,))))
    return found


def group_size(weights: Shapes, lora: LoraConfig, expert: str) -> int:
    """How many neighbouring experts share an adapter in the layer of `expert` (one of its weights)."""
    if lora.expert_groups is None:
        return 1
    layer, rest = expert.split(".experts.")
    end = rest.split(".", 1)[1]
    num_experts = next(n for n in count() if f"{layer}.experts.{n}.{end}" not in weights)
    return num_experts // lora.expert_groups


def check_expert_groups(config: ModelConfig, lora: LoraConfig, ep: int) -> None:
    """Raise ValueError if `lora.expert_groups` does not fit this model and this expert parallel size."""
    groups = lora.expert_groups
    if groups is None:
        return
    if config.moe is None:
        raise ValueError(f"lora.expert_groups={groups}: the model has no experts; leave it out")
    if config.moe.num_experts % groups or groups % ep:
        raise ValueError(
            f"lora.expert_groups={groups} must divide the model's {config.moe.num_experts} experts, and be a multiple of "
            f"expert_model_parallel_size={ep}, so that no group is on two ranks"
        )


def _compact(slot: AdapterSlot, row: int) -> int:
    """Where a layer's row lies in `b`."""
    return sum(num for _, first, num in slot.rows if first < row)


# SGLang's adapters (sglang 0.5.21). With LoRA enabled SGLang wraps each linear layer of a kind (`qkv_proj`) in all decoder layers, and
# keeps the adapters of a layer in two buffers next to its weight [out, in]: A [stacked * rank, in] and B [out, rank]. Projections that it
# computes as one (q, k and v; gate and up) are stacked: A has the projections' rows one below the other, B has the weight's own rows.
# Where the weight is cut over ranks, so are they: A by its columns, B by its rows.

SERVED_A, SERVED_B = ".lora_A", ".lora_B"  # after the name of SGLang's layer: local names of the buffers


def why_not_served(config: ModelConfig, lora: LoraConfig) -> str | None:
    """Why SGLang cannot serve these adapters with the model's weights; None: it can."""
    if lora.use_dora:
        return "lora.use_dora=true: SGLang refuses DoRA adapters"
    if config.mla is not None:
        return f"{config.family}: SGLang's latent attention absorbs kv_b_proj, and leaves its adapters out"
    if config.moe is not None:
        return f"{config.family}: for experts SGLang has adapters in compiled GPU kernels only"
    if config.delta_net is not None:
        return f"{config.family}: SGLang has no adapters of gated delta nets' in_proj_ba"
    return None


def adapted_layers(weights: Iterable[str]) -> tuple[str, ...]:
    """The last parts of the names of adapted weights' layers, each once ("q_proj"): SGLang's lora_target_modules."""
    return tuple(dict.fromkeys(name.removesuffix(".weight").rsplit(".", 1)[1] for name in weights))


def sglang_adapters(pieces: Iterable[Piece], weights: Shapes, rank: int) -> list[Piece]:
    """Where an engine's rank has the adapters of its weights; local names are "<layer>.lora_A", "<layer>.lora_B".

    Args:
        pieces: all of the rank's pieces (`sglang_pieces`).
        weights: `adapted_weights`.
        rank: the adapters', which is the largest that the engine was started for.
    """
    found: list[Piece] = []
    for local, parts in _wrapped(pieces, weights).items():
        layer = local.removesuffix(".weight")
        for number, part in enumerate(parts):
            if part.tensor not in weights:
                continue
            name = part.tensor.removesuffix(".weight")
            (row, column), (rows, columns) = part.box
            found += [
                Piece(name + A, Box((0, column), (rank, columns)), layer + SERVED_A,
                      Box((number * rank, 0), (rank, columns))),
                Piece(name + B, Box((row, 0), (rows, rank)), layer + SERVED_B,
                      Box((part.local_box.start[0], 0), (rows, rank))),
            ]  # fmt: skip
    return found


def sglang_adapter_padding(pieces: Iterable[Piece], weights: Shapes, rank: int) -> dict[str, int]:
    """Buffer -> its elements that no adapter fills: projections, and entire layers, without adapters."""
    padding = {}
    for local, parts in _wrapped(pieces, weights).items():
        layer, plain = local.removesuffix(".weight"), [part for part in parts if part.tensor not in weights]
        if plain:
            padding[layer + SERVED_A] = sum(rank * part.local_box.size[1] for part in plain)
            padding[layer + SERVED_B] = sum(rank * part.local_box.size[0] for part in plain)
    return padding


def _wrapped(pieces: Iterable[Piece], weights: Shapes) -> dict[str, list[Piece]]:
    """Local weight -> its pieces from the top, one a tensor, for all layers of the kinds that SGLang wraps."""
    pieces = list(pieces)
    kinds = {_kind(piece.local) for piece in pieces if piece.tensor in weights}
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.local.endswith(".weight") and _kind(piece.local) in kinds:
            found.setdefault(piece.local, []).append(piece)
    for parts in found.values():
        parts.sort(key=lambda piece: piece.local_box.start)
        assert len({part.tensor for part in parts}) == len(parts), parts
    return found


def _kind(local: str) -> str:
    """The last part of a layer's name: of "model.layers.0.self_attn.qkv_proj.weight" it is "qkv_proj"."""
    return local.removesuffix(".weight").rsplit(".", 1)[-1]
