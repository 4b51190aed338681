"""The tensors of a Megatron rank: parameters by their local shapes, gradient buffers and optimizer states.

Shapes come from the weight table (`megatron_pieces`) and the table of adapters (`adapter_pieces`); nothing here knows a
family. The ranks of a stage hold equally large parts: the first rank's are given.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import lcm, prod
from typing import NamedTuple

from megarl.config.schema.models import LoraConfig, MuonConfig
from megarl.costs.muon import MOMENTUM, Matrix, is_muons, packed
from megarl.layout.boxes import Piece
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.models import (
    BUFFERS,
    MegatronPlace,
    ModelConfig,
    keeps_float32,
    megatron_pieces,
    padded_vocab_size,
)
from megarl.models.layers import INDEXER, attention_weights, has_indexer, is_mixture
from megarl.models.lora import AdapterSlot, adapter_pieces, adapter_slots, sharded_dimension
from megarl.models.shards import Shapes
from megarl.models.table import once_a_kind
from megarl.util.once import Once
from megarl.weight_sync.quantize import is_quantised

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_EXPERTS = ".mlp.experts."
INDEXER_LOCAL = ".self_attention.indexer."  # of Megatron's names
# The modules of a layer and the tensors of a module, as megatron-core 0.19.2 registers them: where padding falls in a
# buffer, and so which rank's part has it, depends on their order.
_MODULES = (
    "input_layernorm.",
    "self_attention.",
    "self_attention.in_proj.",
    "self_attention.conv1d.",
    "self_attention.out_norm.",
    "self_attention.out_proj.",
    "self_attention.core_attention.",
    "self_attention.linear_proj.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.indexer.wq_b.",
    "self_attention.indexer.wk.",
    "self_attention.indexer.weights_proj.",
    "self_attention.indexer.k_norm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.linear_fc1.",
    "mlp.experts.linear_fc2.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.shared_experts.",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
)
_TENSORS = ("weight", "bias", "layer_norm_weight", "dt_bias", "A_log", "gate_weight", "softmax_offset")
IN_A_LAYER = re.compile(
    r"(\d+:(?:decoder\.layers\.\d+\.|mtp\.layers\.\d+\.mtp_model_layer\.))(.*\.)([A-Za-z_]+)(\d*)"
)
_PREDICTION = re.compile(r"\d+:mtp\.layers\.(\d+)\.([a-z_]+)\..*")
_IN_PREDICTION = ("enorm", "hnorm", "eh_proj", "mtp_model_layer", "final_layernorm")
_PARTS = ("embedding.", "decoder.", "mtp.", "")  # of a model, by the beginnings of names

CORE_ATTENTION = ("core_attn",)  # Megatron's recompute_modules, where none are given


@dataclass(frozen=True)
class ModelUse:
    """A model and how it is run.

    Attributes:
        tokens: of a micro-batch of a training step, over its context parallel ranks. evaluated: of one without gradients.
        itemsize: bytes of a parameter.
        lora: its adapters; of rank 0: none. adapted: `adapted_weights` of these.
        base_block: rows and columns of a block of projections in float8; None: they are not.
        fsdp: what data parallel ranks share by Megatron-FSDP (`megarl.megatron.fsdp`); None: without it.
        distributed: `use_distributed_optimizer`. overlap: `overlap_grad_reduce`, which makes buckets.
        on_host: whether optimizer states are on the host (`optimizer_cpu_offload`).
        muon: the settings of Muon, which updates matrices; None: AdamW does.
        recompute: None, "selective" or "full". recompute_modules: of "selective".
        fused: whether Transformer Engine's kernels are there.
        float8: whether linear layers compute in float8; bf16_ends: how many of the first and of the last layers do not.
        chunk_tokens: tokens whose logits exist at one time; None: as `head_chunk_tokens` says.
        longest: tokens of the longest text; 0: no more than the keys that an indexer chooses.
        compared: bytes for each logit of a chunk while the divergence from another head is computed (`divergence_bytes`); 0: none is.
        mtp: whether it has its multi-token prediction layers.
        indexers: whether indexers are trained.
    """

    config: ModelConfig
    layout: ParallelLayout
    tokens: int
    evaluated: int
    head: str = "lm"
    trainable: bool = True
    itemsize: int = 2
    lora: LoraConfig = field(default_factory=LoraConfig)
    adapted: Shapes | None = None
    base_block: int | None = None
    fsdp: str | None = None
    distributed: bool = True
    overlap: bool = False
    on_host: bool = False
    muon: MuonConfig | None = None
    recompute: str | None = None
    recompute_modules: tuple[str, ...] = CORE_ATTENTION
    chunk_tokens: int | None = None
    fused: bool = True
    float8: bool = False
    bf16_ends: tuple[int, int] = (0, 0)
    mtp: bool = False
    indexers: bool = False
    compared: int = 0
    longest: int = 0

    @property
    def chooses(self) -> bool:
        """Whether queries attend to keys that an indexer chooses (megarl/megatron/sparse)."""
        return self.config.indexer is not None and self.longest > self.config.indexer.topk

    @property
    def teaches(self) -> bool:
        """Whether indexers learn in texts of the longest one's length (megarl/megatron/sparse/learning.py)."""
        return self.indexers and self.chooses

    def computes_in_float8(self, layer: int) -> bool:
        """Whether the layer of this number in the model computes in float8."""
        first, last = self.bf16_ends
        return self.float8 and first <= layer < self.config.num_layers - last

    def recomputes(self, module: str) -> bool:
        """Whether a part of each layer, one of `recompute_modules`, is computed again by itself."""
        return self.recompute == "selective" and module in self.recompute_modules


