"""The tensors of a Megatron rank by their local shapes: what is trained, what is frozen, and in which type.

Shapes are those of the weight table (`megatron_pieces`) and of the adapters (`adapter_pieces`); nothing here knows a
family. The ranks of a stage hold equally large parts: the first one's are given.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from megarl.config.schema.models import LoraConfig
from megarl.layout.boxes import Piece
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.models import MegatronPlace, ModelConfig, keeps_float32, megatron_pieces, padded_vocab_size
from megarl.models.lora import AdapterSlot, adapter_pieces, adapter_slots
from megarl.models.shards import Shapes
from megarl.weight_sync.quantize import Block, is_quantised

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
ROWS, COLUMNS = "rows", "columns"
_EXPERTS = ".mlp.experts."
_BUFFER = ".router.expert_bias"  # a weight of the table that is no parameter
# The modules of a layer and the tensors of a module, as megatron-core 0.19.2 registers them: where padding falls in a
# buffer, and so which rank's part has it, depends on their order.
_MODULES = (
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.linear_fc1.",
    "mlp.experts.linear_fc2.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
)
_TENSORS = ("weight", "bias", "layer_norm_weight")
_IN_A_LAYER = re.compile(r"(\d+:decoder\.layers\.\d+\.)(.*\.)([a-z_]+)(\d*)")


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of a rank.

    Attributes:
        name: "<chunk>:<parameter>".
        expert: whether its replicas are those of an expert, which other ranks have than a dense weight's.
        trained: whether it has a gradient and optimizer states.
        projection: whether it is the weight of a linear layer, which a frozen model may hold in float8.
        shared: whether it is an embedding that another stage has, too.
    """

    name: str
    shape: tuple[int, ...]
    expert: bool
    trained: bool
    projection: bool = False
    shared: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def chunk(self) -> int:
        return int(self.name.split(":", 1)[0])


@dataclass(frozen=True)
class StageTensors:
    """Of a rank of a pipeline stage.

    Attributes:
        weights, adapters: the model's own parameters, and its adapters'.
        slots: the layers that have adapters, each with how tensor parallel ranks have cut its weight: by ROWS, by COLUMNS,
            or None, not at all.
    """

    weights: tuple[LocalTensor, ...]
    adapters: tuple[LocalTensor, ...]
    slots: tuple[tuple[AdapterSlot, str | None], ...] = ()

    @property
    def trained(self) -> list[LocalTensor]:
        return [tensor for tensor in (*self.weights, *self.adapters) if tensor.trained]


def stage_tensors(
    config: ModelConfig,
    layout: ParallelLayout,
    stage: int,
    *,
    head: str = "lm",
    trainable: bool = True,
    lora: LoraConfig | None = None,
    adapted: Shapes | None = None,
    adapter: str = "lora",
) -> StageTensors:
    """What the first rank of a pipeline stage holds.

    Args:
        head: "lm" or "value".
        trainable: whether the model is trained; without adapters all of its weights are.
        lora: the adapters; None, or of rank 0: none.
        adapted: `adapted_weights(config, lora)`, where there are adapters.
    """
    pieces = megatron_pieces(
        config,
        MegatronPlace(tp=layout.tp, ep=layout.ep, etp=layout.etp),
        layers=layers_of(layout, config.num_layers, stage),
        first_stage=stage == 0,
        last_stage=stage == layout.pp - 1,
        head=head,
    )
    with_adapters = lora is not None and lora.rank > 0
    vocabulary = padded_vocab_size(config, layout.tp) // layout.tp
    weights = []
    for name, (parts, shape) in _local_shapes(pieces).items():
        if name.endswith(_BUFFER):
            continue
        if name.endswith(_VOCABULARY):
            shape = (vocabulary, *shape[1:])
        weights.append(
            LocalTensor(
                name,
                shape,
                expert=_as_expert(name, layout),
                trained=trainable and (not with_adapters or name.endswith("value_head.weight")),
                projection=is_quantised(parts[0].tensor),
                shared=config.tie_word_embeddings
                and head == "lm"
                and layout.pp > 1
                and name.endswith(_VOCABULARY),
            )
        )
    weights = _as_registered(weights)
    if not with_adapters:
        return StageTensors(tuple(weights), ())
    assert adapted is not None
    local = _local_shapes(adapter_pieces(pieces, adapted, lora, adapter))
    adapters = [
        LocalTensor(name, shape, _as_expert(name, layout), trainable) for name, (_, shape) in local.items()
    ]
    slots = [(slot, _cut(slot, adapted[slot.tensors[0]])) for slot in adapter_slots(pieces, adapted)]
    return StageTensors(tuple(weights), tuple(adapters), tuple(slots))


def _as_registered(weights: list[LocalTensor]) -> list[LocalTensor]:
    """The tensors of each layer in Megatron's order; layers, and what is in none, stay where they are."""
    places: dict[str, int] = {}

    def key(tensor: LocalTensor) -> tuple[int, ...]:
        found = _IN_A_LAYER.fullmatch(tensor.name)
        place = places.setdefault(tensor.name if found is None else found[1], len(places))
        if found is None:
            return (place,)
        return place, _MODULES.index(found[2]), _TENSORS.index(found[3]), int(found[4] or 0)

    return sorted(weights, key=key)


def float32_buffers(config: ModelConfig, layout: ParallelLayout, stage: int) -> int:
    """Bytes of the weights that are no parameters: they are float32 and never leave the device."""
    if config.moe is None or not config.moe.expert_bias:
        return 0
    layers = [layer for chunk in layers_of(layout, config.num_layers, stage) for layer in chunk]
    return sum(4 * config.moe.num_experts for layer in layers if layer not in config.moe.dense_layers)


def weight_bytes(tensors: Iterable[LocalTensor], itemsize: int, fp8_block: Block | None = None) -> int:
    """Of tensors as they are, in float8 blocks where they are projections and `fp8_block` is given."""
    total = 0
    for tensor in tensors:
        if fp8_block is not None and tensor.projection:
            rows, columns = tensor.shape
            total += tensor.numel + 4 * -(-rows // fp8_block[0]) * -(-columns // fp8_block[1])
        else:
            total += tensor.numel * itemsize
    return total


def _cut(slot: AdapterSlot, shape: tuple[int, ...]) -> str | None:
    """How the weight of this shape, the slot's first, is cut."""
    if sum(count for number, _, count in slot.rows if number == 0) < shape[0]:
        return ROWS
    return COLUMNS if slot.in_features < shape[1] else None


def _as_expert(name: str, layout: ParallelLayout) -> bool:
    """As Megatron marks them: where an expert's replicas are those of dense weights, it counts as one."""
    return _EXPERTS in name and not (layout.ep == 1 and layout.etp == layout.tp)


def _local_shapes(pieces: Iterable[Piece]) -> dict[str, tuple[list[Piece], tuple[int, ...]]]:
    """Local name -> its pieces and the shape that holds them all."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        assert not keeps_float32(piece.tensor) or piece.local.endswith(_BUFFER), piece.tensor
        found.setdefault(piece.local, []).append(piece)
    return {
        name: (parts, tuple(map(max, zip(*(_ends(part) for part in parts), strict=True))))
        for name, parts in found.items()
    }


def _ends(piece: Piece) -> tuple[int, ...]:
    start, size = piece.local_box
    return tuple(first + count for first, count in zip(start, size, strict=True))
