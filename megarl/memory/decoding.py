"""Seconds that an engine takes to generate, by formulas: each step reads weights and cache, or is bound by its operations.

Nothing is measured. A prompt is computed once for its samples; while an engine has texts waiting it runs as many as its cache
holds, and it ends no sooner than its longest text does. Speculation, several turns and what the host does are left out.
"""

from dataclasses import dataclass

from megarl.hybrid_engine.layouts import EngineLayout
from megarl.memory.flops import ModelFlops, causal_pairs
from megarl.memory.speed import Machine
from megarl.models import ModelConfig


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

    def step_bytes(self, batch: float, context: float) -> float:
        """What a rank reads to generate a token of each of `batch` texts, which have `context` tokens on the average.

        Of the experts those that any of the tokens takes, if each takes `top_k` of them at random: 1 - (1 - k / n)^batch. Of
        an embedding that is no head a row for each token.
        """
        config, tp = self.config, self.layout.tp
        experts = sum(layer.experts for layer in self.flops.layers) / tp
        experts *= 1 if self.quantized else self.itemsize
        embedding = 0.0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size / tp
        read = self.weights - experts - embedding * self.itemsize
        if config.moe is not None:
            untouched = (1 - config.moe.top_k / config.moe.num_experts) ** batch
            read += experts * (1 - untouched)
        return read + batch * context * self.token

    def step_seconds(self, batch: float, context: float) -> float:
        """Of one token of each of `batch` texts."""
        assumed, gpu, tp = self.machine.assumed, self.machine.gpu, self.layout.tp
        read = self.step_bytes(batch, context) / (gpu.hbm * assumed.hbm)
        pairs = sum(layer.decode_pair for layer in self.flops.layers) * context
        computed = batch * (2 * self.flops.active + pairs) / tp / (self._peak * assumed.decode)
        return max(read, computed) + self._sent(batch, latency=assumed.latency) + assumed.step

    def prefill_seconds(self, prompts: float, length: float) -> float:
        """Of `prompts` prompts."""
        assumed, tokens = self.machine.assumed, prompts * length
        operations = tokens * self.flops.forward(causal_pairs(length)) / self.layout.tp
        return operations / (self._peak * assumed.prefill) + self._sent(tokens, latency=0.0)

    def _sent(self, tokens: float, latency: float) -> float:
        """Two sums over all ranks in each layer."""
        tp, layers = self.layout.tp, self.config.num_layers
        if tp == 1:
            return 0.0
        moved = 2 * (tp - 1) / tp * tokens * self.config.hidden_size * self.itemsize
        return 2 * layers * (moved / self.machine.link(tp) + latency)


@dataclass(frozen=True)
class Generation:
    """What an engine does in a step: seconds of prompts and of tokens; texts at a time, on the average."""

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
        texts: with `mean` response tokens, and one with `longest`. prompts: of `prompt` tokens, that they answer.
        running: most texts at a time.
    """
    running = max(1.0, min(running, texts))
    steps = max(texts * mean / running, longest)
    batch = texts * mean / steps
    seconds = steps * served.step_seconds(batch, prompt + mean / 2)
    return Generation(served.prefill_seconds(prompts, prompt), seconds, batch, steps)
