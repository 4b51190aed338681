"""One Megatron model on its fullest ranks, stage by stage: its bytes, and the working memory of its passes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from megarl.config.schema.models import LoraConfig
from megarl.costs.activations import ActivationSettings, stage_bytes
from megarl.costs.tensors import StageTensors, TrainingBytes, float32_buffers, stage_tensors, training_bytes
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.models import ModelConfig, padded_vocab_size
from megarl.models.float8 import check_base_block
from megarl.models.shards import Shapes

EXPERTS = ".mlp.experts."  # in the names of their weights
MICRO_BATCH = 64  # bytes of a token in it: its id, target and position, numbers of its loss


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
        working: further memory that a pass needs at a time; evaluating: the memory of a forward pass without gradients.
        merged: a layer's weight with its adapters, and the product that is added to it at a time, while weights are sent; the largest layer's.
    """

    held: TrainingBytes
    kept: int
    working: int
    evaluating: int
    merged: int


def model_bytes(
    use: ModelUse, tables: dict[object, StageTensors] | None = None, stages: Iterable[int] | None = None
) -> list[StageBytes]:
    """The bytes of each pipeline stage.

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
        how = ActivationSettings(
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
        working=_working(use, tensors, use.tokens // layout.cp, last) if use.trainable else 0,
        evaluating=_evaluating(use, tensors, evaluated, stage == 0, last),
        merged=_merging(use, tensors) if use.lora.rank else 0,
    )


def _working(use: ModelUse, tensors: StageTensors, tokens: int, last: bool) -> int:
    """Working memory of a training step, an upper estimate: the largest linear layer's inputs and outputs with their gradients, the tensors of experts'
    forward pass that are not kept, or a chunk of logits and the hidden states that it is made from; and the weights of
    the largest layer that is in float8."""
    config, item = use.config, use.itemsize
    routed = _routed(use, tokens)
    widest = 0
    for tensor in tensors.weights:
        if tensor.projection:
            count = routed if EXPERTS in tensor.name else tokens
            rows, columns = tensor.shape
            widest = max(widest, count * (rows + max(config.hidden_size, columns)) * item)
    head = _head(use, tokens) + tokens * config.hidden_size * item if last and use.head == "lm" else 0
    if head and not use.lora.rank:  # the output weight's own gradient
        head += _vocabulary_share(use) * config.hidden_size * (4 + item)
    experts = 0
    if routed and any(EXPERTS in tensor.name for tensor in tensors.weights):
        # Permuted and exchanged tokens and the outputs before and after they are put in order; sorted ones are kept.
        experts = (4 * routed + (5 + _around_experts(use)) * _own(use, tokens)) * config.hidden_size * item
    return max(2 * widest, experts, head) + _exact(use, tensors) + _dummy_gradients(use, tensors)


def _dummy_gradients(use: ModelUse, tensors: StageTensors) -> int:
    """Tensors that Transformer Engine keeps for each shape of a trained weight (`megarl.megatron.layer_spec.drop_dummy_gradients`)."""
    shapes = {tensor.shape for tensor in tensors.weights if tensor.projection and tensor.trained}
    return sum(prod(shape) for shape in shapes) * use.itemsize if use.fused else 0


def _evaluating(use: ModelUse, tensors: StageTensors, tokens: int, first: bool, last: bool) -> int:
    """Working memory of a forward pass without gradients: the most that attention, a dense or a routed part of a layer, or the head have at a time.

    A tensor lives as long as a variable of the code that made it, so that these are the tensors of one function and of its
    callers: as shadow runs of Megatron-core 0.19.2 with Transformer Engine have them (tests/shadow).
    """
    config, item = use.config, use.itemsize
    hidden = _own(use, tokens) * config.hidden_size * item
    names = [tensor.name for tensor in tensors.weights]
    parts = (
        [_evaluated_attention(use, tokens) + 2 * hidden]
        if any("self_attention." in name for name in names)
        else []
    )
    if any(EXPERTS in name for name in names):
        moe = config.moe
        assert moe is not None
        # Permuted, exchanged and sorted tokens and the outputs; of both linear layers the first one's outputs and their product.
        routed = 4 * config.hidden_size + 3 * moe.ffn_hidden_size // use.layout.etp
        parts.append(_routed(use, tokens) * routed * item + (5 + _around_experts(use)) * hidden)
    if any(".mlp.linear_fc1" in name for name in names):
        # Gate and up, and their product.
        dense = 3 * config.ffn_hidden_size // use.layout.tp
        parts.append(tokens * dense * item + (4 if first else 3) * hidden)
    parts += [size + 3 * hidden for size in _evaluated_adapters(use, tensors, tokens)]
    if last and use.head == "lm":
        parts.append(_head(use, tokens) + 2 * hidden)  # and the last norm's input and output
    return max(parts, default=0) + tokens * MICRO_BATCH + _exact(use, tensors)


def _around_experts(use: ModelUse) -> int:
    """Hidden states that exist while routed experts compute, in addition to their layer's own: the output of shared experts; in a
    pipeline the input of the stage, and two that are sent or received."""
    assert use.config.moe is not None
    return (use.config.moe.shared_ffn_hidden_size > 0) + (3 if use.layout.pp > 1 else 0)


def _evaluated_attention(use: ModelUse, tokens: int) -> int:
    """Projected queries, keys and values, the same after their rotation, attention's output; and the gathered input."""
    config, tp, mla = use.config, use.layout.tp, use.config.mla
    heads = config.num_attention_heads // tp
    if mla is None:
        queries, keys = heads * config.head_dim, config.num_query_groups // tp * config.head_dim
        return tokens * use.itemsize * (3 * queries + 3 * keys + config.hidden_size)
    dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    # Values are made as wide as queries for packed sequences, and so is the output.
    each = dim + (mla.qk_nope_head_dim + mla.v_head_dim) + 4 * dim
    latent = (mla.q_lora_rank or config.hidden_size) + mla.kv_lora_rank + mla.qk_rope_head_dim
    return tokens * use.itemsize * (heads * each + latent)


