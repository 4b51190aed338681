"""An SGLang engine by formulas: the bytes of a rank's weights and of the cache, and the seconds that generation takes.

Bytes: weights follow from the weight table; all other sizes are SGLang 0.5.21's.

Seconds: nothing is measured. Each step reads weights and cache, or is bound by its operations, and then launches its kernels, sums over
ranks and samples. A prompt is computed once for its samples. Responses end at every token with the same probability, up to the
longest allowed (the distribution of greatest entropy with this mean and end): waiting requests keep the batch full, then it
shrinks until the last has ended. Where tokens are drafted, a step checks several of each text, and how many of them are accepted is
assumed; the drafts' own operations and launches are left out, and so are several turns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import NamedTuple

import torch

from megarl.config.schema.models import LoraConfig
from megarl.costs.flops import ModelFlops, causal_pairs
from megarl.costs.layer_kernels import decode_kernels
from megarl.costs.speed import Machine
from megarl.layout import Layout, Shard
from megarl.models import (
    ModelConfig,
    kinds_of_layers,
    logical_tensors,
    sglang_keeps_float32,
    sglang_padding,
    sglang_pieces,
)
from megarl.models.config import ENGINE_STATES
from megarl.models.layers import has_indexer
from megarl.models.lora import adapted_weights, sglang_adapter_padding, sglang_adapters
from megarl.weight_sync.layouts import EngineLayout, sglang_layout
from megarl.weight_sync.quantize import Block, dtype_in_fp8, with_scales

_ROTARY_MARGIN = 256  # tokens that the rotary table has more than the context
_ROTARY_ALIGN = 128  # its size is a multiple of this
_TABLE_MARGIN = 4  # tokens that a request has more than the context
_PADDING_TOKENS = 1  # of the cache, where padding is written: a page


def engine_weight_bytes(
    config: ModelConfig, engines: EngineLayout, dtype: torch.dtype, fp8_block: Block | None = None
) -> int:
    """Bytes of the parameters of an engine's first rank, which has as many as any other.

    With latent attention SGLang 0.5.21 keeps kv_b_proj a second time, as the two factors that it multiplies into queries and
    outputs; with norms that multiply by 1 + weight it also keeps this factor.
    """
    layout = sglang_layout(config, replace(engines, num_engines=1))
    shapes = {} if fp8_block is None else logical_tensors(config, mtp=engines.draft)

    def element(tensor: str) -> int:
        kind = dtype if fp8_block is None else dtype_in_fp8(tensor, dtype)
        kind = torch.float32 if sglang_keeps_float32(config, tensor) else kind
        copied = config.mla is not None and tensor.endswith(".kv_b_proj.weight")
        if config.zero_centered_norms:
            copied = tensor.endswith("norm.weight") and "linear_attn" not in tensor
        return kind.itemsize + copied * dtype.itemsize

    def weights(layers: Sequence[int], draft: bool = False) -> int:
        """Bytes of some layers, and of the ends."""
        place = engines.place(0)
        shard = Shard((0,), lambda: sglang_pieces(config, place, draft=draft, layers=layers))
        held = Layout(layout.name, 1, (shard,))
        held = held if fp8_block is None else with_scales(held, shapes, fp8_block)
        return sum(piece.box.numel * element(piece.tensor) for piece in held.pieces(0))

    ends, total = weights(()), weights((), engines.draft)
    for alike in kinds_of_layers(config):
        total += len(alike) * (weights(alike[:1]) - ends)
    return total + dtype.itemsize * sum(sglang_padding(config, engines.place(0)).values())


def engine_adapter_bytes(
    config: ModelConfig, engines: EngineLayout, lora: LoraConfig, dtype: torch.dtype
) -> int:
    """Bytes of the adapters that an engine's first rank serves in addition to its weights, of all layers of the kinds that have any."""
    pieces, weights = sglang_pieces(config, engines.place(0)), adapted_weights(config, lora)
    found = sum(piece.box.numel for piece in sglang_adapters(pieces, weights, lora.rank))
    padding = sglang_adapter_padding(pieces, weights, lora.rank)
    return dtype.itemsize * (found + sum(padding.values()))