class LocalTensor(NamedTuple):
    """A tensor of a rank; a named tuple, since a search for layouts makes a million of them.

    Attributes:
        name: "<chunk>:<parameter>".
        expert: whether its replicas are an expert's, on other ranks than a dense weight's.
        trained: whether it has a gradient and optimizer states.
        projection: whether it is the weight of a linear layer, which a frozen model may hold in float8.
        shared: whether it is an embedding that another stage has, too.
        float32: whether it is in float32 in a model of another type, too.
    """

    name: str
    shape: tuple[int, ...]
    expert: bool
    trained: bool
    projection: bool = False
    shared: bool = False
    float32: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def chunk(self) -> int:
        return int(self.name.split(":", 1)[0])

    @property
    def matrix(self) -> Matrix | None:
        """The tensor as costs of Muon take it; None: Muon does not update it."""
        return (self.name, self.shape, self.expert) if is_muons(self.name, self.shape) else None


def in_layer(name: str) -> str:
    """The layer ("0:decoder.layers.1.") of a module or tensor in one."""
    return ".".join(name.split(".", 3)[:3]) + "."


@dataclass(frozen=True)
class StageTensors:
    """The tensors of a rank of a pipeline stage.

    Attributes:
        weights, adapters: the model's own parameters, and its adapters'.
        slots: the layers that have adapters, each with how tensor parallel ranks have cut its weight: by ROWS, by COLUMNS,
            or None, not at all.
        once: results of passes over these tensors.
    """

    weights: tuple[LocalTensor, ...]
    adapters: tuple[LocalTensor, ...]
    slots: tuple[tuple[AdapterSlot, str | None], ...] = ()
    once: Once = field(default_factory=Once, compare=False, repr=False)

    @cached_property
    def trained(self) -> tuple[LocalTensor, ...]:
        return tuple(tensor for tensor in (*self.weights, *self.adapters) if tensor.trained)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the model's own parameters."""
        return frozenset(tensor.name for tensor in self.weights)

    @cached_property
    def rows(self) -> dict[str, int]:
        """Rows of the model's own parameters, by name."""
        return {tensor.name: tensor.shape[0] for tensor in self.weights}

    @cached_property
    def slots_by_layer(self) -> dict[str, list[tuple[AdapterSlot, str | None]]]:
        """The slots by `in_layer`."""
        found: dict[str, list[tuple[AdapterSlot, str | None]]] = defaultdict(list)
        for slot, cut in self.slots:
            found[in_layer(slot.module)].append((slot, cut))
        return found

    @cached_property
    def linear_elements(self) -> int:
        """Elements of the largest linear layer: of all its projections, and of all its experts' where it has some."""
        sizes: dict[str, int] = defaultdict(int)
        for tensor in self.weights:
            if tensor.projection:
                sizes[tensor.name.rsplit(".", 1)[0]] += tensor.numel
        return max(sizes.values(), default=0)

    @cached_property
    def adapted_rows(self) -> dict[str, set[int]]:
        """Of each layer with adapters, how many rows its projections have."""
        found: dict[str, set[int]] = {slot.module: set() for slot, _ in self.slots}
        for tensor in self.weights:
            module = tensor.name.rpartition(".")[0]
            if tensor.projection and module in found:
                found[module].add(tensor.shape[0])
        return found

    @cached_property
    def learning(self) -> frozenset[str]:
        """Modules ("0:decoder.layers.1.mlp.linear_fc1") whose weight is trained or has adapters."""
        trained = {tensor.name.rsplit(".", 1)[0] for tensor in self.weights if tensor.trained}
        return frozenset(trained | {slot.module for slot, _ in self.slots})


