"""Bytes that the backward pass of a micro-batch keeps on a rank: the tensors that each part of a layer saves.

After Korthikanti et al. 2022 (arXiv:2205.05198), equations 2 (tensor parallelism) and 4 (with sequence parallelism), without
their terms for dropout and for scores (no dropout in the layers; attention keeps one number for each row of scores instead
of them), and listed as Megatron-core 0.19.2 keeps them. Not stated there:

- A linear layer keeps its input only if its weight is trained or has an adapter. A norm keeps its input in any case.
- An adapter keeps its own hidden values [tokens, rank] and, in a layer of several tensors whose rows alternate, their rows of B.
- The values are a part of the fused query, key and value tensor, which is kept as a whole for them.
- Experts are given equally many tokens.

- A norm that is part of a linear layer with adapters is computed again for these, in float32.
- A layer that computes in float8 keeps its input quantised, along its columns; the output of attention and the input of shared experts, which
  other modules keep too, are not quantised.

Norms keep nothing but their input. With `fused` kernels (Transformer Engine's, on GPUs) gated units keep nothing but theirs, and attention
keeps copies of its values, so that the fused tensor goes; without (megarl's modules in torch) both factors of the gated unit, attention's output
sequence by sequence and the keys and values of all context parallel ranks are kept, too. Indices, masks and a position's angles are left out.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from megarl.config.schema.models import LoraConfig
from megarl.costs.float8 import quantised
from megarl.costs.tensors import CORE_ATTENTION, ModelUse, StageTensors, in_layer
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.models.lora import COLUMNS, ROWS

RECOMPUTE = (None, "selective", "full")
FLOAT32 = 4
CHUNK = 64  # tokens of a gated delta net whose products with each other fla's kernels keep


@dataclass(frozen=True)
class RankPass:
    """A micro-batch's pass on a rank of a pipeline stage.

    Attributes:
        tensors: of the stage: which weights are trained, and which have adapters.
        tokens: of the micro-batch on this rank, before they are split over tensor parallel ranks.
        float8: the names of the stage's layers that compute in float8.
    """

    use: ModelUse
    tensors: StageTensors
    tokens: int
    float8: frozenset[str] = frozenset()

    def keeps(self, module: str) -> bool:
        """Whether a linear layer ("0:decoder.layers.1.mlp.linear_fc1") keeps its input."""
        return module in self.tensors.learning

    def input_bytes(self, elements: int, *modules: str) -> int:
        """Bytes that linear layers keep of their common input: one tensor for all, or in float8 one each."""
        keeping = sum(map(self.keeps, modules))
        if in_layer(modules[0]) in self.float8:
            return keeping * quantised(elements)
        return (keeping > 0) * elements * self.use.itemsize

    def is_delta_net(self, name: str) -> bool:
        """Whether a layer ("0:decoder.layers.1.") has a gated delta net in place of attention."""
        return f"{name}self_attention.A_log" in self.tensors.names

    @property
    def own(self) -> int:
        """Tokens between the tensor parallel parts."""
        return self.tokens // self.use.layout.tp if self.use.layout.sp else self.tokens

    @property
    def routed(self) -> int:
        """Tokens that the experts of a rank have, if all are given equally many; a token counts once for each expert that has it."""
        moe = self.use.config.moe
        return 0 if moe is None else self.own * moe.top_k * self.use.layout.etp

    @property
    def gathered(self) -> int:
        """Bytes of the hidden states of all tokens, where a linear layer gets them from the tensor parallel ranks."""
        layout = self.use.layout
        return (
            self.tokens * self.use.config.hidden_size * self.use.itemsize
            if layout.sp and layout.tp > 1
            else 0
        )

    @property
    def hidden(self) -> int:
        """Bytes of a layer's input: all that is kept of a layer that is computed again."""
        return self.own * self.use.config.hidden_size * self.use.itemsize


def layer_bytes(run: RankPass, name: str, is_moe: bool) -> int:
    """Bytes that a layer ("0:decoder.layers.1.") keeps, its input included."""
    around = 0
    if is_prediction(name):
        around = joined_bytes(run) + _norm(run, run.use.config.hidden_size, run.own)
    return attention_bytes(run, name) + mlp_bytes(run, name, is_moe) + around


