"""The costs of engines that serve references: bytes of a rank, and the seconds in which they judge a step's trajectories.

They have devices of their own, on which weights and cache stay. Weights that are in float8 in their folder are held in float8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config import RolloutConfig, TrainConfig, all_references, reference_key, served_references
from megarl.config.batches import resolve_batches
from megarl.config.resolve import ENGINE_ROOM, TEACHER
from megarl.costs.engine import (
    ServedModel,
    cache_bytes,
    engine_weight_bytes,
    rotary_bytes,
    state_bytes,
    token_bytes,
)
from megarl.costs.floors import at_peaks
from megarl.costs.reserve import EngineRank
from megarl.costs.speed import Machine
from megarl.models import ModelConfig
from megarl.plan.inputs import PlanInputs, engine_layout, precision


@dataclass(frozen=True)
class JudgeBytes:
    """A rank of an engine that serves the reference `role`: bytes of weights and cache; `lacking`: why a trajectory does not fit, or ""."""

    role: str
    pool: str
    weights: int
    cache: int
    lacking: str


def judge_bytes(config: TrainConfig, inputs: PlanInputs, limit: int) -> Iterator[JudgeBytes]:
    """The bytes of a rank of each engine that serves a reference. `config`: resolved; `limit`: bytes of a device."""
    longest = config.data.max_prompt_length + config.data.max_response_length + ENGINE_ROOM
    for role, engines in served_references(config).items():
        model, layout, dtype = _model(inputs, role), engine_layout(engines), precision(engines.dtype)
        weights = _weights(inputs, role, engines) + rotary_bytes(model, longest)
        states = state_bytes(model, layout, dtype, engines.max_num_seqs, "cuda")
        tokens = engines.max_total_tokens
        if tokens is None:
            room = engines.gpu_memory_utilization * limit - weights - states
            tokens = max(0, math.floor(room / token_bytes(model, layout, dtype)))
        cache = cache_bytes(model, layout, dtype, tokens, engines.max_num_seqs, longest) + states
        lacking = ""
        if tokens < longest:
            lacking = (
                f"the cache of {reference_key(role)}.engine holds {tokens:,} tokens, less than one trajectory and the tokens that SGLang keeps free, {longest:,}: "
                "raise its gpu_memory_utilization or tensor_model_parallel_size"
            )
        assert engines.resource_pool is not None, "checked"
        yield JudgeBytes(role, engines.resource_pool, weights, cache, lacking)


def judging_rank(config: TrainConfig, inputs: PlanInputs, pool: str) -> EngineRank | None:
    """A rank of the engines that serve a reference on a pool; None: there are none."""
    for role, engines in served_references(config).items():
        if engines.resource_pool == pool:
            model, tp = _model(inputs, role), engines.tensor_model_parallel_size
            latent = model.mla is not None
            return EngineRank(
                tp, engines.max_num_seqs, model.vocab_size, latent, attention_tp=tp, judges=True
            )
    return None


@dataclass(frozen=True)
class JudgeSeconds:
    """The seconds in which an engine judges its share of a step's trajectories; `floor`: at the GPUs' peaks."""

    name: str
    pool: str
    seconds: float
    floor: float


def judge_seconds(
    config: TrainConfig, inputs: PlanInputs, machine: Machine, prompt: float, response: float
) -> Iterator[JudgeSeconds]:
    """The seconds of all engines that serve references. Several teachers are assumed to judge equal parts of the trajectories.

    Args:
        prompt, response: mean tokens. The trajectories of a prompt share its computation.
    """
    batches, several = resolve_batches(config), len(all_references(config))
    for role, engines in served_references(config).items():
        texts = batches.trajectories_per_step / several / (engines.num_engines or 1)
        shared = texts * (1 - 1 / batches.responses_per_prompt)
        served, ideal = (_served(inputs, role, engines, on) for on in (machine, at_peaks(machine)))
        taken = served.prefill_seconds(texts, prompt + response) - served.prefill_seconds(shared, prompt)
        operations = ideal.prefill_operations(texts, prompt + response)
        operations -= ideal.prefill_operations(shared, prompt)
        name = "reference" if role == "ref" else f"teacher {role.removeprefix(TEACHER)}"
        assert engines.resource_pool is not None, "checked"
        yield JudgeSeconds(f"{name} prefill", engines.resource_pool, taken, operations / ideal.peak)


def _model(inputs: PlanInputs, role: str) -> ModelConfig:
    return inputs.teachers.get(role, inputs.model)


def _weights(inputs: PlanInputs, role: str, engines: RolloutConfig) -> int:
    model, layout, dtype = _model(inputs, role), engine_layout(engines), precision(engines.dtype)
    key = ("judge", role, layout, dtype)
    return inputs.once(key, lambda: engine_weight_bytes(model, layout, dtype, model.fp8_block))


def _served(inputs: PlanInputs, role: str, engines: RolloutConfig, machine: Machine) -> ServedModel:
    model, layout, dtype = _model(inputs, role), engine_layout(engines), precision(engines.dtype)
    flops, token = inputs.flops_of(model, "lm"), token_bytes(model, layout, dtype)
    weights, quantized = _weights(inputs, role, engines), model.fp8_block is not None
    return ServedModel(model, flops, layout, machine, weights, token, dtype.itemsize, quantized)
