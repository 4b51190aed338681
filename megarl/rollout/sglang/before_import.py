"""Everything in an engine's processes that comes before SGLang is imported: their environment, and the first lines of a scheduler.

A scheduler is a new process on a GPU, and on a CPU a copy (fork) of its owner, which has imported SGLang. A copy spares the imports,
which take most of a start (`python benchmarks/imports.py`). CUDA does not survive a fork.

This module must not import SGLang.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import stat
import sys
import types
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from megarl.rollout.sglang import models as sglang_models
from megarl.util.memory import without_collection

# With expandable segments torch's allocator maps memory itself, so that regions of torch_memory_saver release nothing. The saver
# refuses the first name, and does not know the second (torch_memory_saver 0.0.10).
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SCHEDULER = "megarl.rollout.sglang.process"  # imported in the scheduler's process alone: it imports SGLang
CPU_ENGINE = "megarl.cpu_engine"  # a group of entry points
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def cpu_engine_function(name: str) -> Callable[..., Any]:
    """A function of the room that supplies what SGLang needs on a machine without a GPU; setup.py names these functions as entry
    points, and nothing imports the room otherwise.

    Raises:
        RuntimeError: this installation of megarl does not have the entry point.
    """
    found = tuple(entry_points(group=CPU_ENGINE, name=name))
    if not found:
        raise RuntimeError(
            f"megarl is installed without the entry point {name} of group {CPU_ENGINE}, which its setup.py has and engines on a "
            "CPU need: install it again"
        )
    return found[0].load()


def sglang_environment(device: str, tensor_parallel_size: int, nodes: int = 1) -> dict[str, str]:
    """Environment variables that an engine's process must be started with, before it imports torch.

    The caller chooses the network interface: an engine of one node, too, exchanges weights with trainers and engines on other machines.

    Args:
        nodes: number of the engine's nodes.
    """
    common = {"SGLANG_EXTERNAL_MODEL_PACKAGE": sglang_models.__name__}
    if nodes > 1:
        # Else SGLang blocks the processes of all nodes but the first as long as they live.
        common["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    if device != "cpu":
        # DeepGEMM, which multiplies in float8, compiles a kernel for every number of tokens up to 16,384 and every shape during the
        # first start, 10 to 20 minutes; with this it compiles some 3,000 of them (deep_gemm_wrapper/compile_utils.py). They are kept in
        # the user's cache (SGLANG_DG_CACHE_DIR).
        return {**common, "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "1"}
    groups = "|".join(str(rank) for rank in range(tensor_parallel_size))
    return {
        **common,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": groups,  # one group a rank; only SGLang's compiled kernels would bind
        "SGLANG_EAGER_INPUT_NO_COPY": "1",  # no copy into buffers that stay where they are, which CUDA graphs need
        "OMP_NUM_THREADS": "1",  # of each TP rank
        "SGLANG_MAMBA_CONV_DTYPE": "float32",  # of gated delta nets' windows; else bfloat16 in a float32 model, too
        "TORCH_COMPILE_DISABLE": "1",  # no compiler needed, and no minutes of compiling
    }


def prepare_schedulers(environment: MutableMapping[str, str], packages: Path, dtype: str) -> None:
    """Change the environment of an engine's owner on GPUs before it starts schedulers, which inherit it.

    Args:
        packages: the folder in which torch is installed.
        dtype: of the model.
    """
    environment["SGLANG_MAMBA_CONV_DTYPE"] = dtype  # of gated delta nets' windows; else bfloat16
    for name in _ALLOCATOR:
        environment.pop(name, None)
    # torch_memory_saver is preloaded into the schedulers and needs libcudart before torch loads its own. Where ld.so finds none, it
    # skips the saver with a line on standard error, and no memory is ever released.
    folders = sorted({str(path.parent) for path in packages.glob("nvidia/*/lib/libcudart.so.*")})
    known = [folder for folder in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    if folders:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*known, *(f for f in folders if f not in known)])


class SchedulerMain:
    """A scheduler's main function, for multiprocessing to pickle.

    multiprocessing pickles the target before the arguments, whose classes are SGLang's: so the code that unpickles this object runs
    before the import of SGLang.
    """

    def __reduce__(self) -> tuple:
        return _begin, ()

    def __call__(self, *args, **kwargs) -> None:
        """Arguments are those of SGLang's `run_scheduler_process`."""
        die_with_parent()
        if multiprocessing.get_start_method() == "fork":
            let_go_of_sockets()
            _share_title()
            multiprocessing.set_start_method("spawn", force=True)  # what SGLang expects
        with without_collection():
            run_scheduler = import_module(_SCHEDULER).run_scheduler
        gc.enable()
        run_scheduler(*args, **kwargs)


def _begin() -> SchedulerMain:
    die_with_parent()
    gc.disable()  # until `__call__`, which imports under `without_collection`
    return SchedulerMain()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends.

    SGLang asks for the same, but only after seconds of imports: an owner that dies before that
    leaves a scheduler behind. An owner that has died already is noticed as soon as multiprocessing has set the parent process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that are spawned within the block do not import this one's main module and its imports, which for an engine's owner
    are all of Ray (Python's multiprocessing/spawn.py, get_preparation_data)."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def forked() -> Iterator[None]:
    """Processes that multiprocessing's own functions start within the block are copies (forks) of this one.

    Only the calling thread is copied. Locks that other threads hold at that moment stay taken in the copy: Python and the C library
    reset their own; Ray's are not used there.
    """
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def let_go_of_sockets() -> None:
    """Drop the copies of the owner's sockets, so that its connections end with it: Ray's raylet would otherwise take this process for
    the owner. The file descriptors are kept open on /dev/null, since the owner's objects, which are copied too, may close them
    at any time."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (int(name) for name in os.listdir("/proc/self/fd")):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:  # the descriptor of the listing itself, which is closed by now
            continue
        if is_socket:
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _share_title() -> None:
    """Let SGLang set process titles by Ray's function: Ray has overwritten the memory in which setproctitle would look (Ray 2.60)."""
    ray = sys.modules.get("ray")
    if ray is not None:
        import setproctitle

        setproctitle.setproctitle = ray._raylet.setproctitle
