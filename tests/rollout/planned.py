"""The planned memory of an engine's rank in these tests, in bytes, by the tags of SGLang's memory."""

import torch

from megarl.config.schema.models import LoraConfig
from megarl.costs.engine import (
    cache_bytes,
    engine_adapter_bytes,
    engine_weight_bytes,
    rotary_bytes,
    state_bytes,
)
from megarl.models import read_model_config
from megarl.rollout.engine import EngineConfig
from megarl.weight_sync.layouts import EngineLayout
from tests.rollout.runner import EngineProcess

SMALL = 1024  # bytes


def planned(engine: EngineConfig, lora: LoraConfig | None = None) -> dict[str, int]:
    """{"weights", "kv_cache"}; with `lora` the weights include the served adapters."""
    model = read_model_config(engine.model_path)
    groups = engine.attention_data_parallel_size
    layout = EngineLayout(
        engine.tensor_parallel_size,
        engine.expert_parallel_size,
        groups,
        dp_head=engine.data_parallel_lm_head,
    )
    dtype = getattr(torch, engine.dtype)
    context = engine.context_length or model.max_position_embeddings
    adapters = 0 if lora is None else engine_adapter_bytes(model, layout, lora, dtype)
    weights = engine_weight_bytes(model, layout, dtype, engine.fp8_block)
    return {
        "weights": weights + adapters + rotary_bytes(model, context),
        "kv_cache": cache_bytes(
            model, layout, dtype, engine.max_total_tokens // groups, engine.max_num_seqs, context, "cpu"
        )
        + state_bytes(model, layout, torch.float32, engine.max_num_seqs, "cpu"),
    }


def assert_as_planned(engine: EngineProcess, lora: LoraConfig | None = None) -> None:
    """Every rank holds the planned memory: weights to the byte; with adapters or float8, and in the cache, a little more, for SGLang's offsets,
    scales of derived weights, pointers and counters."""
    config = engine.call("config")
    expected, plain = planned(config, lora), lora is None and config.fp8_block is None
    for found in engine.call("memory"):
        more = {name: found[name] - size for name, size in expected.items()}
        assert 0 <= more["weights"] < (1 if plain else SMALL), (found, expected)
        assert 0 <= more["kv_cache"] < SMALL, (found, expected)
