"""One Megatron model on its fullest ranks, stage by stage: its bytes, and the working memory of its passes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from megarl.costs.activations import (
    CHUNK,
    FLOAT32,
    Layer,
    RankPass,
    again_bytes,
    attention_bytes,
    choice_bytes,
    complete,
    delta_net_inputs,
    delta_net_norm,
    delta_net_shares,
    head_bytes,
    is_prediction,
    joined_bytes,
    layer_bytes,
    mlp_bytes,
    router_bytes,
    stage_bytes,
    stage_layers,
    waiting_bytes,
)
from megarl.costs.float8 import float8_layers, quantised, weight_copies
from megarl.costs.muon import busiest, working
from megarl.costs.shared import EMBEDDING, HEAD, gathered_bytes, unreduced_bytes, whole_bytes
from megarl.costs.tensors import (
    ModelUse,
    StageTensors,
    TrainingBytes,
    buffer_bytes,
    stage_tensors,
    training_bytes,
)
from megarl.layout.grid import layers_of
from megarl.models import head_chunk_tokens, padded_vocab_size
from megarl.models.config import SCORE_BYTES
from megarl.models.float8 import check_base_block
from megarl.models.table import kind_of_layer
from megarl.util.once import Once

EXPERTS = ".mlp.experts."  # in the names of their weights
COMPARED_TOKENS = (
    1024  # of a chunk while two heads are compared (`megarl.megatron.heads.log_probs.CHUNK_TOKENS`)
)
HEAD_TOKEN = 36  # bytes of a token in the head: four statistics, three norms, two outputs
# Bytes of a token in a micro-batch and the next one: its id, target and position, numbers of its loss; and the results.
MICRO_BATCH = 136


@dataclass(frozen=True)
class StageBytes:
    """A rank of a stage, in bytes.

    Attributes:
        held: weights, adapters, gradients, optimizer.
        kept: activations that wait for their backward pass.
        working: further memory that a pass needs at a time; evaluating: the memory of a forward pass without gradients.
        merged: a layer's weight with its adapters, and the product that is added to it at a time, while weights are sent; the largest layer's.
            On GPUs kernels merge them where they are read, unless DoRA needs their norms.
        gathered: weights that data parallel ranks share, while they are sent: all of them.
    """

    held: TrainingBytes
    kept: int
    working: int
    evaluating: int
    merged: int
    gathered: int = 0


def model_bytes(
    use: ModelUse, once: Once | None = None, stages: Iterable[int] | None = None
) -> list[StageBytes]:
    """The bytes of each pipeline stage.

    Args:
        once: keeps the tensors of stages, for other layouts of the same model that have such a stage, too.
        stages: only these; None: all.

    Raises:
        ValueError: a layout that cuts the blocks of a base in float8.
    """
    if use.base_block is not None:
        check_base_block(use.config, use.layout, use.base_block)
    once = once or Once()
    return [
        _stage(use, stage, _tensors(use, stage, once))
        for stage in (range(use.layout.pp) if stages is None else stages)
    ]


def _tensors(use: ModelUse, stage: int, once: Once) -> StageTensors:
    """Stages with the same kinds of layers, the same ends and the same cuts hold the same tensors."""
    layout = use.layout
    kinds = tuple(
        tuple(kind_of_layer(use.config, layer) for layer in chunk)
        for chunk in layers_of(layout, use.config.num_layers, stage)
    )
    place = (layout.tp, layout.ep, layout.etp, layout.pp > 1, stage == 0, stage == layout.pp - 1)
    key = ("tensors", id(use.config), kinds, place, use.head, use.trainable, use.lora, use.mtp, use.indexers)
    return once(key, lambda: stage_tensors(use, stage))


def _stage(use: ModelUse, stage: int, tensors: StageTensors) -> StageBytes:
    held = training_bytes(use, tensors, stage)
    float8 = float8_layers(use, stage)
    trained = RankPass(use, tensors, use.tokens // use.layout.cp, float8)
    evaluated = RankPass(use, tensors, use.evaluated // use.layout.cp, float8)
    kept = stage_bytes(trained, stage) if use.trainable else 0
    peak = max(_peak(trained, stage), _updating(use, tensors)) if use.trainable else 0
    return StageBytes(
        replace(held, weights=held.weights + buffer_bytes(use, stage)),
        kept=kept,
        working=peak - kept,
        evaluating=_evaluating(evaluated, stage),
        merged=_merging(trained) if use.lora.rank and (use.lora.use_dora or not use.fused) else 0,
        gathered=whole_bytes(use, tensors),
    )


def _updating(use: ModelUse, tensors: StageTensors) -> int:
    """Bytes of an optimizer's step in addition to its states, when the passes' tensors are gone."""
    if use.muon is None:
        return 0
    matrices = [tensor.matrix for tensor in tensors.trained if tensor.matrix is not None]
    return working(matrices, use.muon, use.layout.tp, use.layout.etp)


def orthogonalising(use: ModelUse, once: Once | None = None) -> list[tuple[float, float]]:
    """By pipeline stage, the operations of its busiest rank for Muon's part of an optimizer step, and the bytes that it gathers for it."""
    assert use.muon is not None
    layout, once, found = use.layout, once or Once(), []
    shared = (layout.dp * layout.cp, layout.expert_dp) if use.distributed else (1, 1)
    for stage in range(layout.pp):
        trained = _tensors(use, stage, once).trained
        matrices = [tensor.matrix for tensor in trained if tensor.matrix is not None]
        found.append(busiest(matrices, use.muon, layout.tp, layout.etp, shared))
    return found


