"""One Megatron model on its fullest ranks, stage by stage: its bytes, and the working memory of its passes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from megarl.costs.activations import RankPass, stage_bytes
from megarl.costs.tensors import (
    ModelUse,
    StageTensors,
    TrainingBytes,
    float32_buffers,
    gathered_bytes,
    stage_tensors,
    training_bytes,
    unreduced_bytes,
    whole_bytes,
)
from megarl.layout.grid import layers_of
from megarl.models import padded_vocab_size
from megarl.models.float8 import check_base_block

EXPERTS = ".mlp.experts."  # in the names of their weights
MICRO_BATCH = 64  # bytes of a token in it: its id, target and position, numbers of its loss


@dataclass(frozen=True)
class StageBytes:
    """A rank of a stage, in bytes.

    Attributes:
        held: weights, adapters, gradients, optimizer.
        kept: activations that wait for their backward pass.
        working: further memory that a pass needs at a time; evaluating: the memory of a forward pass without gradients.
        merged: a layer's weight with its adapters, and the product that is added to it at a time, while weights are sent; the largest layer's.
        gathered: weights that data parallel ranks share, while they are sent: all of them.
    """

    held: TrainingBytes
    kept: int
    working: int
    evaluating: int
    merged: int
    gathered: int = 0


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
        tables[key] = stage_tensors(use, stage)
    return tables[key]


def _stage(use: ModelUse, stage: int, tensors: StageTensors) -> StageBytes:
    held = training_bytes(use, tensors, stage)
    first, last = stage == 0, stage == use.layout.pp - 1
    trained = RankPass(use, tensors, use.tokens // use.layout.cp)
    evaluated = RankPass(use, tensors, use.evaluated // use.layout.cp)
    return StageBytes(
        replace(held, weights=held.weights + float32_buffers(use, stage)),
        kept=stage_bytes(trained, stage) if use.trainable else 0,
        working=_working(trained, last) if use.trainable else 0,
        evaluating=_evaluating(evaluated, first, last),
        merged=_merging(trained) if use.lora.rank else 0,
        gathered=whole_bytes(use, tensors),
    )


def _working(run: RankPass, last: bool) -> int:
    """Working memory of a training step, an upper estimate: the largest linear layer's inputs and outputs with their gradients, the tensors of experts'
    forward pass that are not kept, or a chunk of logits and the hidden states that it is made from; and the weights of
    the largest layer that is in float8."""
    config, item = run.use.config, run.use.itemsize
    routed = run.routed
    widest = 0
    for tensor in run.tensors.weights:
        if tensor.projection:
            count = routed if EXPERTS in tensor.name else run.tokens
            rows, columns = tensor.shape
            widest = max(widest, count * (rows + max(config.hidden_size, columns)) * item)
    head = _head(run) + run.tokens * config.hidden_size * item if last and run.use.head == "lm" else 0
    if head and not run.use.lora.rank:  # the output weight's own gradient
        head += _vocabulary_share(run) * config.hidden_size * (4 + item)
    experts = 0
    if routed and any(EXPERTS in tensor.name for tensor in run.tensors.weights):
        # Permuted and exchanged tokens and the outputs before and after they are put in order; sorted ones are kept.
        experts = (4 * routed + (5 + _around_experts(run)) * run.own) * config.hidden_size * item
    shared = gathered_bytes(run.use, run.tensors) + unreduced_bytes(run.use, run.tensors)
    return max(2 * widest, experts, head) + _exact(run) + _dummy_gradients(run) + shared


def _dummy_gradients(run: RankPass) -> int:
    """Tensors that Transformer Engine keeps for each shape of a trained weight (`megarl.megatron.layer_spec.drop_dummy_gradients`)."""
    shapes = {tensor.shape for tensor in run.tensors.weights if tensor.projection and tensor.trained}
    return sum(prod(shape) for shape in shapes) * run.use.itemsize if run.use.fused else 0


def _evaluating(run: RankPass, first: bool, last: bool) -> int:
    """Working memory of a forward pass without gradients: the most that attention, a dense or a routed part of a layer, or the head have at a time.

    A tensor lives as long as a variable of the code that made it, so that these are the tensors of one function and of its
    callers: as shadow runs of Megatron-core 0.19.2 with Transformer Engine have them (tests/shadow).
    """
    config, item = run.use.config, run.use.itemsize
    hidden, names = run.hidden, [tensor.name for tensor in run.tensors.weights]
    parts = []
    if any("self_attention." in name for name in names):
        parts.append(_evaluated_attention(run) + 2 * hidden)
    if any(EXPERTS in name for name in names):
        moe = config.moe
        assert moe is not None
        # Permuted, exchanged and sorted tokens and the outputs; of both linear layers the first one's outputs and their product.
        routed = 4 * config.hidden_size + 3 * moe.ffn_hidden_size // run.use.layout.etp
        parts.append(run.routed * routed * item + (5 + _around_experts(run)) * hidden)
    if any(".mlp.linear_fc1" in name for name in names):
        # Gate and up, and their product.
        dense = 3 * config.ffn_hidden_size // run.use.layout.tp
        parts.append(run.tokens * dense * item + (4 if first else 3) * hidden)
    parts += [size + 3 * hidden for size in _evaluated_adapters(run)]
    if last and run.use.head == "lm":
        parts.append(_head(run) + 2 * hidden)  # and the last norm's input and output
    shared = gathered_bytes(run.use, run.tensors)
    return max(parts, default=0) + run.tokens * MICRO_BATCH + _exact(run) + shared


def _around_experts(run: RankPass) -> int:
    """Hidden states that exist while routed experts compute, in addition to their layer's own: the output of shared experts; in a
    pipeline the input of the stage, and two that are sent or received."""
    assert run.use.config.moe is not None
    return (run.use.config.moe.shared_ffn_hidden_size > 0) + (3 if run.use.layout.pp > 1 else 0)


def _evaluated_attention(run: RankPass) -> int:
    """Projected queries, keys and values, the same after their rotation, attention's output; and the gathered input."""
    config, tp, mla = run.use.config, run.use.layout.tp, run.use.config.mla
    heads = config.num_attention_heads // tp
    if mla is None:
        queries, keys = heads * config.head_dim, config.num_query_groups // tp * config.head_dim
        return run.tokens * run.use.itemsize * (3 * queries + 3 * keys + config.hidden_size)
    dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    # Values are made as wide as queries for packed sequences, and so is the output.
    each = dim + (mla.qk_nope_head_dim + mla.v_head_dim) + 4 * dim
    latent = (mla.q_lora_rank or config.hidden_size) + mla.kv_lora_rank + mla.qk_rope_head_dim
    return run.tokens * run.use.itemsize * (heads * each + latent)


