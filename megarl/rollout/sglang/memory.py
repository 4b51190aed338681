"""Device memory of an engine's weights and KV cache, measured inside SGLang on each of its ranks.

SGLang itself reports rank 0's figures, as they were at the start, in GiB; so its answer (`get_internal_state`) gets
another entry, which the ranks gather (0.5.21).

On a GPU the tensors' bytes are reported together with the driver's figures of the device, and a release is checked against these
(`unreleased`): nothing else shows that torch_memory_saver was never preloaded.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from megarl.weight_sync.receiver import RECEIVER, every_rank
from megarl.weight_sync.served_model import buffers_of, draft_runner_of

KEY = "megarl_memory"
DEVICE, PROCESS = "device_used", "process_used"  # the driver's figures
_POOLS = "sglang.srt.mem_cache."
_MIB = 1 << 20


def add_memory(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Add all ranks' figures to SGLang's answer. Every rank gets the requests in the same order; SGLang sends rank 0's answer."""
    result.internal_state[KEY] = every_rank(measure(scheduler), scheduler.tp_cpu_group)
    return result


def measure(scheduler: Any) -> dict[str, int]:
    """{"weights", "kv_cache", "sync_buffers"}: bytes on the device of this rank, by the storages of the tensors.

    Released tensors count as 0 bytes: the memory saver takes the pages from under their storages, which stay. Adapters count
    as weights, but are not released with them.
    """
    model = scheduler.tp_worker.model_runner.model
    allocator = scheduler.token_to_kv_pool_allocator
    models, pools = [model], [allocator.get_kvcache(), scheduler.req_to_token_pool]
    if (draft := draft_runner_of(model)) is not None:
        models.append(draft.model)
        pools.append(draft.token_to_kv_pool)
    tensors = {
        "weights": chain.from_iterable(map(_model_tensors, models)),
        "kv_cache": _pool_tensors(pools, set()),
    }
    released = scheduler.weight_updater.offload_tags
    receiver = getattr(model, RECEIVER, None)
    kept = {"weights": buffers_of(model).values(), "kv_cache": ()}
    return {
        **{tag: _num_bytes(kept[tag] if tag in released else found) for tag, found in tensors.items()},
        "sync_buffers": receiver.buffer_bytes if receiver is not None else 0,
        **(_driver_bytes() if torch.cuda.is_available() else {}),
    }


def _driver_bytes() -> dict[str, int]:
    """Used bytes of this rank's GPU, by all processes together; where NVML can tell, also those of this process: weights, cache, graphs,
    workspaces, CUDA's context."""
    free, total = torch.cuda.mem_get_info()
    found = {DEVICE: total - free}
    try:
        import pynvml
    except ImportError:
        return found
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:  # for example on a MIG slice, or without permission: the figure is left out
        return found
    for process in processes:
        # In a container with its own process ids no listed process is this one.
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            found[PROCESS] = process.usedGpuMemory
    return found


def unreleased(
    before: Sequence[Mapping[str, int]], after: Sequence[Mapping[str, int]], tags: Iterable[str]
) -> str | None:
    """A message if released memory did not become free on a device, given the memory of all TP ranks before and after; else None.

    Other processes may have taken some of the memory in the meantime, so it is enough if half of it became free.
    """
    for rank, (full, left) in enumerate(zip(before, after, strict=True)):
        if DEVICE not in full:
            continue
        released = sum(full[tag] - left[tag] for tag in tags)
        freed = full[DEVICE] - left[DEVICE]
        if freed < released // 2:
            return (
                f"TP rank {rank} released {released / _MIB:,.0f} MiB of {' and '.join(tags)}, but of its GPU only "
                f"{max(freed, 0) / _MIB:,.0f} MiB more are free: its scheduler runs without torch_memory_saver's library (the "
                'engine\'s log has "cannot be preloaded" then: libcudart has to be in LD_LIBRARY_PATH), or another process took the rest'
            )
    return None


def _model_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and derived tensors that SGLang keeps as plain attributes (DeepSeek's `w_kc`)."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _pool_tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that SGLang's memory pools hold, in attributes, lists and dictionaries of any depth."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list | tuple):
        children = list(value)
    elif isinstance(value, dict):
        children = list(value.values())
    elif type(value).__module__.startswith(_POOLS):
        children = list(getattr(value, "__dict__", {}).values())  # an enum of theirs has none
    else:
        return
    for child in children:
        yield from _pool_tensors(child, seen)


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their storages on the device, each counted once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