def _peak(run: RankPass, stage: int) -> int:
    """The most bytes that a pass with gradients has at a time, activations included: the largest of the moments below, each of which has
    the tensors that exist together.

    Layers and head take turns: with full recomputation the inputs of layers wait, and one layer is computed again when the head's
    tensors are gone; without, the backward pass of the stage's last layer begins when all layers keep their tensors. As shadow
    runs of Megatron-core 0.19.2 with Transformer Engine have them (tests/shadow).
    """
    use, waiting = run.use, waiting_bytes(run, stage)
    last, full = stage == use.layout.pp - 1, use.recompute == "full"
    # Until the next ones arrive, a stage has the gradient that it sent for the previous micro-batch, and in a forward pass its input.
    received = run.hidden * (stage > 0)
    at_head, moments = [0], []
    if last:
        head = waiting + head_bytes(run) + received
        at_head.append(head)
        if use.head == "lm":  # forward with the last norm's output, and backward
            at_head += [head + received + run.hidden + _head(run) + _compared(run), head + _trained_head(run)]
    layers = stage_layers(run, stage)
    mixtures = {layer.name: layer.is_moe for layer in layers}
    for layer in _turns(run, layers, full):
        # The tensors that this layer and later ones keep, or were computed again from, are gone.
        gone = (layer.name, *layer.later)
        before = waiting + received
        before -= sum(
            again_bytes(run, name) if full else layer_bytes(run, name, mixtures[name]) for name in gone
        )
        if is_prediction(layer.name):  # with the gradient of the model's last states, which waits
            before += joined_bytes(run) + run.hidden
        whole = complete(run)  # with the tensors that its parts have when they are computed again
        moments += [before + received + extra for extra in _adapter_moments(whole, layer)]
        # While linear layers compute, their weights are made of a base in float8.
        moments += [before + received + extra + _exact(run) for extra in _forward_moments(whole, layer)]
        moments += [before + extra + _exact(run) for extra in _backward_moments(whole, layer)]
    more = run.hidden * (use.layout.vpp is not None) + run.tokens * MICRO_BATCH
    shared = gathered_bytes(run.use, run.tensors)
    waits = _unreduced(run, stage)
    most = max(max(at_head) + shared[0] + waits[0], max(moments) + shared[1] + waits[1], shared[0] + waits[2])
    return most + more + _dummy_gradients(run) + weight_copies(run.tensors.weights, run.float8, backward=True)


