"""Where SGLang keeps adapters, worked out from where it keeps the weights (sglang 0.5.21).

With LoRA enabled SGLang wraps each linear layer of a kind (`qkv_proj`) in all decoder layers, and keeps the adapters of a
layer in two buffers beside its weight [out, in]: A [stacked * rank, in] and B [out, rank]. What it computes as one (q, k
and v; gate and up) is stacked: A has the projections' rows one below the other, B has the weight's own rows. Where the
weight is cut over ranks, so are they: A by its columns, B by its rows.
"""

from collections.abc import Iterable

from megarl.config.schema.models import LoraConfig
from megarl.layout.boxes import Box, Piece
from megarl.models.config import ModelConfig
from megarl.models.lora import A, B
from megarl.models.shards import Shapes

SERVED_A, SERVED_B = ".lora_A", ".lora_B"  # after the name of SGLang's layer: local names of the buffers


def why_not_served(config: ModelConfig, lora: LoraConfig) -> str | None:
    """Why SGLang cannot serve these adapters beside the model's weights; None: it can."""
    if lora.use_dora:
        return "lora.use_dora=true: SGLang refuses DoRA adapters"
    if config.mla is not None:
        return f"{config.family}: SGLang's latent attention absorbs kv_b_proj, and leaves its adapters out"
    if config.moe is not None:
        return f"{config.family}: for experts SGLang has adapters in compiled GPU kernels only"
    return None


def adapted_layers(weights: Iterable[str]) -> tuple[str, ...]:
    """The last parts of the names of adapted weights' layers, each once ("q_proj"): SGLang's lora_target_modules."""
    return tuple(dict.fromkeys(name.removesuffix(".weight").rsplit(".", 1)[1] for name in weights))


def sglang_adapters(pieces: Iterable[Piece], weights: Shapes, rank: int) -> list[Piece]:
    """Where an engine's rank has the adapters of its weights; local names are "<layer>.lora_A", "<layer>.lora_B".

    Args:
        pieces: all of the rank's pieces (`sglang_pieces`).
        weights: `adapted_weights`.
        rank: of the adapters, and the most that the engine was started for.
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
    """Buffer -> its elements that no adapter fills: those of projections, and of whole layers, without adapters."""
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