def is_prediction(name: str) -> bool:
    """Whether a layer, by its name, is in one of multi-token prediction."""
    return ":mtp." in name


def joined_bytes(run: RankPass) -> int:
    """Bytes that a multi-token prediction layer keeps before the layer in it: the inputs of both norms, and their outputs side by side."""
    return 2 * (_norm(run, run.use.config.hidden_size, run.own) + run.hidden)


def again_bytes(run: RankPass, name: str) -> int:
    """Bytes of the tensors from which a layer is computed again: its input; of a multi-token prediction layer also the tokens' embeddings."""
    return (2 if is_prediction(name) else 1) * run.hidden


def attention_bytes(run: RankPass, name: str) -> int:
    """Bytes that a layer's attention keeps, the layer's input and attention's adapters included."""
    attention = _latent_attention if run.use.config.mla is not None else _grouped_attention
    if run.is_delta_net(name):
        attention = _delta_net
    return attention(run, name + "self_attention.") + _adapters(run, name + "self_attention.")


def mlp_bytes(run: RankPass, name: str, is_moe: bool) -> int:
    """Bytes that a layer's MLP or its experts keep, their input and adapters included."""
    mlp = name + "mlp."
    if is_moe:
        shared = mlp + "shared_experts."
        adapters = 0 if run.use.recomputes("moe") else _adapters(run, mlp)
        if run.use.recomputes("shared_experts") and adapters:
            adapters -= _adapters(run, shared)
        return _experts(run, mlp) + adapters
    # Computed again, the MLP keeps its input, which nothing else keeps.
    return run.hidden if run.use.recomputes("mlp") else _dense(run, mlp) + _adapters(run, mlp)


def complete(run: RankPass) -> RankPass:
    """The same pass, with layers that keep all tensors that their recomputed parts have in the backward pass.

    With attention alone computed again, a layer needs no more than it keeps at other times.
    """
    if run.use.recompute != "selective" or run.use.recompute_modules == CORE_ATTENTION:
        return run
    if "core_attn" in run.use.recompute_modules:
        return replace(run, use=replace(run.use, recompute_modules=CORE_ATTENTION))
    return replace(run, use=replace(run.use, recompute=None))


def head_bytes(run: RankPass) -> int:
    """Bytes that the last stage keeps after its layers, if every token counts."""
    hidden = run.use.config.hidden_size
    final = _norm(run, hidden, run.own)
    if run.use.head == "value":
        return final + run.own * hidden * FLOAT32
    own = run.tokens * (hidden * run.use.itemsize + 2 * FLOAT32)
    return final + own * (1 + (run.use.config.num_mtp_layers if run.use.mtp else 0))


def _norm(run: RankPass, width: int, tokens: int, *linears: str) -> int:
    """A norm's input, the root of its mean square, and its output, the input of the linear layers."""
    kept = run.input_bytes(tokens * width, *linears) if linears else 0
    return tokens * (width * run.use.itemsize + FLOAT32) + kept


def _core(run: RankPass, heads: int, out: int, proj: str, trimmed: int | None = None) -> int:
    """Bytes that attention itself keeps of a token on a rank: its output and a number for each head.

    Args:
        trimmed: the rest of the output where it is cut before its projection, whose input is then a copy of it.
    """
    if trimmed is not None:
        size = 0 if run.use.recomputes("core_attn") else out * run.use.itemsize + heads * FLOAT32
        return size + trimmed * run.use.itemsize * run.keeps(proj)
    size = 0
    if not run.use.recomputes("core_attn"):
        size += out * run.use.itemsize + heads * FLOAT32
        if not run.use.fused and run.keeps(proj):  # put together from sequences, in a new tensor
            size += out * run.use.itemsize
    elif run.keeps(proj):
        size += out * run.use.itemsize
    return size


def _chosen(run: RankPass, out: int, heads: int, proj: str) -> int:
    """Bytes that attention to chosen keys keeps, as `_core`: its output, which its projection keeps, too, and a bit for each key of a text."""
    if run.use.recomputes("core_attn"):
        return out * run.use.itemsize * run.keeps(proj)
    return out * run.use.itemsize + heads * FLOAT32 + choice_bytes(run.use)


