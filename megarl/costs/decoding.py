"""Seconds that an engine takes to generate, by formulas: each step reads weights and cache, or is bound by its operations, and then
launches its kernels, sums over ranks and samples.

Nothing is measured. A prompt is computed once for its samples. Responses end at every token with the same chance until the
longest that may be (the distribution of greatest entropy with this mean and end): texts that wait keep the batch full, then it
shrinks until the last has ended. Speculation and several turns are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log

from megarl.costs.flops import ModelFlops, causal_pairs
from megarl.costs.kernels import decode_kernels
from megarl.costs.speed import Machine
from megarl.models import ModelConfig
from megarl.weight_sync.layouts import EngineLayout

_SAMPLING = 24  # bytes read and written for a logit: float32, scaled, exponentials, their sum, a draw
_SLICES = 32  # of the time in which the batch shrinks
_EULER = 0.5772


@dataclass(frozen=True)
class Served:
    """An engine's rank.

    Attributes:
        weights: bytes of them. token: bytes of one in its cache.
        itemsize: bytes of an activation, and of what is not quantised. quantized: whether linear layers are in float8.
    """

    config: ModelConfig
    flops: ModelFlops
    layout: EngineLayout
    machine: Machine
    weights: int
    token: int
    itemsize: int = 2
    quantized: bool = False

    @property
    def _peak(self) -> float:
        gpu = self.machine.gpu
        return gpu.fp8 if self.quantized and gpu.fp8 is not None else gpu.bf16

    def step_bytes(self, batch: float, context: float) -> tuple[float, float, float]:
        """What a rank reads to generate a token of each of `batch` texts, which have `context` tokens on the average: weights that every
        token passes, experts, cache.

        Of the experts those that any of the tokens takes, if each takes `top_k` of them at random: 1 - (1 - k / n)^batch. Of
        an embedding that is no head a row for each token.
        """
        config, tp = self.config, self.layout.tp
        experts = sum(layer.experts for layer in self.flops.layers) / tp
        experts *= 1 if self.quantized else self.itemsize
        embedding = 0.0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size / tp
        dense = self.weights - experts - embedding * self.itemsize
        if config.moe is not None:
            experts *= 1 - (1 - config.moe.top_k / config.moe.num_experts) ** batch
        return dense, experts, batch * context * self.token

    def step_seconds(self, batch: float, context: float) -> float:
        """Of one token of each of `batch` texts."""
        assumed, gpu, tp = self.machine.assumed, self.machine.gpu, self.layout.tp
        dense, experts, cache = self.step_bytes(batch, context)
        read = (dense / assumed.hbm + experts / assumed.sparse + cache / assumed.cache) / gpu.hbm
        pairs = sum(layer.decode_pair for layer in self.flops.layers) * context
        computed = batch * (2 * self.flops.active + pairs) / tp / (self._peak * assumed.decode)
        sampled = batch * self.config.vocab_size * _SAMPLING / (gpu.hbm * assumed.hbm)
        launched = sum(decode_kernels(self.config, layer) for layer in self.flops.layers) * assumed.kernel
        return max(read, computed) + launched + sampled + self._sent(batch, waits=True) + assumed.step

    def prefill_seconds(self, prompts: float, length: float) -> float:
        """Of `prompts` prompts."""
        assumed, tokens = self.machine.assumed, prompts * length
        operations = tokens * self.flops.forward(causal_pairs(length)) / self.layout.tp
        return operations / (self._peak * assumed.prefill) + self._sent(tokens, waits=False)

    def _sent(self, tokens: float, waits: bool) -> float:
        """Two sums over all ranks in each layer; `waits`: with the latency of each."""
        tp, layers, machine = self.layout.tp, self.config.num_layers, self.machine
        if tp == 1:
            return 0.0
        moved = 2 * (tp - 1) / tp * tokens * self.config.hidden_size * self.itemsize
        return 2 * layers * (moved / machine.ring(tp, 1) + (machine.latency(tp) if waits else 0.0))


@dataclass(frozen=True)
class Generation:
    """What an engine does in a step: seconds of prompts and of tokens; texts at a time, on the average; tokens of one after the other."""

    prefill: float
    decode: float
    batch: float
    steps: float

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode


def generation(
    served: Served, texts: float, prompts: float, prompt: float, mean: float, longest: float, running: float
) -> Generation:
    """Of an engine's share.

    Args:
        texts: with `mean` response tokens, none with more than `longest`. prompts: of `prompt` tokens, that they answer.
        running: most texts at a time.
    """
    running = max(1.0, min(running, texts))
    parts = list(_batches(texts, mean, longest, running))
    steps = sum(part[0] for part in parts)
    seconds = sum(count * served.step_seconds(batch, prompt + age) for count, batch, age in parts)
    return Generation(served.prefill_seconds(prompts, prompt), seconds, texts * mean / steps, steps)


def _batches(
    texts: float, mean: float, longest: float, running: float
) -> Iterator[tuple[float, float, float]]:
    """(steps, texts at a time, mean response tokens that these have): with texts that wait, then without.

    A text that has not ended has as many tokens before it as a new one, however long it is, so that the last `running` texts
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
    """The mean that responses would have without an end: `mean` is scale (1 - exp(-longest / scale)). None: all are the longest."""
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
