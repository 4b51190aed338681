"""Floors: the least seconds that the work of a phase takes on given GPUs, by their peaks alone.

A floor is bytes over a bandwidth or operations over the peak of bfloat16 (or float8), whichever is more, for the work that a job's
layout, batch and mean lengths ask for: every weight that a token needs is read, every operation of the model is done once, spread evenly
over the ranks. Parts of the peaks that are assumed do not enter. Not counted are recomputation, padding, stages that wait, launches,
latencies, the messages between ranks within a pass, tails of lengths, and work of the controller. So no run of the same job is faster, and
the difference between a floor and a measured time is the most that a better program could gain.
"""

from dataclasses import dataclass, fields, replace

from megarl.costs.engine import EngineLoad, Generation, ServedModel, generation
from megarl.costs.flops import causal_pairs
from megarl.costs.hardware import SECONDS, Assumptions
from megarl.costs.speed import Machine, Passes

_LENGTHS = ("prompt", "response")  # assumptions about the data


def at_peaks(machine: Machine) -> Machine:
    """The same GPUs, each of whose peaks is reached, without any cost that is independent of size."""
    parts = {
        field.name: 0.0 if field.name in SECONDS else 1.0
        for field in fields(Assumptions)
        if field.name not in _LENGTHS
    }
    return replace(machine, assumed=replace(machine.assumed, **parts))


@dataclass(frozen=True)
class _AtPeak(ServedModel):
    """An engine's rank that only reads its bytes, or only computes."""

    def step_seconds(self, batch: float, context: float) -> float:
        hbm, drafted = self.machine.gpu.hbm, self.draft.tokens * self.draft.read
        read = sum(self.step_bytes(batch, context)) / hbm
        return drafted / hbm + max(read, self.step_operations(batch, context) / self.peak)

    def prefill_seconds(self, prompts: float, length: float) -> float:
        return self.prefill_operations(prompts, length) / self.peak


def generation_floor(served: ServedModel, load: EngineLoad) -> Generation:
    """`generation` at the peaks, of texts that are all as long as their mean, so that the batch is always full; `longest` does not count."""
    rank = _AtPeak(**{field.name: getattr(served, field.name) for field in fields(ServedModel)})
    return generation(rank, load._replace(longest=load.mean))


def pass_floor(passes: Passes, rows: float, prompt: float, response: float, updates: int = 1) -> float:
    """Seconds of `updates` passes over `rows` texts, over all ranks; for a trained model with its optimizer steps.

    Gradients may be summed over ranks while others are computed; the optimizer begins when all are there.

    Args:
        prompt: tokens of a text that the head leaves out; where texts share prompts, its part of one. response: the other tokens.
    """
    layout, gpu, flops = passes.layout, passes.machine.gpu, passes.flops
    tokens = prompt + response
    operations = tokens * flops.forward(causal_pairs(tokens)) - prompt * 2 * flops.head
    layers = zip(flops.layers, passes.in_float8, strict=True)
    float8 = passes.times * tokens * sum(2 * (layer.dense + layer.active) for layer, there in layers if there)
    operations *= passes.times
    for layer in passes.predicted:
        operations += passes.times * tokens * layer.forward(causal_pairs(tokens))
        operations += (2 if passes.detached else 3) * response * 2 * flops.head
    seconds = (operations - float8) / gpu.bf16 + float8 / gpu.products(passes.float8)
    computed = rows * seconds / layout.world
    # Of the experts' weights only those that some token takes need be read.
    weights = max(passes.stage_weights[0]) / layout.tp * passes.itemsize
    read = weights * (1 if passes.trained is None else 2) / gpu.hbm
    if passes.trained != "weights":
        return updates * max(computed, read)
    ideal = replace(passes, machine=at_peaks(passes.machine))
    return updates * (max(computed, read, ideal.reduce_seconds()) + ideal.adam_seconds())
