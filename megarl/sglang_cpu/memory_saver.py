"""SGLang's memory saver on a CPU: released memory is free for other processes, and comes back when it is resumed.

On a GPU SGLang allocates weights and KV cache in regions of torch_memory_saver, which frees the physical memory of
tensors and keeps their addresses. It has no CPU version, and without it SGLang's
`release_memory_occupation` answers and frees nothing (0.5.21). `CpuMemorySaver` does the same on a CPU, through the
same calls: when a region is paused, the pages of all tensors that were allocated within it go back to the operating system, except for
the two at the ends of each tensor, and are zeros when they are next touched.

As on a GPU, SGLang itself carries the model's buffers (rope caches) over, weights have to be synced again, and
nothing may use a region that is paused: `SGLangEngine` refuses every call that would.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def hooks() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Hooks by which SGLang finds a `CpuMemorySaver` where it looks for torch_memory_saver (0.5.21)."""
    saver = CpuMemorySaver()  # one a process: SGLang asks for an adapter in many places

    def create(original: Callable[..., Any], enable: bool) -> Any:
        return saver if enable else original(enable=False)

    return {"sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create": ("AROUND", create)}


class CpuMemorySaver:
    """The interface of SGLang's `TorchMemorySaverAdapter`, for memory of the CPU."""

    enabled = True

    def __init__(self) -> None:
        self._regions: dict[str, weakref.WeakSet[torch.UntypedStorage]] = {}
        self._paused: set[str] = set()

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Memory that is allocated within the block belongs to `tag`."""
        if enable_cpu_backup:
            raise NotImplementedError("released weights come back by a sync, not from a backup")
        with _Recorder(self._regions.setdefault(tag, weakref.WeakSet())):
            yield

    def pause(self, tag: str) -> None:
        """Free the memory of `tag`."""
        assert tag not in self._paused, tag
        self._paused.add(tag)
        for storage in self._regions.get(tag, ()):
            _free_pages(storage.data_ptr(), storage.nbytes())

    def resume(self, tag: str) -> None:
        """Allow the use of `tag`'s memory again; the system gives pages as they are touched."""
        self._paused.remove(tag)

    def check_validity(self, caller_name: str) -> None:
        """Nothing to check: this saver is always valid."""

    @contextmanager
    def _as_it_is(self, **kwargs: Any) -> Iterator[None]:
        """Nothing has to be preloaded, there are no CUDA graphs, and memory outside of all regions is never released."""
        yield

    configure_subprocess = cuda_graph = disable = _as_it_is


def _free_pages(address: int, num_bytes: int) -> None:
    """Give back the complete pages of a range of this process's memory."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length <= 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")


class _Recorder(TorchDispatchMode):
    """Notes the memory that torch's operators allocate while it is active."""

    def __init__(self, storages: weakref.WeakSet) -> None:
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_storage(value)._cdata for value in tree_leaves((args, kwargs)) if _is_memory(value)}
        for value in tree_leaves(result):
            # A result in the memory of an argument (a view, an update in place) was not allocated here.
            if _is_memory(value) and _storage(value)._cdata not in given:
                self.storages.add(_storage(value))
        return result


def _is_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