def _unreduced(run: RankPass, stage: int) -> tuple[int, int, int]:
    """Bytes of gradients that wait to be summed over data parallel ranks by Megatron-FSDP: at the head; the most while layers compute, less
    the activations freed by then; and at the embedding, with the gradient that autograd makes of it."""
    layers = {layer.name: layer for layer in stage_layers(run, stage)}
    waiting = unreduced_bytes(run.use, run.tensors)
    if not waiting:
        return 0, 0, 0
    freed, most = 0, 0
    for name, layer in reversed(layers.items()):
        most = max(most, waiting[name] - freed)
        freed += run.hidden if run.use.recompute == "full" else layer_bytes(run, name, layer.is_moe)
    given = _vocabulary_share(run) * run.use.config.hidden_size * run.use.itemsize
    return waiting.get(HEAD, 0), most, waiting[EMBEDDING] + given


def _turns(run: RankPass, layers: list[Layer], full: bool) -> Iterator[Layer]:
    """The layers whose backward pass may have the most: the last one of the stage, and its last delta net; where all are computed again,
    the last of each kind."""
    kinds = {(layer.is_moe, run.is_delta_net(layer.name)): layer for layer in layers}
    if full:
        yield from kinds.values()
        return
    yield from {layers[-1], *(layer for (_, delta_net), layer in kinds.items() if delta_net)}


def _forward_moments(run: RankPass, layer: Layer) -> Iterator[int]:
    """A layer's tensors at a time in its forward pass, its input included."""
    config, layout, item = run.use.config, run.use.layout, run.use.itemsize
    attention = attention_bytes(run, layer.name)
    whole = attention + mlp_bytes(run, layer.name, layer.is_moe)
    if layer.name in run.float8:
        yield from _float8_forward(run, layer, whole)
    if run.use.chooses:
        yield attention + _choice_again(run) + run.hidden + _choosing(run, run.use.teaches)
    if layer.is_moe:
        # Permuted and exchanged tokens, and the outputs before and after they are put in order; sorted ones are kept.
        outputs = 3 * item + max(item, _with_biases(run))
        yield whole + outputs * run.routed * config.hidden_size + (1 + _shared_experts(run)) * run.hidden
        return
    norm = 2 * run.hidden  # its input and output
    yield attention + norm + run.gathered + 2 * run.tokens * config.ffn_hidden_size // layout.tp * item
    outputs = run.tokens * config.hidden_size * item  # before they are scattered
    yield whole + outputs + (run.hidden if layout.tp > 1 else 0)


def _float8_forward(run: RankPass, layer: Layer, whole: int) -> Iterator[int]:
    """A layer's tensors at a time in its forward pass; `whole`: all that it keeps. Between two linear layers their values are in the model's type
    and quantised; experts' rows are filled up, before and after, to multiples of 16."""
    config, layout, item = run.use.config, run.use.layout, run.use.itemsize
    if layer.is_moe:
        assert config.moe is not None
        product = run.routed * config.moe.ffn_hidden_size // layout.etp
        # Permuted, exchanged, sorted and filled up tokens, the outputs of these and of tokens alone.
        around = (1 + _shared_experts(run)) * run.hidden
        yield whole + 6 * run.routed * config.hidden_size * item + product * item + around
        return
    product = run.tokens * config.ffn_hidden_size // layout.tp
    yield whole + product * item + quantised(product) + run.tokens * config.hidden_size * item


def _float8_backward(run: RankPass, layer: Layer, whole: int) -> Iterator[int]:
    """The same in its backward pass: gradients of outputs are quantised along rows and columns."""
    config, layout, item = run.use.config, run.use.layout, run.use.itemsize
    if layer.is_moe:
        assert config.moe is not None
        product, hidden = (
            run.routed * config.moe.ffn_hidden_size // layout.etp,
            run.routed * config.hidden_size,
        )
        around = (1 + _shared_experts(run)) * run.hidden
        kept = run.input_bytes(product, layer.name + "mlp.experts.linear_fc2")
        # The gradients of the outputs, filled up and quantised, and of the product; then the gradients of gate and up, and of the input.
        yield whole + 2 * hidden * item + 2 * quantised(hidden) + product * item + around
        yield whole - kept + 2 * quantised(2 * product) + 2 * hidden * item + around
        return
    product, outputs = run.tokens * config.ffn_hidden_size // layout.tp, run.tokens * config.hidden_size
    kept = run.input_bytes(product, layer.name + "mlp.linear_fc2")
    yield whole + 2 * quantised(outputs) + product * item
    # The input's gradient before and after it is scattered; the output of a layer that is computed again.
    inputs = outputs * item + run.hidden * ((layout.tp > 1) + (run.use.recompute == "full"))
    yield whole - kept + 2 * quantised(2 * product) + run.gathered + inputs