def _evaluated_adapters(use: ModelUse, tensors: StageTensors, tokens: int) -> Iterator[int]:
    """For each layer with adapters the bytes of its output, the adapters' term for each of its tensors, and these put together; and the input."""
    adapted = {slot.module for slot, _ in tensors.slots}
    for tensor in tensors.weights:
        if tensor.projection and tensor.name.rpartition(".")[0] in adapted:
            count = _routed(use, tokens) if EXPERTS in tensor.name else tokens
            yield count * (3 * tensor.shape[0] + tensor.shape[1]) * use.itemsize


def _head(use: ModelUse, tokens: int) -> int:
    """A chunk of logits and their exponentials in float32, once more in the model's type; and the hidden states."""
    chunk = min(use.chunk_tokens, tokens) * _vocabulary_share(use) * (8 + use.itemsize)
    return chunk + tokens * use.config.hidden_size * use.itemsize


def _vocabulary_share(use: ModelUse) -> int:
    return padded_vocab_size(use.config, use.layout.tp) // use.layout.tp


def _routed(use: ModelUse, tokens: int) -> int:
    """Tokens that the experts of a rank have, if all are given equally many."""
    moe = use.config.moe
    return 0 if moe is None else _own(use, tokens) * moe.top_k * use.layout.etp


def _own(use: ModelUse, tokens: int) -> int:
    """Tokens between the tensor parallel parts."""
    return tokens // use.layout.tp if use.layout.sp else tokens


def _exact(use: ModelUse, tensors: StageTensors) -> int:
    """The largest layer that is made of a base in float8."""
    return _largest_layer(tensors) * use.itemsize if use.base_block is not None else 0


def _merging(use: ModelUse, tensors: StageTensors) -> int:
    """A copy of a layer's weight and the product of the adapters of one tensor in it (of one expert's, where it has some); of a base
    in float8 also the source of the copy."""
    adapted, exact = {slot.module for slot, _ in tensors.slots}, int(use.base_block is not None)
    copies = {
        tensor.numel * (exact + (2 if tensor.name.rpartition(".")[0] in adapted else 0))
        for tensor in tensors.weights
        if tensor.projection
    }
    return max(copies, default=0) * use.itemsize


def _largest_layer(tensors: StageTensors) -> int:
    """Elements of the projections of one linear layer, of all its experts where it has some."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors.weights:
        if tensor.projection:
            sizes[tensor.name.rsplit(".", 1)[0]] += tensor.numel
    return max(sizes.values(), default=0)
