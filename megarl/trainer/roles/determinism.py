"""Whether responses depend on weights, prompt and seed alone, or also on what else the engine does."""

from megarl.config import RolloutConfig
from megarl.sglang_cpu.batch_invariant import obstacle

KEY = "rollout.deterministic"


def is_deterministic(rollout: RolloutConfig, device: str, dtype: str, adapters: bool) -> bool:
    """What `rollout.deterministic` says, or, where it says nothing, whether it costs little: on a CPU in float32, where its
    products can be made so.

    Args:
        device, dtype: of the engines.
        adapters: whether they serve adapters beside the weights.

    Raises:
        ValueError: it is true, and these engines cannot do it.
    """
    if rollout.deterministic is False:
        return False
    if rollout.deterministic is None:
        return (device, dtype) == ("cpu", "float32") and obstacle() is None
    reason = None
    if device == "cpu":
        if dtype != "float32":
            reason = f"on a CPU torch rounds products in {dtype} by their sizes; set rollout.dtype=float32"
    elif rollout.quantization is not None:
        reason = (
            f"SGLang chooses its kernels for rollout.quantization={rollout.quantization} by the size of a batch; "
            "leave the quantization out"
        )
    elif adapters:
        reason = "SGLang does not promise it of its kernels for adapters; set rollout.lora_sync=merged"
    if reason is not None:
        raise ValueError(f"{KEY}=true: {reason} (or leave {KEY} out)")
    return True