def _adapter_moments(run: RankPass, layer: Layer) -> Iterator[int]:
    """A layer's tensors at a time, its input included, when the terms of adapters in its MLP are added in its forward pass."""
    config, item = run.use.config, run.use.itemsize
    attention, experts = attention_bytes(run, layer.name), layer.name + "mlp.experts."
    # Permuted, exchanged and sorted tokens of experts; and in the second linear layer outputs, each expert's sum and these together.
    routed, around = run.routed * config.hidden_size * item, (1 + _shared_experts(run)) * run.hidden
    if any(slot.module == experts + "linear_fc2" for slot, _ in run.tensors.slots):
        yield attention + mlp_bytes(run, layer.name, layer.is_moe) + 5 * routed + around
    for size in _evaluated_adapters(run, experts + "linear_fc1"):
        yield attention + 3 * routed + size + around
    for size in _evaluated_adapters(run, layer.name + "mlp.linear_fc1"):
        # The norm's input and output, and in float32, as adapters compute it again.
        yield attention + 2 * run.hidden + run.own * config.hidden_size * FLOAT32 + size


def _backward_moments(run: RankPass, layer: Layer) -> Iterator[int]:
    """A layer's tensors at a time in its backward pass, its input and the gradient of its output included."""
    config, layout, item = run.use.config, run.use.layout, run.use.itemsize
    attention = attention_bytes(run, layer.name)
    whole = attention + mlp_bytes(run, layer.name, layer.is_moe) + run.hidden
    if layer.name in run.float8:
        yield from _float8_backward(run, layer, whole)
    if layer.is_moe:
        moe = config.moe
        assert moe is not None
        # Gradients of the experts' outputs and of their product, and of gate and up.
        product = run.routed * moe.ffn_hidden_size // layout.etp * item
        around = (1 + _shared_experts(run)) * run.hidden
        yield whole + 2 * run.routed * config.hidden_size * item + 2 * product + around
    else:
        linear, outputs = layer.name + "mlp.linear_fc1", run.tokens * config.hidden_size * item
        product = run.tokens * config.ffn_hidden_size // layout.tp * item
        kept = run.input_bytes(product // item, layer.name + "mlp.linear_fc2")
        yield whole + run.gathered + product  # gradients of the second linear layer's output and input
        yield whole - kept + 3 * product  # of the product, and of gate and up
        # Of the first linear layer's input, beside the input itself.
        yield whole - kept + run.gathered * run.keeps(linear) + outputs
    if run.is_delta_net(layer.name):
        yield from (attention + 2 * run.hidden + extra for extra in _delta_net_backward(run, layer))
        return
    heads, dim = config.num_attention_heads // layout.tp, config.head_dim
    if config.mla is not None:
        dim = config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim
    if run.use.chooses:
        yield attention + _choice_again(run) + 2 * run.hidden + _chosen_backward(run)
        return
    each = run.tokens * heads * dim * item
    # The MLP's tensors are gone: gradients of attention's output, queries, keys and values, or of a group of these.
    again = each if run.use.recomputes("core_attn") else 0
    yield attention + again + 2 * run.hidden + 4 * each


def _scores(run: RankPass) -> tuple[int, int]:
    """Bytes of the scores that attention to chosen keys has at one time, and of the scores of an indexer's heads: for a sequence's
    queries, or a part of them."""
    indexer, longest, cp = run.use.config.indexer, run.use.longest, run.use.layout.cp
    assert indexer is not None
    # A context parallel rank has two parts of each sequence.
    queries = min(run.tokens, longest if cp == 1 else -(-longest // (2 * cp)))
    choosing = min(run.own, queries, longest - indexer.topk)
    heads = run.use.config.num_attention_heads // run.use.layout.tp
    return (
        min(SCORE_BYTES, heads * queries * longest * FLOAT32),
        min(SCORE_BYTES, indexer.heads * choosing * longest * FLOAT32),
    )


def _choice_again(run: RankPass) -> int:
    """Bytes that tell which keys were chosen, where attention is computed again: the bytes that a layer keeps do not include them."""
    return run.tokens * choice_bytes(run.use) if run.use.recomputes("core_attn") else 0


def _choosing(run: RankPass, teaches: bool = False) -> int:
    """Working memory of attention to chosen keys in a forward pass: scores, and their exponentials in the model's type; before these, an indexer's.

    Where it learns (`megarl.megatron.sparse.learning`), the scores of its heads beside attention's, and matrices of one head's size: attention's
    probabilities, then five while the divergence is computed, or three beside the heads' gradients in the model's type; and the gradient of its keys
    in float32.
    """
    scores, indexed = _scores(run)
    share, indexer = run.use.itemsize / FLOAT32, run.use.config.indexer
    if not teaches:
        return max(scores + int(scores * share), indexed)
    assert indexer is not None
    heads = run.use.config.num_attention_heads // run.use.layout.tp
    copied = share if share < 1 else 0
    most = max(5.25 / indexer.heads, copied + 3.25 / indexer.heads)  # a quarter: which keys are hidden
    keys = run.tokens * run.use.layout.cp * indexer.head_dim * FLOAT32
    learning = scores // heads + int(indexed * (1 + most)) + keys
    return max(scores + max(int(scores * share), learning), indexed)


def _chosen_backward(run: RankPass) -> int:
    """The same in its backward pass: exponentials and the scores' gradients, in float32 and in the model's type; gradients of output and queries, and,
    in float32 and then in the model's type, of the keys and values of all context parallel ranks."""
    mla, layout, item = run.use.config.mla, run.use.layout, run.use.itemsize
    assert mla is not None
    widths = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
    heads = run.use.config.num_attention_heads // layout.tp
    scores = _scores(run)[0]
    gradients = run.tokens * heads * widths * (item + layout.cp * FLOAT32)
    if run.use.teaches:  # the gradients of an indexer's queries and keys wait
        indexer = run.use.config.indexer
        assert indexer is not None
        gradients += item * indexer.head_dim * (run.own * indexer.heads + run.tokens * layout.cp)
    return gradients + max(
        2 * scores + scores * item // FLOAT32, run.tokens * heads * widths * layout.cp * item
    )


def _delta_net_backward(run: RankPass, layer: Layer) -> Iterator[int]:
    """A delta net's tensors at a time in its backward pass, in addition to those that it keeps; its MLP's are gone."""
    share, item = delta_net_shares(run), run.use.itemsize
    # Gradients of the gates' product in float32, and of its factors.
    yield share.tokens * share.values * (3 * FLOAT32 + item)
    # The tensors kept after the rule are gone. The rule (fla's) has gradients of gates and output; the writes of keys and values, twice for
    # values, and their gradients; gradients of queries and keys; states and their gradients.
    name = f"{layer.name}self_attention."
    kept = attention_bytes(run, layer.name) - delta_net_inputs(run) - delta_net_norm(run, name)
    yield share.tokens * item * (6 * share.values + 5 * share.repeated + 2 * share.states) - kept


def _trained_head(run: RankPass) -> int:
    """Working memory of the head's backward pass: a chunk of logits, which their gradients overwrite, and the hidden states' gradient. The
    output weight's gradient is added to the buffer's; autograd gets a tensor of its size for it when the logits are gone. Where the weight
    is the embedding's too, that is the embedding's own gradient."""
    config, item = run.use.config, run.use.itemsize
    given = 0 if run.use.lora.rank else _vocabulary_share(run) * config.hidden_size * item
    gradients = (1 + bool(run.use.compared)) * run.tokens * config.hidden_size * item  # of hidden states
    return max(_head(run) + _compared(run), given) + gradients


def _compared(run: RankPass) -> int:
    """The logits of a chunk while a divergence is computed."""
    chunk = min(run.use.chunk_tokens or COMPARED_TOKENS, run.tokens)
    return chunk * _vocabulary_share(run) * run.use.compared


def divergence_bytes(kind: str | None, beta: float) -> int:
    """Bytes for each logit of a chunk: over the whole vocabulary ("full") both heads' logits in float32 and a third tensor, for mixtures two
    more (`heads.divergence`); over the most likely tokens ("top_k") one tensor, and the product that it is made of (`heads.top_tokens`)."""
    if kind == "full":
        return 3 * FLOAT32 if beta in (0.0, 1.0) else 5 * FLOAT32
    return 6 if kind == "top_k" else 0


def _dummy_gradients(run: RankPass) -> int:
    """Tensors that Transformer Engine keeps for each shape of a trained weight (`megarl.megatron.layer_spec.drop_dummy_gradients`)."""
    shapes = {tensor.shape for tensor in run.tensors.weights if tensor.projection and tensor.trained}
    return sum(prod(shape) for shape in shapes) * run.use.itemsize if run.use.fused else 0


def _evaluating(run: RankPass, stage: int) -> int:
    """Working memory of a forward pass without gradients: the most that attention, a dense or a routed part of a layer, or the head have at a time.

    A tensor lives as long as a variable of the code that made it, so that these are the tensors of one function and of its
    callers: as shadow runs of Megatron-core 0.19.2 with Transformer Engine have them (tests/shadow).
    """
    config, layout, item = run.use.config, run.use.layout, run.use.itemsize
    hidden, names = run.hidden, [tensor.name for tensor in run.tensors.weights]
    parts: list[int] = []  # while linear layers compute, whose weights are made of a base in float8
    others, head = list[int](), 0
    # The layer's input and the sum after its attention; with several layers the first one's input; the tensor that the stage sent last,
    # and on a middle stage the tensor that it was made of; with virtual stages the next input, and on the last stage one more.
    several = any(".layers.1." in name for name in names)
    last = stage == layout.pp - 1
    virtual = (1 + last) * (layout.vpp is not None)
    around = (2 + several + (not last) + (not last and stage > 0) + virtual) * hidden
    if any("self_attention." in name for name in names):
        attention = _evaluated_attention(run)
        if any(name.endswith("self_attention.A_log") for name in names):
            attention = max(attention, _evaluated_delta_net(run))
        parts.append(attention + around - (hidden if layout.tp == 1 else 0))
    if any(EXPERTS in name for name in names):
        moe = config.moe
        assert moe is not None
        # Permuted, exchanged and sorted tokens and the outputs; of both linear layers the first one's outputs and their product.
        first, routed = 3 * moe.ffn_hidden_size // layout.etp, run.routed * item
        more = around + (1 + _shared_experts(run)) * hidden + router_bytes(run)
        tokens = 6 if run.float8 else 4  # as in `_float8_forward`
        biases = run.routed * _with_biases(run) * config.hidden_size
        parts.append(routed * (tokens * config.hidden_size + first) + biases + more)
        # And each expert's sum, and these together.
        if any(slot.number is not None for slot, _ in run.tensors.slots):
            others.append(
                routed * max(6 * config.hidden_size + first, 3 * config.hidden_size + 2 * first) + more
            )
    if any(".mlp.linear_fc1" in name for name in names):
        product = run.tokens * config.ffn_hidden_size // layout.tp * item
        # Gate and up, with their input or their product.
        parts.append(2 * product + max(product, run.gathered + hidden) + around)
    others += [size + around + hidden for size in _evaluated_adapters(run)]
    if last and run.use.head == "lm":
        # And the live positions' hidden states, the stage's input, the last norm's output; an input of another micro-batch.
        live = run.tokens * config.hidden_size * item
        head = _head(run) + live + (2 + (layout.vpp is not None)) * hidden
    shared = gathered_bytes(run.use, run.tensors)
    most = max(max(parts, default=0) + _exact(run), *others, 0) + shared[1]
    copies = weight_copies(run.tensors.weights, run.float8, backward=False)
    return max(most, head + shared[0]) + run.tokens * MICRO_BATCH + copies


def _with_biases(run: RankPass) -> int:
    """Bytes of an element of the experts' outputs once their biases are added, in float32: each expert's sum, and these together."""
    moe = run.use.config.moe
    return 2 * FLOAT32 if moe is not None and moe.biases else 0


def _shared_experts(run: RankPass) -> int:
    """How many outputs of shared experts, each as large as the hidden states, exist while routed experts compute: 1 or 0."""
    moe = run.use.config.moe
    return int(moe is not None and moe.shared_ffn_hidden_size > 0)


def _evaluated_attention(run: RankPass) -> int:
    """Projected queries, keys and values, the same after their norms and their rotation, attention's output; and the projected output.
    Where keys are chosen, the choice and the scores in place of the projected output, unless that takes more."""
    config, tp, mla = run.use.config, run.use.layout.tp, run.use.config.mla
    heads = config.num_attention_heads // tp
    if mla is None:
        queries, keys = heads * config.head_dim, config.num_query_groups // tp * config.head_dim
        # Keys and values of two ranks, and outputs of each, beside copies of the rank's own.
        if run.use.fused and run.use.layout.cp > 1:
            return run.tokens * run.use.itemsize * (5 * queries + 9 * keys)
        each = (3 + config.qk_norm) * (queries + keys)
        return run.tokens * run.use.itemsize * (each + config.hidden_size)
    dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latent = (mla.q_lora_rank or config.hidden_size) + mla.kv_lora_rank + mla.qk_rope_head_dim
    if run.use.chooses:  # queries, keys, values and the output; keys and values of all context parallel ranks
        cp = run.use.layout.cp
        each = 2 * (dim + mla.v_head_dim) + (cp > 1) * cp * (dim + mla.v_head_dim)
        projected = run.tokens * config.hidden_size * run.use.itemsize + (run.hidden if tp > 1 else 0)
        working = max(run.tokens * choice_bytes(run.use) + _choosing(run), projected)
        return run.use.itemsize * (run.tokens * heads * each + run.own * latent) + working
    # Values are made as wide as queries for packed sequences, and so is the output.
    each = dim + (mla.qk_nope_head_dim + mla.v_head_dim) + 4 * dim
    return run.tokens * run.use.itemsize * (heads * each + latent)


def _evaluated_delta_net(run: RankPass) -> int:
    """The projection, the convolution's output, queries and keys for each value head, values and gates; the writes of keys and values, twice for
    values, products of the chunk's keys, states; the output (fla's)."""
    share, item = delta_net_shares(run), run.use.itemsize
    each = 4 * share.keys + 3 * share.values + 2 * share.heads + 2 * share.repeated + 2 * share.values
    each += share.repeated + 3 * share.values + CHUNK * share.heads + share.states
    return share.tokens * (item * each + FLOAT32 * 2 * share.heads)


def _evaluated_adapters(run: RankPass, module: str | None = None) -> Iterator[int]:
    """For each layer with adapters, or for `module` if it has any, the bytes of its output, the adapters' term for each of its tensors, and
    these put together."""
    rows = run.tensors.adapted_rows
    for adapted in rows if module is None else {module} & rows.keys():
        count = run.routed if EXPERTS in adapted else run.tokens
        yield from (count * 3 * each * run.use.itemsize for each in rows[adapted])


def _head(run: RankPass) -> int:
    """The logits of a chunk of tokens, and the head's numbers of all tokens (`megarl.megatron.fused_head`)."""
    share, item = _vocabulary_share(run), run.use.itemsize
    chunk = head_chunk_tokens(min(share, run.use.config.vocab_size), item, run.use.chunk_tokens)
    return min(chunk, run.tokens) * share * item + HEAD_TOKEN * run.tokens


def _vocabulary_share(run: RankPass) -> int:
    return padded_vocab_size(run.use.config, run.use.layout.tp) // run.use.layout.tp


def _exact(run: RankPass) -> int:
    """Bytes of the largest layer that is made of a base in float8: the projections of one linear layer, of all its experts where it has some."""
    return 0 if run.use.base_block is None else run.tensors.linear_elements * run.use.itemsize


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
