"""The environment of an engine's process: what SGLang and the libraries below it read while they are imported."""

from megarl.rollout import sglang_models


def sglang_environment(
    device: str, tensor_parallel_size: int, threads: int = 1, nodes: int = 1
) -> dict[str, str]:
    """Environment variables that an engine's process must be started with, before it imports torch.

    Args:
        threads: CPU threads of each TP rank.
        nodes: of the engine; with several who starts its processes says which interface they use.
    """
    common = {"SGLANG_EXTERNAL_MODEL_PACKAGE": sglang_models.__name__}
    if nodes > 1:
        common["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = (
            "0"  # else a node but the first is busy as long as it lives
        )
    if device != "cpu":
        return common
    groups = "|".join(str(rank) for rank in range(tensor_parallel_size))
    if nodes == 1:
        common["GLOO_SOCKET_IFNAME"] = "lo"
    return {
        **common,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": groups,  # one group a rank; only SGLang's compiled kernels would bind
        "SGLANG_EAGER_INPUT_NO_COPY": "1",  # into buffers that stay where they are, as CUDA graphs need them
        "OMP_NUM_THREADS": str(threads),
        "TORCH_COMPILE_DISABLE": "1",  # no compiler needed, and no minutes of compiling
    }
