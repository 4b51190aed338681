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

# Parameters of mallopt(3), and their values.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
KEPT_BYTES = 1 << 30  # free memory at the end of the heap that is not given back
MAPPED_BYTES = 1 << 28  # a larger block is mapped, and given back when it is freed


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector in all threads for the block; also a decorator.

    A plan makes millions of tuples, all of which are kept and none of which is part of a cycle. The collector would go through all of
    them again and again, because so many are new.
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
    """Pause the garbage collector for the block, and exclude all objects that exist at its end from later collections.

    For imports only: garbage in cycles of other objects would be excluded, too, and never be freed.
    """
    with collection_paused():
        try:
            yield
        finally:
            gc.freeze()


def keep_freed_memory() -> None:
    """Let this process keep its freed memory from now on, until `return_freed_memory`."""
    libc = _glibc()
    if libc is None:
        return
    # One heap: the heaps of other threads end at 64 MiB, and are given back completely.
    for parameter, value in ((_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES), (_ARENA_MAX, 1)):
        assert libc.mallopt(parameter, value) == 1, (parameter, value)


def return_freed_memory() -> None:
    """Give free memory back to the kernel, as `torch.cuda.empty_cache` does on a GPU."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
