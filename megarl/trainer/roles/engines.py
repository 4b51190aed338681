"""The rollout engines of a run: their configuration, whether their responses are deterministic, and news of a slow start.

Deterministic: responses depend on weights, prompt and seed alone, not on the engine's other requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.config import LoraConfig, RolloutConfig, TrainConfig, leaves_tokens_out
from megarl.config.schema.rollout import MOST_KEPT
from megarl.costs.phases import frees_engines
from megarl.models import ModelConfig
from megarl.rollout.engine import AdapterConfig, EngineConfig, SpeculationConfig
from megarl.rollout.sglang.before_import import cpu_engine_function
from megarl.trainer.roles.adapters import engine_adapters, served_adapters

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
    return_routed_experts: bool = False,
    most_kept: int | None = None,
) -> EngineConfig:
    """The configuration of an engine.

    Args:
        synced: whether the engine waits for weights; else it serves those in the model folder.
        releasable: whether its memory can be released.
        adapters: the adapters that it serves next to the weights; None: none.
        return_routed_experts: whether trajectories have the experts of their tokens.
        most_kept: the most tokens that a token is drawn from, which trajectories then have; None: all tokens.
    """
    device, dtype = "cuda" if use_gpu else "cpu", rollout_dtype(rollout, use_gpu)
    return EngineConfig(
        model_path=model_path,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        expert_parallel_size=rollout.expert_parallel_size,
        attention_data_parallel_size=rollout.attention_data_parallel_size,
        data_parallel_lm_head=rollout.data_parallel_lm_head,
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
        return_routed_experts=return_routed_experts,
        most_kept=most_kept,
        kv_cache_dtype=rollout.kv_cache_dtype,
        moe_runner_backend=rollout.moe_runner_backend,
        moe_a2a_backend=rollout.moe_a2a_backend,
        speculation=speculation(rollout),
        arguments=rollout.engine_kwargs or {},
    )


def synced_engine(
    config: TrainConfig, model: ModelConfig, adapters: LoraConfig | None, *, use_gpu: bool, freed: bool
) -> EngineConfig:
    """The configuration of an engine of a resolved training run.

    Args:
        adapters: the adapters that it serves next to the weights; None: none.
        freed: whether its memory leaves the devices in phases that do not need it.
    """
    policy, data = config.actor_rollout_ref, config.data
    return engine_config(
        policy.rollout,
        policy.model.path,
        data.max_prompt_length + data.max_response_length,
        use_gpu=use_gpu,
        synced=True,
        releasable=freed,
        return_routed_experts=policy.actor.router_replay == "rollout",
        most_kept=most_kept(policy.rollout),
        adapters=engine_adapters(model, adapters) if adapters is not None else None,
    )


def most_kept(rollout: RolloutConfig) -> int | None:
    """The most tokens that a token of a training rollout is drawn from; None: all."""
    if not leaves_tokens_out(rollout):
        return None
    return MOST_KEPT if rollout.top_k == -1 else rollout.top_k


def gpu_engine(config: TrainConfig, model: ModelConfig) -> EngineConfig:
    """The configuration of an engine of a resolved training run on GPUs."""
    policy = config.actor_rollout_ref
    freed = frees_engines(config, config.resource_pools)
    adapters, _ = served_adapters(policy.rollout, model, policy.model.lora, freed)
    return synced_engine(config, model, adapters, use_gpu=True, freed=freed)


def speculation(rollout: RolloutConfig) -> SpeculationConfig | None:
    """How the engines draft tokens; None: they do not."""
    given = rollout.speculative
    if given.algorithm is None:
        return None
    return SpeculationConfig(given.algorithm, given.num_draft_tokens, given.draft_path)


def rollout_dtype(rollout: RolloutConfig, use_gpu: bool) -> str:
    """The dtype of the engines' weights: the configured one, or the machine's default."""
    return rollout.dtype or ("bfloat16" if use_gpu else "float32")


def fp8_block(rollout: RolloutConfig) -> tuple[int, int] | None:
    """The blocks in which the engines hold weights in float8; None: they do not."""
    return rollout.quantization_block_size if rollout.quantization == "fp8" else None


KEY = "rollout.deterministic"


def is_deterministic(rollout: RolloutConfig, device: str, dtype: str, adapters: bool) -> bool:
    """The value of `rollout.deterministic`; where it is None, true if determinism costs little: on a CPU in float32 whose matrix
    products can be made batch invariant.

    Args:
        device, dtype: of the engines.
        adapters: whether they serve adapters next to the weights.

    Raises:
        ValueError: it is true, and these engines cannot do it.
    """
    if rollout.deterministic is False:
        return False
    if rollout.deterministic is None:
        if (device, dtype) != ("cpu", "float32"):
            return False
        return cpu_engine_function("obstacle")() is None
    reason = None
    if device == "cpu":
        if dtype != "float32":
            reason = f"on a CPU torch rounds products in {dtype} by their sizes; set rollout.dtype=float32"
    elif rollout.quantization is not None:
        reason = (
            f"SGLang chooses its kernels for rollout.quantization={rollout.quantization} by the size of a batch; "
            "leave the quantization out"
        )
    elif rollout.speculative.algorithm is not None:
        reason = (
            f"SGLang does not promise that a token has the same bits among drafted ones (rollout.speculative.algorithm="
            f"{rollout.speculative.algorithm}); leave the drafting out"
        )
    elif rollout.tensor_model_parallel_size > 2 * rollout.attention_data_parallel_size > 2:
        reason = (
            "where a group of data parallel attention has more than two devices, SGLang adds their parts of a token by one of two collectives, as "
            "the numbers of all groups' tokens are; raise rollout.attention_data_parallel_size"
        )
    elif adapters:
        reason = "SGLang does not promise it of its kernels for adapters; set rollout.lora_sync=merged"
    if reason is not None:
        raise ValueError(f"{KEY}=true: {reason} (or leave {KEY} out)")
    return True


SECONDS = 60.0
_LONGEST = 300  # characters of a line
_END = 1 << 14  # bytes of a log that are read


@contextmanager
def reporting_slow_start(say: Callable[[str], None], log: Path, seconds: float = SECONDS) -> Iterator[None]:
    """Print the last line of `log` every `seconds` during the block, if the file is on this machine and not empty."""
    over = threading.Event()

    def tell() -> None:
        waited = 0.0
        while not over.wait(seconds):
            waited += seconds
            line = last_line(log)
            if line:
                say(f"  {waited:.0f} s; {log.name}: {line}")

    thread = threading.Thread(target=tell, name="slow-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def last_line(log: Path) -> str:
    """The last line of a log in which progress bars overwrite themselves; empty: there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:_LONGEST]
