"""`torch.cuda` of a device that is not there: it tells a card's facts, streams and events do nothing, memory is the tracker's.

Written against torch 2.13.0's CPU build; each patch says what fails without it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # its tables are made of torch's functions as they are before they are patched
from torch._subclasses.fake_tensor import FakeTensor

from megarl import platform
from megarl.shadow.mode import Shadow
from megarl.shadow.values import read_values

aten = torch.ops.aten
GIB = 2**30


@dataclass(frozen=True)
class Card:
    """A GPU as torch describes it; `memory` in bytes."""

    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 80 * GIB
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    per_node: int = 8


def install(card: Card, current: Callable[[], Shadow | None]) -> None:
    """Let torch's CPU build, whose device is loaded, say that it has GPUs.

    Args:
        current: the shadow that runs now; None: none does.
    """
    assert torch.version.cuda is None, "the CPU build of torch has no CUDA of its own"
    _cuda_module(card, current)
    _memory(card, current)
    _modules_moved_in_place()
    _storages_resized(current)
    _attention_kernels()
    _derivatives()
    _pinned_memory()
    _compiled_functions(current)
    _launches_do_nothing()
    read_values(
        lambda: shadow.assume if (shadow := current()) is not None else None,
        lambda: shadow.wait() if (shadow := current()) is not None else None,
    )


class _Stream(platform.Stream):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = self.device_index = 0
        self.device_type = 1


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _launches_do_nothing() -> None:
    """Have launches of Triton kernels do nothing: they write into memory that was allocated before."""
    import triton.runtime.autotuner
    import triton.runtime.jit

    for kind in (triton.runtime.jit.JITFunction, triton.runtime.autotuner.Autotuner):
        kind.run = lambda self, *args, **kwargs: None


def _cuda_module(card: Card, current: Callable[[], Shadow | None]) -> None:
    """Devices, streams, random states: the CPU build has the names, and raises when they are called."""
    cuda, main = torch.cuda, _Stream()
    properties = SimpleNamespace(
        name=card.name,
        total_memory=card.memory,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.multiprocessors,
        warp_size=32,
        is_integrated=0,
        gcnArchName="",
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448,
    )
    generator = torch.Generator("cuda:0")
    cuda.default_generators = (generator,)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "_is_compiled": lambda: True,
        "is_initialized": lambda: True,
        "is_in_bad_fork": lambda: False,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: card.per_node,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_name": lambda device=None: card.name,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "current_stream": lambda device=None: main,
        "default_stream": lambda device=None: main,
        "stream": lambda stream=None: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": _nothing,
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), lambda device: 0),
        **dict.fromkeys(
            ("_lazy_init", "init", "set_device", "synchronize", "set_stream", "ipc_collect"), _nothing
        ),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(cuda.random, name, answers[name])
    cuda.Stream, cuda.Event = _Stream, platform.Event
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = _nothing
    torch.version.cuda = "13.0"
    for name, answer in {
        "_cuda_getDeviceCount": lambda: card.per_node,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": _nothing,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }.items():
        setattr(torch._C, name, answer)


def _memory(card: Card, current: Callable[[], Shadow | None]) -> None:
    """Have torch report the tracker's bytes as its allocator's and as page-locked memory."""

    def allocated(device: Any = None) -> int:
        shadow = current()
        return 0 if shadow is None else shadow.tracker.current

    def peak(device: Any = None) -> int:
        shadow = current()
        return (
            0 if shadow is None else max((phase.peak for phase in shadow.tracker.phases.values()), default=0)
        )

    cuda = torch.cuda
    cuda.memory_allocated = cuda.memory_reserved = allocated
    cuda.max_memory_allocated = cuda.max_memory_reserved = peak
    cuda.reset_peak_memory_stats = cuda.empty_cache = _nothing
    cuda.mem_get_info = lambda device=None: (card.memory - allocated(), card.memory)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: 0,
        cudaHostUnregister=lambda *args: 0,
        cudaMemGetInfo=lambda *args: cuda.mem_get_info(),
    )
    cuda.cudart = lambda: runtime


def _modules_moved_in_place() -> None:
    """`Module.to` swaps fake parameters in place, which weak references to them forbid: here it replaces them."""
    original = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if not any(isinstance(parameter, FakeTensor) for parameter in self.parameters()):
            return original(self, *args, **kwargs)
        for module in self.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = _moved(tensor, device, dtype)
        return self

    torch.nn.Module.to = to


def _moved(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None) -> torch.Tensor:
    """A parameter or buffer elsewhere, with the attributes that libraries have given it."""
    moved = tensor.data.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
    if moved.device == tensor.device and moved.dtype == tensor.dtype:
        return tensor
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
    for name, value in tensor.__dict__.items():
        if name not in moved.__dict__ and not hasattr(moved, name):
            setattr(moved, name, value)
    return moved


def _storages_resized(current: Callable[[], Shadow | None]) -> None:
    """Offloading frees a storage by its size, which no operation shows."""
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        original(self, size)
        shadow = current()
        if shadow is not None:
            shadow.tracker.resized(self)
        return self

    torch.UntypedStorage.resize_ = resize_


def _attention_kernels() -> None:
    """torch would choose among the kernels that it was built with, here none. On a GPU it is flash attention or, with a mask, unequal
    widths or float32, the memory-efficient one."""
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not isinstance(query, FakeTensor) or query.device.type != "cuda":
            return original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        equal = query.shape[-1] == value.shape[-1] <= 256
        if attn_mask is None and equal and query.dtype != torch.float32:
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        if enable_gqa and key.shape[1] != query.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        if attn_mask is not None:  # torch makes a bias of it
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, 0)
            attn_mask = bias.expand(*query.shape[:2], -1, -1)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]

    torch.nn.functional.scaled_dot_product_attention = attention


_KERNELS = torch.library.Library("aten", "IMPL")  # for as long as this module is there


def _derivatives() -> None:
    """Operations that are one kernel on a GPU: without CUDA's kernel torch would make several operations of one before a mode sees it."""
    _KERNELS.impl("silu_backward", lambda grad, x: torch.empty_like(x), "CUDA")


def _pinned_memory() -> None:
    """Page-locked memory needs a driver."""
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: (
        self.clone() if isinstance(self, FakeTensor) else self
    )
    torch.Tensor.is_pinned = lambda self, *args, **kwargs: False


def _compiled_functions(current: Callable[[], Shadow | None]) -> None:
    """Functions for `torch.compile` are executed operation by operation, but none of their intermediate tensors counts."""

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:  # a decorator with options
            return lambda function: compile(function, **options)
        if not callable(model) or isinstance(model, torch.nn.Module):
            return model

        @functools.wraps(model)
        def fused(*args: Any, **kwargs: Any) -> Any:
            shadow = current()
            with contextlib.nullcontext() if shadow is None else shadow.tracker.fused():
                return model(*args, **kwargs)

        return fused

    torch.compile = compile