def stage_tensors(use: ModelUse, stage: int) -> StageTensors:
    """The tensors of the first rank of a pipeline stage."""
    config, layout, lora = use.config, use.layout, use.lora
    place = MegatronPlace(tp=layout.tp, ep=layout.ep, etp=layout.etp)
    layers = layers_of(layout, config.num_layers, stage)

    def pieces_of(chunks: list[list[int]], ends: bool = True) -> list[Piece]:
        return megatron_pieces(
            config,
            place,
            layers=chunks,
            first_stage=ends and stage == 0,
            last_stage=ends and stage == layout.pp - 1,
            head=use.head,
            mtp=ends and use.mtp,
        )

    # Layers of a kind differ in their numbers alone, and a stage has many.
    of_layer = once_a_kind(
        config, lambda layer: _as_registered(_parameters(use, pieces_of([[layer]], ends=False)))
    )
    around = _as_registered(_parameters(use, pieces_of([[] for _ in layers])))
    weights: list[LocalTensor] = []
    for chunk, numbers in enumerate(layers):
        own = [tensor for tensor in around if tensor.chunk == chunk]
        embeds = [tensor.name.startswith(f"{chunk}:embedding.") for tensor in own].count(True)
        weights += own[:embeds]
        for index, layer in enumerate(numbers):
            weights += _numbered(of_layer(layer), f"{chunk}:decoder.layers.{index}.")
        weights += own[embeds:]
    # With adapters the weights above are frozen, and the layers' slots decide how adapters are cut.
    if not lora.rank:
        return StageTensors(tuple(weights), ())
    adapted, pieces = use.adapted, pieces_of(layers)
    assert adapted is not None
    local = _local_shapes(adapter_pieces(pieces, adapted, lora))
    adapters = [
        LocalTensor(name, shape, _as_expert(name, layout), use.trainable)
        for name, (_, shape) in local.items()
    ]
    slots = [
        (slot, sharded_dimension(slot, adapted[slot.tensors[0]])) for slot in adapter_slots(pieces, adapted)
    ]
    return StageTensors(tuple(weights), tuple(adapters), tuple(slots))


def _parameters(use: ModelUse, pieces: Iterable[Piece]) -> list[LocalTensor]:
    """The parameters that pieces of a rank lie in."""
    config, layout = use.config, use.layout
    # The weight table has the real rows of the vocabulary; the parameter has its padding, too.
    vocabulary = padded_vocab_size(config, layout.tp) // layout.tp
    shared: tuple[str, ...] = ()
    if layout.pp > 1 and use.head == "lm":
        shared = _VOCABULARY if config.tie_word_embeddings else _VOCABULARY[: int(use.mtp)]
    return [
        LocalTensor(
            name,
            (vocabulary, *shape[1:]) if name.endswith(_VOCABULARY) else shape,
            expert=_as_expert(name, layout),
            trained=use.trainable and (not use.lora.rank or name.endswith("value_head.weight")),
            projection=is_quantised(parts[0].tensor),
            shared=name.endswith(shared),
            float32=use.itemsize < 4 and keeps_float32(parts[0].tensor),
        )
        for name, (parts, shape) in _local_shapes(pieces).items()
        if not _is_buffer(name, use)
    ]


def _numbered(tensors: list[LocalTensor], layer: str) -> list[LocalTensor]:
    """A layer's tensors, under the name of another one of its kind ("0:decoder.layers.7.")."""
    before = len("0:decoder.layers.0.")
    return [LocalTensor(layer + name[before:], *rest) for name, *rest in tensors]


