"""What becomes of memory that a process frees on a CPU: it is kept for the next tensors, as CUDA's caching allocator keeps it.

glibc gives large blocks back to the kernel when they are freed, and the next step asks for as many: every page of them is then
mapped and zeroed again, which tests/util/test_freed_memory.py counts. Other C libraries are left as they are.
"""

import ctypes
import platform

# Parameters of mallopt(3), and what they are set to.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
KEPT_BYTES = 1 << 30  # free memory at the heap's end that is not given back
MAPPED_BYTES = 1 << 28  # a larger block is mapped, and given back when it is freed


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
