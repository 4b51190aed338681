"""Memory of a Python process: pauses of the garbage collector, and freed blocks that are kept for the next tensors.

- Planning runs without the garbage collector (`collection_paused`), which takes up to half of its time.
- Imports, too (`without_collection`): torch, transformers and SGLang make a million objects when they are imported, none of which is ever
  garbage. The collector would search all of them again and again during the imports, and at times for as long as the process
  lives (`python benchmarks/imports.py` measures it).
- On a CPU freed blocks are kept (`keep_freed_memory`), as CUDA's caching allocator keeps them. glibc gives large blocks back to the
  kernel, and the next step asks for as many: every page of them is then mapped and zeroed again, which tests/util/test_memory.py
  counts. Other C libraries are left as they are.
"""

import ctypes
import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt(3), and what they are set to.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
KEPT_BYTES = 1 << 30  # free memory at the heap's end that is not given back
MAPPED_BYTES = 1 << 28  # a larger block is mapped, and given back when it is freed


@contextmanager
def collection_paused() -> Iterator[None]:
    """Garbage in cycles is not looked for meanwhile, in any thread; also a decorator.

    A plan makes millions of tuples, all to be kept and none in a cycle. The collector would go through all that there are
    again and again, because so many are new.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def without_collection() -> Iterator[None]:
    """Garbage is not collected meanwhile, and what there is at the end is left out of all later collections.

    For imports alone: cycles among other objects that end meanwhile would be left out, too, and never be freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def keep_freed_memory() -> None:
    """From now on this process keeps what it frees, until `return_freed_memory`."""
    libc = _glibc()
    if libc is None:
        return
    # One heap: those of other threads than the first end at 64 MiB, and are given back whole.
    for parameter, value in (
        (_MMAP_THRESHOLD, MAPPED_BYTES),
        (_TRIM_THRESHOLD, KEPT_BYTES),
        (_ARENA_MAX, 1),
    ):
        assert libc.mallopt(parameter, value) == 1, (parameter, value)


def return_freed_memory() -> None:
    """Give the kernel what is free now: what `torch.cuda.empty_cache` does on a GPU."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