def choice_bytes(use: ModelUse) -> int:
    """Bytes that tell which keys a query of a layer attends to: a bit for each token of the longest text."""
    return -(-use.longest // 8)


def _taught(run: RankPass, name: str) -> int:
    """Bytes that a layer's indexer keeps where it learns: the input of its queries, the keys before their norm in float32, and the gradients of
    queries, weights and keys (of keys for the tokens of all context parallel ranks)."""
    indexer, mla, item = run.use.config.indexer, run.use.config.mla, run.use.itemsize
    learns = any(tensor.name.startswith(name + "indexer.") for tensor in run.tensors.weights)
    if not (run.use.teaches and learns) or run.use.recomputes("core_attn"):
        return 0
    assert indexer is not None and mla is not None and mla.q_lora_rank is not None
    queries = indexer.heads * (indexer.head_dim * item + FLOAT32)
    own = mla.q_lora_rank * item + (indexer.head_dim + 2) * FLOAT32 + queries
    return run.own * own + run.tokens * run.use.layout.cp * indexer.head_dim * item


def _grouped_attention(run: RankPass, name: str) -> int:
    """Norm, queries, keys and values before and after their rotation, attention."""
    config, tp, item = run.use.config, run.use.layout.tp, run.use.itemsize
    heads, groups = config.num_attention_heads // tp, config.num_query_groups // tp
    queries, keys = heads * config.head_dim, groups * config.head_dim
    if run.use.fused:
        # Rotated queries and keys and a copy of the values, which attention that is computed again takes from the fused tensor; norms' inputs.
        values = queries + 2 * keys if run.use.recomputes("core_attn") else keys
        each = item * (queries + keys) * (1 + config.qk_norm) + item * values
    elif run.use.layout.cp > 1:  # all keys and values of a sequence are copies
        each = item * (queries + 2 * keys * run.use.layout.cp)
    else:
        each = item * (2 * queries + 3 * keys)
    if config.qk_norm:
        # Queries of several groups are put together before their norm.
        copies = groups > 1 and not run.use.fused
        each += item * copies * queries + FLOAT32 * (2 if config.qk_norm_all_heads else heads + groups)
        if config.qk_norm_all_heads and not run.use.fused:  # keys are copied out of the fused tensor
            each += item * keys
    each += _core(run, heads, queries, name + "linear_proj")
    if config.output_gate:  # gates are a part of the fused tensor, which is kept for the values; their sigmoids, and the product with the output
        product = run.keeps(name + "linear_proj") or run.use.fused
        each += item * queries * (not run.use.fused) + FLOAT32 * queries + item * queries * product
    return run.tokens * each + _norm(run, config.hidden_size, run.own, name + "linear_qkv")


def _delta_net(run: RankPass, name: str) -> int:
    """Norm, the fused projection, queries and keys after their norm and for each value head, values; the rule's output, its norm, gates in
    float32 and their sigmoid linear units, the product. The convolution and the rule are computed again from their inputs (megarl's), or
    keep the products of a chunk's keys (fla's)."""
    kept = delta_net_inputs(run) + _delta_net_outputs(run, name)
    return kept + delta_net_norm(run, name)


class DeltaNetShares(NamedTuple):
    """A rank's share of a gated delta net: the tokens of all context parallel ranks; the widths of its key heads, of these repeated for
    each value head, and of its values; its value heads; elements of a chunk's states, for a token."""

    tokens: int
    keys: int
    repeated: int
    values: int
    heads: int
    states: int


def delta_net_shares(run: RankPass) -> DeltaNetShares:
    """A rank's share: a part of the heads, for the tokens of all context parallel ranks."""
    net, ranks = run.use.config.delta_net, run.use.layout.tp * run.use.layout.cp
    assert net is not None
    heads = net.value_heads // ranks
    states = heads * net.key_dim * net.value_dim // CHUNK
    widths = (net.keys // ranks, heads * net.key_dim, net.values // ranks)
    return DeltaNetShares(run.tokens * run.use.layout.cp, *widths, heads, states)


def delta_net_norm(run: RankPass, name: str) -> int:
    """Bytes that the norm before a delta net's projection keeps."""
    return _norm(run, run.use.config.hidden_size, run.own, name + "in_proj")


def delta_net_inputs(run: RankPass) -> int:
    """Bytes that a delta net keeps up to its rule, without its norm and with the rule's inputs."""
    net, item = run.use.config.delta_net, run.use.itemsize
    share = delta_net_shares(run)
    assert net is not None
    each = item * (2 * share.keys + 2 * share.values + 2 * share.heads)  # the fused projection
    each += (
        item * (2 * share.keys + 2 * share.repeated + share.values + share.heads) + FLOAT32 * 3 * share.heads
    )
    if run.use.fused:
        each += FLOAT32 * 2 * share.keys // net.key_dim + item * share.heads * CHUNK
    else:
        each += item * share.values
    return share.tokens * each


def _delta_net_outputs(run: RankPass, name: str) -> int:
    """Bytes that a delta net keeps after its rule."""
    item, share = run.use.itemsize, delta_net_shares(run)
    # The output before and after its norm, and the norm's root.
    each = 2 * item * share.values + FLOAT32 * share.heads
    each += FLOAT32 * share.values * (1 + (item < FLOAT32))  # gates in float32
    return share.tokens * (each + item * share.values * run.keeps(name + "out_proj"))


def _rule_again(run: RankPass) -> int:
    """Bytes that the rule of a delta net keeps while megarl's modules compute it again, in its backward pass: in float32 the tensors from which
    its matrix products and exponentials are derived. Chunks are assumed to be full."""
    net, share = run.use.config.delta_net, delta_net_shares(run)
    assert net is not None
    return share.tokens * share.heads * FLOAT32 * (6 * net.key_dim + 3 * net.value_dim + 5 * CHUNK + 6)


def _latent_attention(run: RankPass, name: str) -> int:
    """Norm, latent queries, keys and values and their norms, the heads' own, attention."""
    config, mla, item = run.use.config, run.use.config.mla, run.use.itemsize
    heads = config.num_attention_heads // run.use.layout.tp
    dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    parts = 1 if run.use.fused else run.use.layout.cp  # all keys and values of a sequence are copies
    # For packed sequences megatron-core makes the values as wide as the queries, and cuts attention's output again.
    padded = mla.v_head_dim != dim and not run.use.chooses
    if run.use.chooses:
        parts = run.use.layout.cp
    attended = run.use.recomputes("core_attn")
    width = dim if padded and not attended else mla.v_head_dim
    # Of its tensors attention keeps the padded values alone, which are in a copy.
    if run.use.recomputes("mla_up_proj"):
        each = item * heads * dim * parts if padded and not attended else 0
    else:
        each = item * heads * (dim + (dim + width) * parts)
    trimmed = heads * mla.v_head_dim if padded else None
    taught = 0
    if run.use.chooses:
        each += _chosen(run, heads * mla.v_head_dim, heads, name + "linear_proj")
        taught = _taught(run, name)
    else:
        each += _core(run, heads, heads * (dim if padded else mla.v_head_dim), name + "linear_proj", trimmed)
    down = [name + part for part in ("linear_q_down_proj", "linear_q_proj", "linear_kv_down_proj")]
    used = [] if run.use.recomputes("layernorm") else down
    size = run.tokens * each + taught + _norm(run, config.hidden_size, run.own, *used)
    # Norms of latent vectors are computed again with what follows them.
    up = [] if run.use.recomputes("mla_up_proj") else ["linear_q_up_proj", "linear_kv_up_proj"]
    if mla.q_lora_rank is not None:
        size += _norm(run, mla.q_lora_rank, run.own, *(name + part for part in up[:1]))
    size += _norm(run, mla.kv_lora_rank, run.own, *(name + part for part in up[1:]))
    # In addition to the latent keys and values, in one tensor.
    return size + run.own * mla.qk_rope_head_dim * item


def _gated(run: RankPass, tokens: int, width: int, fc2: str, weighted: bool = False) -> int:
    """Gate and up, and their product. `weighted`: by the router's probabilities. Where gate and up are clamped, they are kept before and
    after that; in plain torch the gate's sigmoid is kept, too."""
    size = tokens * width * run.use.itemsize
    if weighted and run.use.recomputes("moe_act"):
        return 2 * size
    moe = run.use.config.moe
    clamped = 2 * size if weighted and moe is not None and moe.clamp is not None else 0
    return (2 if run.use.fused else 4 + weighted) * size + clamped + run.input_bytes(tokens * width, fc2)


def _dense(run: RankPass, name: str) -> int:
    config = run.use.config
    gated = _gated(run, run.tokens, config.ffn_hidden_size // run.use.layout.tp, name + "linear_fc2")
    return gated + _norm(run, config.hidden_size, run.own, name + "linear_fc1")


def _experts(run: RankPass, name: str) -> int:
    """Norm, router, routed experts, shared experts."""
    config, moe = run.use.config, run.use.config.moe
    # The router keeps its input, and so does a layer of experts that is computed again.
    size = _norm(run, config.hidden_size, run.own)
    size += 0 if run.use.recomputes("layernorm") else run.hidden
    if run.use.recomputes("moe"):
        return size
    size += router_bytes(run)
    width = moe.ffn_hidden_size // run.use.layout.etp
    size += _gated(run, run.routed, width, name + "experts.linear_fc2", weighted=True) + FLOAT32 * run.routed
    size += run.input_bytes(run.routed * config.hidden_size, name + "experts.linear_fc1")
    if run.use.recomputes("shared_experts"):
        return size
    shared = name + "shared_experts.linear_fc2"
    if moe.shared_gate:  # the output before its gate, and the gate
        size += run.own * (config.hidden_size + 1) * run.use.itemsize
    return size + _gated(run, run.tokens, moe.shared_ffn_hidden_size // run.use.layout.tp, shared)


def router_bytes(run: RankPass) -> int:
    """Bytes of the scores of a layer's router and of the tensors made from them."""
    moe = run.use.config.moe
    assert moe is not None
    # The map of tokens to experts, and two rows for each expert by which tokens are sorted and put back.
    if run.use.fused:
        return run.own * ((FLOAT32 + 1) * moe.num_experts + FLOAT32 * (2 * moe.num_experts + 1))
    scores = moe.num_experts if moe.scoring == "sigmoid" or not moe.norm_topk_prob else 0
    return run.own * FLOAT32 * (scores + 2 * moe.top_k)


class _Terms(NamedTuple):
    """Bytes for each token of a rank, for each of its own part, for each that its experts have, and bytes that depend on no token."""

    tokens: int
    own: int
    routed: int
    none: int


def _adapters(run: RankPass, name: str) -> int:
    """Bytes that the adapters of a layer keep in addition to their inputs."""
    tensors, lora, item = run.tensors, run.use.lora, run.use.itemsize
    if not tensors.slots:
        return 0
    terms = tensors.once((name, lora, item), lambda: _adapter_terms(tensors, name, lora, item))
    return terms.tokens * run.tokens + terms.own * run.own + terms.routed * run.routed + terms.none


def _adapter_terms(tensors: StageTensors, name: str, lora: LoraConfig, item: int) -> _Terms:
    rows, seen, none = tensors.rows, set[str](), 0
    each = {"tokens": 0, "own": 0, "routed": 0}
    for slot, cut in tensors.slots_by_layer.get(in_layer(name), ()):
        if not slot.module.startswith(name):
            continue
        inputs, outputs = ("tokens" if cut == side else "own" for side in (COLUMNS, ROWS))
        counted = True
        if slot.number is not None:  # tokens are counted once for all experts of the layer
            inputs = outputs = "routed"
            counted = slot.module not in seen
            seen.add(slot.module)
        if len(slot.rows) > len(slot.tensors):  # tensors whose rows lie apart: rows of B are copied
            none += slot.num_rows * lora.rank * item
        if not counted:
            continue
        each[outputs] += (1 if lora.shared_a else len(slot.tensors)) * lora.rank * item
        if slot.num_rows < rows[slot.weight]:
            each[outputs] += slot.num_rows * item
        if lora.use_dora:
            each[outputs] += (2 if slot.number is None else 1) * slot.num_rows * item
        if lora.dropout:
            each[inputs] += slot.in_features * (item + 1)
        if item < FLOAT32 and f"{slot.module}.layer_norm_weight" in rows:
            each[inputs] += slot.in_features * FLOAT32
    return _Terms(**each, none=none)


def stage_bytes(run: RankPass, stage: int, micro_batches: int | None = None) -> int:
    """The most that a rank of a pipeline stage keeps at a time.

    That is after as many forward passes as Megatron's schedules begin with: one more than there are stages after it in
    1F1B; with virtual stages (interleaved) also the passes of all chunks but one of every stage.

    Args:
        micro_batches: of a step; None: more than there are stages.
    """
    layers = stage_layers(run, stage)
    at_head = head_bytes(run) if stage == run.use.layout.pp - 1 else 0
    # A layer is computed again when the head's tensors are gone, and the rule of a delta net when the tensors of everything after it are.
    again, later, full = 0, 0, run.use.recompute == "full"
    whole = complete(run)
    for layer in reversed(layers):
        kept = again_bytes(run, layer.name) if full else layer_bytes(run, layer.name, layer.is_moe)
        more = layer_bytes(whole, layer.name, layer.is_moe) - kept
        again = max(again, more)
        if run.is_delta_net(layer.name) and not run.use.fused:
            gone = later + mlp_bytes(whole, layer.name, layer.is_moe)
            gone += _delta_net_outputs(run, layer.name + "self_attention.")
            again = max(again, more - gone + _rule_again(run))
        later += kept
    return waiting_bytes(run, stage, micro_batches) + max(at_head, again)


class Layer(NamedTuple):
    """A layer of a stage: its name ("0:decoder.layers.1."), whether it has routed experts, and the names of those that follow it in its
    model chunk."""

    name: str
    is_moe: bool
    later: tuple[str, ...]


def stage_layers(run: RankPass, stage: int) -> list[Layer]:
    """The layers of a stage, in their order; layers of multi-token prediction come after the last one."""
    use, moe, found = run.use, run.use.config.moe, list[Layer]()
    for chunk, layers in enumerate(layers_of(use.layout, use.config.num_layers, stage)):
        named = [
            (f"{chunk}:decoder.layers.{index}.", moe is not None and layer not in moe.dense_layers)
            for index, layer in enumerate(layers)
        ]
        if use.mtp and stage == use.layout.pp - 1 and chunk == use.layout.num_chunks - 1:
            depth = range(use.config.num_mtp_layers)
            named += [(f"{chunk}:mtp.layers.{index}.mtp_model_layer.", moe is not None) for index in depth]
        for index, (name, is_moe) in enumerate(named):
            found.append(Layer(name, is_moe, tuple(other for other, _ in named[index + 1 :])))
    return found


def waiting_bytes(run: RankPass, stage: int, micro_batches: int | None = None) -> int:
    """Bytes that layers keep when the first backward pass begins; with full recomputation their inputs alone. `micro_batches`: as above."""
    assert run.use.recompute in RECOMPUTE, run.use.recompute
    counts = _in_flight(run.use.layout, stage, micro_batches)
    full = run.use.recompute == "full"
    return sum(
        counts[int(name.split(":", 1)[0])]
        * (again_bytes(run, name) if full else layer_bytes(run, name, is_moe))
        for name, is_moe, _ in stage_layers(run, stage)
    )


def _in_flight(layout: ParallelLayout, stage: int, micro_batches: int | None) -> list[int]:
    """By model chunk, the micro-batches whose backward pass has not begun when the first one's does."""
    after = layout.pp - stage - 1
    if layout.vpp is None:
        return [after + 1 if micro_batches is None else min(after + 1, micro_batches)]
    passes = 2 * after + (layout.vpp - 1) * layout.pp + 1
    if micro_batches is not None:
        passes = min(passes, micro_batches * layout.vpp)
    turns = [number // layout.pp % layout.vpp for number in range(passes)]
    return [turns.count(chunk) for chunk in range(layout.vpp)]