def _as_registered(weights: list[LocalTensor]) -> list[LocalTensor]:
    """The tensors of each part and layer in Megatron's order; layers, and tensors in no layer, stay where they are in a part."""
    places: dict[str, int] = {}

    def key(tensor: LocalTensor) -> tuple[int, ...]:
        found, predicts = IN_A_LAYER.fullmatch(tensor.name), _PREDICTION.fullmatch(tensor.name)
        name = tensor.name.partition(":")[2]
        part = next(number for number, begin in enumerate(_PARTS) if name.startswith(begin))
        place = places.setdefault(tensor.name if found is None else found[1], len(places))
        if predicts is None:
            around = (tensor.chunk, part, 0, 0, place)
        else:
            around = (tensor.chunk, part, int(predicts[1]), _IN_PREDICTION.index(predicts[2]), place)
        if found is None:
            return around
        return *around, _MODULES.index(found[2]), int(found[4] or 0), _TENSORS.index(found[3])

    return sorted(weights, key=key)


def _is_buffer(name: str, use: ModelUse) -> bool:
    return bool(BUFFERS.search(name)) and not (use.indexers and INDEXER_LOCAL in name)


def buffer_bytes(use: ModelUse, stage: int) -> int:
    """Bytes of the weights that are no parameters: biases of routers in float32, and indexers that are not trained."""
    config = use.config
    layers = [layer for chunk in layers_of(use.layout, config.num_layers, stage) for layer in chunk]
    if use.mtp and stage == use.layout.pp - 1:
        layers += range(config.num_layers, config.num_layers + config.num_mtp_layers)
    routed = sum(is_mixture(config, layer) for layer in layers)
    biases = 4 * config.moe.num_experts * routed if config.moe is not None and config.moe.expert_bias else 0
    if use.indexers:
        return biases
    return biases + sum(
        prod(weight.shape) * (4 if keeps_float32(weight.name) else use.itemsize)
        for layer in layers
        if has_indexer(config, layer)
        for weight in attention_weights(config, layer)
        if weight.name.startswith(INDEXER)
    )