def rotary_bytes(config: ModelConfig, context: int) -> int:
    """Bytes of the table of cosines and sines, which all layers share, and which is released with the weights; in float32, as on GPUs.

    Args:
        context: the most tokens of a request.
    """
    scaling = config.rope_scaling or {}
    tokens = config.max_position_embeddings
    if scaling.get("rope_type") == "yarn":
        tokens = round(scaling["original_max_position_embeddings"] * scaling["factor"])
    tokens = max(tokens, -(-(context + _ROTARY_MARGIN) // _ROTARY_ALIGN) * _ROTARY_ALIGN)
    width = config.head_dim * config.rotary_percent if config.mla is None else config.mla.qk_rope_head_dim
    return tokens * int(width) * torch.float32.itemsize


def cache_bytes(
    config: ModelConfig,
    engines: EngineLayout,
    dtype: torch.dtype,
    tokens: int,
    requests: int,
    context: int,
    device: str = "cuda",
) -> int:
    """Bytes of the cache of `tokens` on an engine's rank, and of the table that tells where in it the tokens of each request are.

    Args:
        dtype: of the cache.
        requests: requests of the engine that run at once; a rank has its group's. context: the most tokens of each.
    """
    table = torch.int32.itemsize * (requests // engines.dp + 1) * (context + _TABLE_MARGIN)
    return (tokens + _PADDING_TOKENS) * token_bytes(config, engines, dtype, device) + table


def token_bytes(
    config: ModelConfig, engines: EngineLayout, dtype: torch.dtype, device: str = "cuda", more: int = 0
) -> int:
    """Cache bytes of one token on an engine's rank: keys and values of its heads, or the latent ones, which every rank has; with the
    layers of a draft, and `more` layers of the same kind. On GPUs indexers have keys in float8, with a scale in float32 for 128 elements; on
    CPUs the indexers of the model itself have keys in the cache's type."""
    layers = config.num_layers + (config.num_mtp_layers if engines.draft else 0) + more
    if config.delta_net is not None:
        layers -= len(config.delta_net.layers)
    if config.mla is not None:
        keys = 0
        if config.indexer is not None:
            width = config.indexer.head_dim
            indexers = sum(has_indexer(config, layer) for layer in range(layers))
            if device == "cuda":
                keys = indexers * (width + width // 128 * 4)
            else:
                keys = len(config.indexer.layers) * width * dtype.itemsize
        return layers * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * dtype.itemsize + keys
    heads = max(1, config.num_query_groups // (engines.tp // engines.dp))
    return layers * 2 * heads * config.head_dim * dtype.itemsize


def state_bytes(
    config: ModelConfig,
    engines: EngineLayout,
    dtype: torch.dtype,
    requests: int,
    device: str,
    checked: int = 0,
) -> int:
    """Bytes of gated delta nets' states on an engine's rank: for each slot a matrix of each head in float32, and the convolution's last inputs.

    Args:
        dtype: of these inputs. requests: requests of the engine that run at once. device: "cpu" or "cuda".
        checked: tokens of a request that a pass checks where tokens are drafted, the newest among them: SGLang (0.5.21, MambaPool) keeps the
            state after each one, and the convolution's inputs of all.
    """
    slots, size = ENGINE_STATES[device] * requests // engines.dp + 1, dtype.itemsize
    total = _request_states(config, engines, size) * slots
    if config.delta_net is None or not checked:
        return total
    running = requests // engines.dp + 1
    return total + running * _request_states(
        config, engines, size, checked, checked + config.delta_net.conv - 2
    )


def _request_states(
    config: ModelConfig, engines: EngineLayout, itemsize: int, states: int = 1, inputs: int | None = None
) -> int:
    """Bytes of the states of one request on a rank: of `states` matrices and `inputs` of the convolution (None: its last ones)."""
    net = config.delta_net
    if net is None:
        return 0
    heads = states * net.value_heads * net.key_dim * net.value_dim * torch.float32.itemsize
    inputs = (2 * net.keys + net.values) * (net.conv - 1 if inputs is None else inputs) * itemsize
    return len(net.layers) * (heads + inputs) // (engines.tp // engines.dp)


_SAMPLING = 24  # bytes read and written for a logit: float32, scaled, exponentials, their sum, a draw
# The same where some tokens are left out (SGLang 0.5.21, layers/sampler.py): four passes of a radix sort over values and numbers of 12 bytes, and
# probabilities, their sums, cuts, logarithms and noise in float64, operation by operation.
_SORTED_SAMPLING = 4 * 2 * 12 + 200
_SLICES = 32  # of the time in which the batch shrinks
_EULER = 0.5772


@dataclass(frozen=True)
class Draft:
    """Speculative decoding.

    Attributes:
        tokens: that are drafted for a text in a step. read: bytes that a rank reads for each of them.
        accepted: tokens that a step gives each text, on average; from 1 to tokens + 1.
    """

    tokens: int = 0
    read: float = 0.0
    accepted: float = 1.0


@dataclass(frozen=True)
class ServedModel:
    """An engine's rank.

    Attributes:
        draft: how tokens are drafted.
        leaves_out: whether tokens are drawn from a part of the vocabulary.
        weights: bytes of the weights. token: bytes of a token in its cache.
        itemsize: bytes of an activation, and of unquantised weights. quantized: whether linear layers are in float8.
    """

    config: ModelConfig
    flops: ModelFlops
    layout: EngineLayout
    machine: Machine
    weights: int
    token: int
    itemsize: int = 2
    quantized: bool = False
    draft: Draft = Draft()
    leaves_out: bool = False

    @property
    def peak(self) -> float:
        """FLOP/s of its matrices."""
        gpu = self.machine.gpu
        return gpu.fp8 if self.quantized and gpu.fp8 is not None else gpu.bf16

    def step_bytes(self, batch: float, context: float) -> tuple[float, float, float]:
        """Bytes that a rank reads in a step of `batch` texts, which have `context` tokens on average: weights that every token passes,
        experts, the cache of its group's share of the texts, and their states, which are written, too.

        Experts count if any of the tokens takes them, where each takes `top_k` at random: 1 - (1 - k / n)^batch; an embedding that
        is no head counts with a row for each token. Layers with a window read the cache of the window alone, layers with sparse
        attention the cache of the chosen tokens.
        """
        config, tp = self.config, self.layout.tp
        experts = sum(layer.experts for layer in self.flops.layers) / tp
        experts *= 1 if self.quantized else self.itemsize
        cut = tp // self.layout.dp
        embedding = 0.0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size / cut
        dense = self.weights - experts - embedding * self.itemsize
        if config.moe is not None:
            experts *= 1 - (1 - config.moe.top_k / config.moe.num_experts) ** self._tokens(batch)
        states = 2 * _request_states(config, self.layout, self.itemsize)
        layers = self.flops.layers
        seen = sum(layer.decoded(context) for layer in layers) / len(layers)
        # Of the tokens that are not chosen the indexers' keys alone are read.
        keys = 0 if config.indexer is None else config.indexer.head_dim + config.indexer.head_dim // 128 * 4
        scored = sum(context - layer.decoded(context) for layer in layers if layer.index) * keys
        return dense, experts, batch / self.layout.dp * (seen * self.token + scored + states)

    def step_operations(self, batch: float, context: float) -> float:
        """Operations of a rank in a step of `batch` texts."""
        pairs = sum(layer.decode(context) for layer in self.flops.layers)
        return self._tokens(batch) * (2 * self.flops.active + pairs) / self.layout.tp

    def prefill_operations(self, prompts: float, length: float) -> float:
        """Operations of a rank for `prompts` prompts."""
        return prompts * length * self.flops.forward(causal_pairs(length)) / self.layout.tp

    def _tokens(self, batch: float) -> float:
        """Tokens that a step of `batch` texts computes: the newest of each, and drafted ones."""
        return batch * (1 + self.draft.tokens)

    def step_seconds(self, batch: float, context: float) -> float:
        """Seconds of a step of `batch` texts."""
        assumed, gpu = self.machine.assumed, self.machine.gpu
        dense, experts, cache = self.step_bytes(batch, context)
        read = (dense / assumed.hbm + experts / assumed.sparse + cache / assumed.cache) / gpu.hbm
        computed = self.step_operations(batch, context) / (self.peak * assumed.decode)
        drafted = self.draft.tokens * self.draft.read / (gpu.hbm * assumed.hbm)
        tokens = self._tokens(batch)
        rows = tokens / self.layout.dp
        each = _SORTED_SAMPLING if self.leaves_out else _SAMPLING
        sampled = rows * self.config.vocab_size * each / (gpu.hbm * assumed.hbm)
        launched = sum(decode_kernels(self.config, layer) for layer in self.flops.layers) * assumed.kernel
        return (
            max(read, computed) + launched + sampled + self._sent(tokens, waits=True) + drafted + assumed.step
        )

    def prefill_seconds(self, prompts: float, length: float) -> float:
        """Seconds for `prompts` prompts."""
        computed = self.prefill_operations(prompts, length) / (self.peak * self.machine.assumed.prefill)
        return computed + self._sent(prompts * length, waits=False)

    def _sent(self, tokens: float, waits: bool) -> float:
        """Seconds of two sums over all ranks in each layer; `waits`: with the latency of each.

        With data parallel attention, attention's sum is over the ranks of a group; the other is a gather of all groups' tokens, and a scatter.
        """
        tp, dp = self.layout.tp, self.layout.dp
        if tp == 1:
            return 0.0
        if dp == 1:
            return 2 * self.config.num_layers * self._sum(tp, tokens, 1.0 if waits else 0.0)
        sums = self._sum(tp // dp, tokens / dp, 1.0 if waits else 0.0) if tp > dp else 0.0
        return self.config.num_layers * (sums + self._sum(tp, tokens, 2.0 if waits else 0.0))

    def _sum(self, ranks: int, tokens: float, latencies: float) -> float:
        """Seconds of a sum of `tokens` over `ranks`, or of a gather and a scatter, which send as much."""
        moved = 2 * (ranks - 1) / ranks * tokens * self.config.hidden_size * self.itemsize
        return moved / self.machine.ring(ranks, 1) + latencies * self.machine.latency(ranks)


@dataclass(frozen=True)
class Generation:
    """An engine's work in a step: seconds of prompts and of tokens; texts at a time, on average; consecutive tokens."""

    prefill: float
    decode: float
    batch: float
    steps: float

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode


class EngineLoad(NamedTuple):
    """An engine's share of a step's texts.

    Attributes:
        texts: with `mean` response tokens, none with more than `longest`. prompts: prompts of `prompt` tokens that the texts answer.
        running: most texts at a time.
    """

    texts: float
    prompts: float
    prompt: float
    mean: float
    longest: float
    running: float


def generation(served: ServedModel, load: EngineLoad) -> Generation:
    """The generation of an engine's share of the texts."""
    running = max(1.0, min(load.running, load.texts))
    parts = [
        (count / served.draft.accepted, batch, age)
        for count, batch, age in _batches(load.texts, load.mean, load.longest, running)
    ]
    steps = sum(part[0] for part in parts)
    seconds = sum(count * served.step_seconds(batch, load.prompt + age) for count, batch, age in parts)
    prefill = served.prefill_seconds(load.prompts, load.prompt)
    return Generation(prefill, seconds, load.texts * load.mean / steps / served.draft.accepted, steps)


def _batches(
    texts: float, mean: float, longest: float, running: float
) -> Iterator[tuple[float, float, float]]:
    """(tokens of each, texts at a time, mean response tokens that these have): with texts that wait, then without.

    A text that has not ended has as many tokens still to come as a new one, however long it is, so that the last `running` texts
    are as they would be if all began together.
    """
    if texts > running:
        yield (texts - running) * mean / running, running, mean / 2
    scale = _scale(mean, longest)
    last = longest if scale is None else min(longest, max(mean, scale * (log(running) + _EULER)))
    for number in range(_SLICES):
        middle = (number + 0.5) * last / _SLICES
        left = 1.0 if scale is None else exp(-middle / scale)
        yield last / _SLICES, max(1.0, running * left), middle


def _scale(mean: float, longest: float) -> float | None:
    """The mean that responses would have without a limit: `mean` is scale (1 - exp(-longest / scale)). None: all are the longest."""
    if mean >= 0.999 * longest:
        return None
    low, high = 1e-3, 1e3  # longest / scale; the mean falls with it
    for _ in range(60):
        middle = (low * high) ** 0.5
        if (1 - exp(-middle)) / middle * longest > mean:
            low = middle
        else:
            high = middle
    return longest / low


def spread(mean: float, longest: float) -> float:
    """The standard deviation of a response's tokens, as a part of their mean."""
    scale = _scale(mean, longest)
    if scale is None:
        return 0.0
    end = longest / scale
    square = 2 * scale**2 * (1 - exp(-end) * (1 + end))  # of min(length, longest), on the average
    return max(0.0, square - mean**2) ** 0.5 / mean
