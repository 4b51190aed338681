"""The environment of an engine's process: what SGLang and the libraries below it read while they are imported."""

import os
from collections.abc import MutableMapping
from pathlib import Path

from megarl.rollout.sglang import models as sglang_models

# With expandable segments torch's allocator maps memory by itself, beneath torch_memory_saver, whose regions then release
# nothing: it refuses the first name, and does not know the second (torch_memory_saver 0.0.10).
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


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
        # DeepGEMM, which multiplies in float8, compiles a kernel for every number of tokens up to 16,384 and every shape during the
        # first start, 10 to 20 minutes; so it compiles some 3,000 of them (deep_gemm_wrapper/compile_utils.py). They are kept in
        # the user's cache (SGLANG_DG_CACHE_DIR).
        return {**common, "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "1"}
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


def prepare_schedulers(environment: MutableMapping[str, str], packages: Path) -> None:
    """Change the environment of an engine's owner on GPUs before it starts schedulers, which inherit it.

    Args:
        packages: the folder that torch is installed in.
    """
    for name in _ALLOCATOR:
        environment.pop(name, None)
    # torch_memory_saver is preloaded into the schedulers and needs libcudart before torch brings its own; where ld.so finds none it
    # leaves the saver out, with a line on standard error, and nothing is ever released.
    folders = sorted({str(path.parent) for path in packages.glob("nvidia/*/lib/libcudart.so.*")})
    known = [folder for folder in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    if folders:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*known, *(f for f in folders if f not in known)])
