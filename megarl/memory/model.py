"""One Megatron model on its fullest ranks, stage by stage: what it holds, and what its passes take beside that."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megarl.config.lora_section import LoraConfig
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.memory.activations import Kept, stage_bytes
from megarl.memory.parameters import StageTensors, float32_buffers, stage_tensors
from megarl.memory.training import TrainingBytes, training_bytes
from megarl.models import ModelConfig, padded_vocab_size
from megarl.models.float8 import check_base_block
from megarl.models.shards import Shapes


@dataclass(frozen=True)
class ModelUse:
    """A model and how it is run.

    Attributes:
        tokens: of a micro-batch of a training step, over its context parallel ranks. evaluated: of one without gradients.
        itemsize: bytes of a parameter.
        lora: its adapters; of rank 0: none. adapted: `adapted_weights` of these.
        base_block: rows and columns of a block of projections in float8; None: they are not.
        on_host: whether optimizer states are there.
        chunk_tokens: whose logits exist at one time.
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
    distributed: bool = True
    overlap: bool = False
    on_host: bool = False
    recompute: str | None = None
    chunk_tokens: int = 1024
    fused: bool = True


@dataclass(frozen=True)
class StageBytes:
    """A rank of a stage, in bytes.

    Attributes:
        held: weights, adapters, gradients, optimizer.
        kept: activations that wait for their backward pass.
        working: what a pass needs at a time beside these; evaluating: what a forward pass without gradients needs.
        merged: the largest layer's weight with its adapters, which exists while weights are sent.
    """

    held: TrainingBytes
    kept: int
    working: int
    evaluating: int
    merged: int


def model_bytes(
    use: ModelUse, tables: dict[object, StageTensors] | None = None, stages: Iterable[int] | None = None
) -> list[StageBytes]:
    """By pipeline stage.

    Args:
        tables: gets the tensors of stages, for other layouts of the same model that have such a stage, too.
        stages: only these; None: all.

    Raises:
        ValueError: a layout that cuts the blocks of a base in float8.
    """
    if use.base_block is not None:
        check_base_block(use.config, use.layout, use.base_block)
    tables = {} if tables is None else tables
    return [
        _stage(use, stage, _tensors(use, stage, tables))
        for stage in (range(use.layout.pp) if stages is None else stages)
    ]


def _tensors(use: ModelUse, stage: int, tables: dict[object, StageTensors]) -> StageTensors:
    """Stages with the same kinds of layers, the same ends and the same cuts hold the same tensors."""
    layout, moe = use.layout, use.config.moe
    dense = () if moe is None else moe.dense_layers
    kinds = tuple(
        tuple(layer in dense for layer in chunk) for chunk in layers_of(layout, use.config.num_layers, stage)
    )
    place = (layout.tp, layout.ep, layout.etp, layout.pp > 1, stage == 0, stage == layout.pp - 1)
    key = (id(use.config), kinds, place, use.head, use.trainable, use.lora)
    if key not in tables:
        tables[key] = stage_tensors(
            use.config,
            layout,
            stage,
            head=use.head,
            trainable=use.trainable,
            lora=use.lora,
            adapted=use.adapted,
        )
    return tables[key]


def _stage(use: ModelUse, stage: int, tensors: StageTensors) -> StageBytes:
    layout, blocks = use.layout, use.base_block
    held = training_bytes(
        tensors,
        layout,
        itemsize=use.itemsize,
        distributed=use.distributed,
        overlap=use.overlap,
        on_host=use.on_host,
        first_stage=stage == 0,
        fp8_block=None if blocks is None else (blocks, blocks),
    )
    buffers = float32_buffers(use.config, layout, stage)
    held = replace(held, weights=held.weights + buffers)
    last = stage == layout.pp - 1
    kept = 0
    if use.trainable:
        how = Kept(
            use.config,
            layout,
            tensors,
            use.tokens // layout.cp,
            use.itemsize,
            use.lora,
            use.fused,
            use.recompute,
        )
        kept = stage_bytes(how, stage, use.head)
    evaluated = use.evaluated // layout.cp
    return StageBytes(
        held,
        kept,
        working=_working(use, tensors, use.tokens // layout.cp, last, trained=True) if use.trainable else 0,
        evaluating=_working(use, tensors, evaluated, last, trained=False),
        merged=_largest_layer(tensors) * use.itemsize if use.lora.rank else 0,
    )


def _working(use: ModelUse, tensors: StageTensors, tokens: int, last: bool, trained: bool) -> int:
    """An upper estimate: the largest linear layer's inputs and outputs (in a training step with their gradients), or a chunk of
    logits and the hidden states that it is made from; and the weights of the largest layer that is in float8."""
    layout, config, item = use.layout, use.config, use.itemsize
    routed = 0
    if config.moe is not None:
        own = tokens // layout.tp if layout.sp else tokens
        routed = own * config.moe.top_k * layout.etp
    widest = 0
    for tensor in tensors.weights:
        if tensor.projection:
            count = routed if ".mlp.experts." in tensor.name else tokens
            rows, columns = tensor.shape
            whole = max(config.hidden_size, columns)
            widest = max(widest, count * (rows + whole) * item)
    layer = widest * (2 if trained else 1)
    head = 0
    if last and use.head == "lm":
        share = padded_vocab_size(config, layout.tp) // layout.tp
        # Logits and their exponentials in float32, once more in the model's type.
        head = min(use.chunk_tokens, tokens) * share * (8 + item)
        head += tokens * config.hidden_size * item * (2 if trained else 1)
        if trained and not use.lora.rank:  # the output weight's own gradient
            head += share * config.hidden_size * (4 + item)
    exact = _largest_layer(tensors) * item if use.base_block is not None else 0
    return max(layer, head) + exact


def _largest_layer(tensors: StageTensors) -> int:
    """Elements of the projections of one linear layer, of all its experts where it has some."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors.weights:
        if tensor.projection:
            sizes[tensor.name.rsplit(".", 1)[0]] += tensor.numel
    return max(sizes.values(), default=0)