def weight_bytes(tensors: Iterable[LocalTensor], itemsize: int, block: int | None = None) -> int:
    """Bytes of tensors in their own types, or in float8 where they are projections and the size of a `block` is given."""
    total = 0
    for tensor in tensors:
        if block is not None and tensor.projection:
            rows, columns = tensor.shape
            total += tensor.numel + 4 * -(-rows // block) * -(-columns // block)
        else:
            total += tensor.numel * (4 if tensor.float32 else itemsize)
    return total


def _as_expert(name: str, layout: ParallelLayout) -> bool:
    """Whether Megatron marks a tensor as an expert's: one whose replicas coincide with a dense weight's counts as dense."""
    return _EXPERTS in name and not (layout.ep == 1 and layout.etp == layout.tp)


def _local_shapes(pieces: Iterable[Piece]) -> dict[str, tuple[list[Piece], tuple[int, ...]]]:
    """Local name -> its pieces and the shape that holds them all."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.local, []).append(piece)
    return {
        name: (parts, tuple(map(max, zip(*(_ends(part) for part in parts), strict=True))))
        for name, parts in found.items()
    }


def _ends(piece: Piece) -> tuple[int, ...]:
    start, size = piece.local_box
    return tuple(first + count for first, count in zip(start, size, strict=True))


# Gradient buffers and optimizer states of a rank, as Megatron-core 0.19.2 lays them out. Trained parameters of a model chunk lie end to
# end in buffers, one of dense weights and one of experts; with the distributed optimizer each starts at a multiple of 64 elements,
# and a bucket's end is padded to a multiple of the ranks that share it (and of 128), each of which has an equal part of its states.
# Frozen parameters are in no buffer and have no states. States on the host pass through slots on the device (`megarl.megatron.host_adam`).

ALIGNMENT, PADDING = 64, 128  # elements: of a parameter's start, of a bucket's end
GRADIENT = 4  # bytes: gradients are summed in float32
MOMENTS = 8  # bytes: Adam's two, in float32
SLOTS, BUCKET = 3, 8 << 20  # of states on the host: buckets on the device, elements of each


@dataclass(frozen=True)
class TrainingBytes:
    """Gradients and optimizer states of a rank, in bytes.

    Attributes:
        weights: frozen and trained ones, without adapters.
        adapters: trained ones, with the padding of their buffers.
        gradients: of trained parameters alone.
        optimizer: float32 copies of trained parameters that are not float32, and Adam's moments; or the slots for these.
        host: the part of these on the host (without alignment).
    """

    weights: int
    adapters: int
    gradients: int
    optimizer: int
    host: int = 0


def training_bytes(
    use: ModelUse, tensors: StageTensors, stage: int, replica: tuple[int, int] = (0, 0)
) -> TrainingBytes:
    """Bytes of a rank of the stage.

    Args:
        replica: the rank's number among the ranks that share a dense weight's states (over data and context parallel ranks),
            and among the ranks that share an expert's.
    """
    itemsize, trained = use.itemsize, tensors.trained
    if use.fsdp is not None:
        return _shared_bytes(use, tensors)
    frozen = [tensor for tensor in tensors.weights if not tensor.trained]
    muons = [tensor for tensor in trained if use.muon is not None and tensor.matrix is not None]
    elements = states = sum(tensor.numel for tensor in trained)
    # Elements of these that are in float32 anyway.
    wide = own_copies = sum(tensor.numel for tensor in trained if tensor.float32)
    orthogonalised = sum(tensor.numel for tensor in muons)  # of these elements there is one state
    if use.distributed:  # of the stages, the first alone has buckets
        buffers = list(_buffers(trained, use.layout, use.overlap and stage == 0, use.muon is not None))
        elements = sum(buffer.numel for buffer in buffers)
        owned = [buffer.elements_of(replica[int(buffer.expert)]) for buffer in buffers]
        states = sum(owned)
        wide = sum(buffer.numel for buffer in buffers if buffer.float32)
        own_copies = sum(own for own, buffer in zip(owned, buffers, strict=True) if buffer.float32)
        orthogonalised = sum(own for own, buffer in zip(owned, buffers, strict=True) if buffer.muon)
    own = buffered = itemsize * elements + (4 - itemsize) * wide  # trained parameters, with their padding
    copied = (_state(itemsize) - MOMENTS) * own_copies  # copies that float32 parameters do not need
    if tensors.adapters:
        own = weight_bytes([tensor for tensor in tensors.weights if tensor.trained], itemsize)  # a value head
    return TrainingBytes(
        weights=weight_bytes(frozen, itemsize, use.base_block) + own,
        adapters=buffered - own,
        gradients=GRADIENT * elements,
        optimizer=_state(itemsize) * (SLOTS * BUCKET * (states > 0) if use.on_host else states)
        - (0 if use.on_host else copied)
        - (MOMENTS - MOMENTUM) * orthogonalised,
        host=_state(itemsize) * states - copied if use.on_host else 0,
    )


FULL = "optim_grads_params"
LARGEST_BUCKET = 40_000_000  # elements at which a bucket of parameters that are in no unit ends


@dataclass(frozen=True)
class SharedBucket:
    """Parameters that Megatron-FSDP keeps end to end: of a layer, or of none (`layer` is empty).

    numel: elements with padding. ranks: that share them.
    """

    layer: str
    tensors: tuple[LocalTensor, ...]
    numel: int
    ranks: int


def shared_buckets(use: ModelUse, tensors: StageTensors) -> list[SharedBucket]:
    """The buckets of a model that Megatron-FSDP wraps (param_and_grad_buffer.py of megatron-core 0.19.2).

    With shared weights a bucket for each layer, and one for the tensors in no layer; else all parameters in their order, cut where a
    bucket is large. Experts have their own. Within a bucket a tensor of several rows begins at a multiple of the least common multiple of all
    rows' lengths, and small ones fill the gaps; the end is padded to a multiple of that and of the ranks.
    """
    grouped: dict[tuple[str, bool], list[LocalTensor]] = {}
    for tensor in tensors.weights:
        inside = IN_A_LAYER.fullmatch(tensor.name) if use.fsdp == FULL else None
        key = (inside[1] if inside else "", _EXPERTS in tensor.name)
        grouped.setdefault(key, []).append(tensor)
    found = []
    for (layer, expert), own in grouped.items():
        ranks = use.layout.expert_dp if expert else use.layout.dp * use.layout.cp
        parts = [own] if use.fsdp == FULL else _cut(own)
        found += [SharedBucket(layer, tuple(part), _bucket_numel(part, ranks), ranks) for part in parts]
    return found


def _cut(tensors: Sequence[LocalTensor]) -> list[list[LocalTensor]]:
    parts: list[list[LocalTensor]] = [[]]
    for tensor in tensors:
        if sum(other.numel for other in parts[-1]) >= LARGEST_BUCKET:
            parts.append([])
        parts[-1].append(tensor)
    return parts


def _bucket_numel(tensors: Sequence[LocalTensor], ranks: int) -> int:
    unit = lcm(*(prod(tensor.shape[1:]) for tensor in tensors))
    large = sum(-(-tensor.numel // unit) for tensor in tensors if tensor.numel >= unit) * unit
    gaps = large - sum(tensor.numel for tensor in tensors if tensor.numel >= unit)
    small = sum(tensor.numel for tensor in tensors if tensor.numel < unit)
    return -(-(large + max(0, small - gaps)) // (unit * ranks)) * unit * ranks


def _shared_bytes(use: ModelUse, tensors: StageTensors) -> TrainingBytes:
    """Bytes of a rank with Megatron-FSDP; a part of a bucket counts with its padding."""
    buckets = shared_buckets(use, tensors)
    whole = sum(bucket.numel for bucket in buckets)
    share = sum(bucket.numel // bucket.ranks for bucket in buckets)
    trained = use.trainable
    return TrainingBytes(
        weights=use.itemsize * (share if use.fsdp == FULL else whole),
        adapters=0,
        gradients=GRADIENT * share * trained,
        optimizer=_state(use.itemsize) * share * trained,
    )


def _state(itemsize: int) -> int:
    """Bytes of an element's optimizer states: parameters in float32 are their own copy."""
    return MOMENTS + (4 if itemsize < 4 else 0)


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a chunk: its buckets, as (first element, end with padding), and where its parameters lie in it."""

    expert: bool
    ranks: int
    buckets: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]
    muon: bool = False
    float32: bool = False

    @property
    def numel(self) -> int:
        return self.buckets[-1][1]

    def elements_of(self, rank: int) -> int:
        """Elements of parameters in the part of `rank` of each bucket."""
        spans = sorted(self.spans)
        starts = [start for start, _ in spans]
        sums = [0, *accumulate(stop - start for start, stop in spans)]

        def before(place: int) -> int:
            number = bisect_right(starts, place)
            return sums[number] - max(0, spans[number - 1][1] - place) if number else 0

        total = 0
        for first, end in self.buckets:
            size = (end - first) // self.ranks
            total += before(first + (rank + 1) * size) - before(first + rank * size)
        return total


def _buffers(
    trained: Sequence[LocalTensor], layout: ParallelLayout, buckets: bool, muon: bool
) -> Iterator[_Buffer]:
    groups: dict[tuple[int, bool], list[LocalTensor]] = {}
    for tensor in trained:
        groups.setdefault((tensor.chunk, tensor.expert), []).append(tensor)
    for (chunk, expert), tensors in sorted(groups.items()):
        ranks = layout.expert_dp if expert else layout.dp * layout.cp
        limit = max(40_000_000, 1_000_000 * layout.dp) if buckets and chunk == 0 else None
        matrices = [tensor for tensor in tensors if muon and tensor.matrix is not None]
        if matrices:
            places = packed([tensor.numel for tensor in matrices], ranks, limit)
            yield _Buffer(expert, ranks, *map(tuple, places), muon=True)
        others = [tensor for tensor in tensors if not muon or tensor.matrix is None]
        for float32 in (False, True):  # a buffer has one type
            of_type = [tensor for tensor in others if tensor.float32 == float32]
            if of_type:
                yield _lay_out(of_type, ranks, limit)


def _lay_out(tensors: Sequence[LocalTensor], ranks: int, limit: int | None) -> _Buffer:
    """A buffer, filled from the last parameter to the first; a bucket ends where it has `limit` elements, and around an embedding that
    another stage shares."""
    buckets: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    start, first = 0, 0  # of the next parameter, of the bucket

    def close(end: int) -> int:
        unit = lcm(ranks, PADDING)
        buckets.append((first, -(-end // unit) * unit))
        return buckets[-1][1]

    for tensor in reversed(tensors):
        start = -(-start // ALIGNMENT) * ALIGNMENT
        if tensor.shared and start > first:
            start = first = close(start)
        spans.append((start, start + tensor.numel))
        start += tensor.numel
        if tensor.shared or (limit is not None and start - first >= limit):
            start = first = close(start)
    if start > first:
        close(start)
    kind = tensors[0]
    return _Buffer(kind.expert, ranks, tuple(buckets), tuple(spans), float32=kind.float32)
