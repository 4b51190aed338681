"""How the engines of a run are started, from its configuration."""

from __future__ import annotations

from megarl.config import RolloutConfig, TrainConfig
from megarl.costs.phases import frees_engines
from megarl.models import ModelConfig
from megarl.rollout.engine import AdapterConfig, EngineConfig
from megarl.trainer.roles.determinism import is_deterministic
from megarl.trainer.roles.lora_sync import engine_adapters, served_adapters

# Seconds: on a GPU the first start of a model compiles its kernels and captures graphs.
_START_TIMEOUTS = {"cpu": 300.0, "cuda": 1800.0}


def engine_config(
    rollout: RolloutConfig,
    model_path: str,
    context_length: int,
    *,
    use_gpu: bool,
    synced: bool,
    releasable: bool = False,
    adapters: AdapterConfig | None = None,
) -> EngineConfig:
    """
    Args:
        synced: whether it waits for weights; others serve those of the model folder.
        releasable: whether its memory can be released.
        adapters: what it serves beside the weights; None: nothing.
    """
    device, dtype = "cuda" if use_gpu else "cpu", rollout_dtype(rollout, use_gpu)
    return EngineConfig(
        model_path=model_path,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        expert_parallel_size=rollout.expert_parallel_size,
        device=device,
        dtype=dtype,
        fp8_block=fp8_block(rollout),
        load_format="dummy" if synced else "auto",
        context_length=context_length,
        max_num_seqs=rollout.max_num_seqs,
        max_total_tokens=rollout.max_total_tokens,
        enable_memory_saver=releasable,
        allow_unknown_version=rollout.allow_unknown_version,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        seed=rollout.seed,
        start_timeout=rollout.start_timeout or _START_TIMEOUTS[device],
        request_timeout=rollout.request_timeout,
        stop_token_ids=rollout.stop_token_ids,
        adapters=adapters,
        deterministic=is_deterministic(rollout, device, dtype, adapters is not None),
    )


def gpu_engine(config: TrainConfig, model: ModelConfig) -> EngineConfig:
    """An engine of a resolved training run on GPUs."""
    policy, data = config.actor_rollout_ref, config.data
    freed = frees_engines(config, config.resource_pools)
    adapters, _ = served_adapters(policy.rollout, model, policy.model.lora, freed)
    return engine_config(
        policy.rollout,
        policy.model.path,
        data.max_prompt_length + data.max_response_length,
        use_gpu=True,
        synced=True,
        releasable=freed,
        adapters=engine_adapters(model, adapters) if adapters is not None else None,
    )


def rollout_dtype(rollout: RolloutConfig, use_gpu: bool) -> str:
    """The dtype that the engines hold: the configured one, or the machine's own."""
    return rollout.dtype or ("bfloat16" if use_gpu else "float32")


def fp8_block(rollout: RolloutConfig) -> tuple[int, int] | None:
    """The blocks in which the engines hold weights in float8; None: they do not."""
    return rollout.quantization_block_size if rollout.quantization == "fp8" else None