def _evaluated_adapters(run: RankPass) -> Iterator[int]:
    """For each layer with adapters the bytes of its output, the adapters' term for each of its tensors, and these put together; and the input."""
    adapted = {slot.module for slot, _ in run.tensors.slots}
    for tensor in run.tensors.weights:
        if tensor.projection and tensor.name.rpartition(".")[0] in adapted:
            count = run.routed if EXPERTS in tensor.name else run.tokens
            yield count * (3 * tensor.shape[0] + tensor.shape[1]) * run.use.itemsize


def _head(run: RankPass) -> int:
    """A chunk of logits and their exponentials in float32, once more in the model's type; and the hidden states."""
    chunk = min(run.use.chunk_tokens, run.tokens) * _vocabulary_share(run) * (8 + run.use.itemsize)
    return chunk + run.tokens * run.use.config.hidden_size * run.use.itemsize


def _vocabulary_share(run: RankPass) -> int:
    return padded_vocab_size(run.use.config, run.use.layout.tp) // run.use.layout.tp


def _exact(run: RankPass) -> int:
    """The largest layer that is made of a base in float8: the projections of one linear layer, of all its experts where it has some."""
    if run.use.base_block is None:
        return 0
    sizes: dict[str, int] = defaultdict(int)
    for tensor in run.tensors.weights:
        if tensor.projection:
            sizes[tensor.name.rsplit(".", 1)[0]] += tensor.numel
    return max(sizes.values(), default=0) * run.use.itemsize


def _merging(run: RankPass) -> int:
    """A copy of a layer's weight and the product of the adapters of one tensor in it (of one expert's, where it has some); of a base
    in float8 also the source of the copy."""
    adapted, exact = {slot.module for slot, _ in run.tensors.slots}, int(run.use.base_block is not None)
    copies = {
        tensor.numel * (exact + (2 if tensor.name.rpartition(".")[0] in adapted else 0))
        for tensor in run.tensors.weights
        if tensor.projection
    }
    return max(copies, default=0) * run.use.itemsize
