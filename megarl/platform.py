"""The one CPU/GPU seam: which device and backend this machine has, and, where it has no CUDA device,
the `torch.cuda` semantics that megatron-core expects, on the CPU.

Promises: above this module the same code runs on gloo and on NCCL; where a CUDA device exists nothing is
changed, except that megatron-core's fused functions are compiled for any number of tokens. `install()` comes before the first import
of megatron-core (importing `megarl.megatron` ensures that).
It knows nothing of models, ranks or configuration.

Each patch says why it is there. They were written against megatron-core 0.19.2 and torch 2.13.0, whose CPU
build lacks the CUDA symbols altogether, while its CUDA build raises on first use where there is no device:
so everything that would initialise CUDA is replaced, not only the missing symbols.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device

from megarl.util.gloo import share_device
from megarl.util.memory import return_freed_memory

CPU = torch.device("cpu")

# Factories that megatron-core calls with `device="cuda"` or with a pinned-memory flag.
_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)


def is_cuda() -> bool:
    """True where torch can use a CUDA device."""
    return torch.cuda.is_available()


def backend() -> str:
    """The torch.distributed backend of this machine: "nccl" or "gloo"."""
    return "nccl" if is_cuda() else "gloo"


def device() -> torch.device:
    """The device of this process: the current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else CPU


def default_dtype() -> torch.dtype:
    """The dtype to train in when none is configured: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if is_cuda() else torch.float32


def torch_dtype(name: str) -> torch.dtype:
    """The floating point dtype that configurations call `name`, such as "bfloat16".

    Raises:
        ValueError: there is none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name!r} is not a floating point dtype; float32, bfloat16 and float16 are")
    return dtype


def resolve_dtype(name: str | None) -> torch.dtype:
    """The configured dtype, or this machine's default where none is."""
    return default_dtype() if name is None else torch_dtype(name)


@functools.cache
def install() -> None:
    """Give `torch.cuda` CPU semantics and import megatron-core under them; where CUDA exists import it unchanged.

    Calls after the first do nothing. Asserts that megatron-core is not imported yet: its modules bind
    `torch.compile` and `torch.cuda` names while they are imported.
    """
    _complete_typing()
    if is_cuda():
        with compiling_for_any_size():
            importlib.import_module("megatron.core.jit")
        return
    assert "megatron.core" not in sys.modules, "platform.install() must come before megatron.core is imported"
    _patch_cuda_module()
    _patch_rng()
    _patch_factories()
    _patch_tensor()
    _patch_collectives()
    _patch_megatron()


def _complete_typing() -> None:
    """Python 3.11's `typing` lacks `override`, the one name of Python 3.12 that emerging-optimizers 0.3.0 (Muon) uses; megatron-core
    0.19.2 imports that package wherever it is installed."""
    if sys.version_info < (3, 12):
        typing.override = importlib.import_module("typing_extensions").override


def _nothing() -> Callable[..., None]:
    """A new function that does nothing (torch.compile refuses one function under two names)."""
    return lambda *args, **kwargs: None


class Stream:
    """A stream where there is one timeline, as on the CPU: all streams are equal, and always up to date."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU

    def __enter__(self) -> "Stream":
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def query(self) -> bool:
        return True

    __exit__, wait_stream, wait_event, synchronize = (_nothing() for _ in range(4))


class Event:
    """A point on the one timeline; it has always passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    __init__, record, wait, synchronize = (_nothing() for _ in range(4))


def _patch_cuda_module() -> None:
    """Device selection, streams, events, memory and NVTX ranges."""
    cuda = torch.cuda
    # megatron-core passes the result on as `device=`, so it is a torch.device and not an index.
    cuda.current_device = lambda: CPU
    for name in ("set_device", "synchronize", "reset_peak_memory_stats"):
        setattr(cuda, name, _nothing())
    cuda.empty_cache = return_freed_memory
    cuda.get_device_capability = lambda *args: (0, 0)
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = lambda *args: Stream()
    cuda.default_stream = lambda *args: Stream()
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()


def _patch_rng() -> None:
    """The CUDA generator is the CPU's default generator (dropout and recompute use megatron's tracker of it)."""

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda new_state, device=None: torch.set_rng_state(new_state)
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))


def _names_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


def _cpu_factory(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _patch_factories() -> None:
    """Tensor factories take `device="cuda"` for the CPU and never pin memory."""
    # torch caches the set of device constructors on its first use, and `with torch.device(...)` acts on its members only.
    # Built after the wrapping it would hold the wrappers: Hugging Face's from_pretrained, which builds under
    # such a context, then leaves RoPE frequencies uninitialised.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _cpu_factory(getattr(torch, name)))


class _CpuTypeName(str):
    """What `Tensor.type()` answers: "torch.FloatTensor", equal to "torch.cuda.FloatTensor" too."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or str.__eq__(self.replace("torch.", "torch.cuda.", 1), other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def _patch_tensor() -> None:
    """Moves to "cuda" stay where they are; memory is never pinned; type names equal CUDA's."""
    tensor = torch.Tensor
    original_to, original_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(CPU if _names_cuda(arg) else arg for arg in args)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # The optimizers sort parameters by `param.type() in ["torch.cuda.FloatTensor", ...]`.
        if dtype is None:
            return _CpuTypeName(original_type(self))
        return original_type(self, dtype, *args, **kwargs)

    tensor.to, tensor.type = to, type_
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = _nothing()
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _patch_collectives() -> None:
    """Groups of gloo share a device (`megarl.util.gloo`). Lists may have unequal parts, which experts' tensor parallel ranks exchange and
    gloo's own collectives refuse: gloo's all-to-all takes any sizes, and carries them here.
    """
    import torch.distributed as dist

    share_device()

    original_gather, original_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        sizes = [len(part) if part.dim() else 0 for part in tensor_list]
        if len(set(sizes)) == 1:
            return original_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op
        output = tensor.new_empty(sum(sizes), *tensor.shape[1:])
        copies = torch.cat([tensor] * len(sizes))
        dist.all_to_all_single(output, copies, sizes, [len(tensor)] * len(sizes), group=group)
        for part, received in zip(tensor_list, output.split(sizes), strict=True):
            part.copy_(received)

    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = [len(part) if part.dim() else 0 for part in input_list]
        if len(set(sizes)) == 1:
            return original_scatter(output, input_list, op=op, group=group, async_op=async_op)
        assert op == dist.ReduceOp.SUM and not async_op
        parts = output.new_empty(len(sizes), *output.shape)
        dist.all_to_all_single(
            parts.flatten(0, 1), torch.cat(input_list), [len(output)] * len(sizes), sizes, group=group
        )
        output.copy_(parts.sum(0))

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


@contextlib.contextmanager
def compiling_for_any_size() -> Iterator[None]:
    """Let `torch.compile` compile for any size within the block. Micro-batches have different numbers of tokens: megatron-core's fusions,
    which bind `torch.compile` when its module `jit` is imported, would be compiled for the first number and again for others."""
    original = torch.compile
    torch.compile = functools.partial(original, dynamic=True)
    try:
        yield
    finally:
        torch.compile = original


@contextlib.contextmanager
def _without_compile() -> Iterator[None]:
    """`torch.compile` as identity: it imports dynamo and inductor, 3 to 5 s a process, for fusions that a
    CPU does not need."""
    original = torch.compile
    torch.compile = lambda function=None, **kwargs: function if function is not None else lambda f: f
    try:
        yield
    finally:
        torch.compile = original


def _stub_triton_kernels() -> None:
    """Stub the modules of megatron-core 0.19.2 and emerging-optimizers 0.3.0 that import triton unconditionally, where it is missing.

    All others guard the import. Their kernels run on CUDA only, so here only the names must exist.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    kernels = types.ModuleType("emerging_optimizers.triton_kernels")
    kernels.HAS_TRITON_340 = False
    sys.modules[kernels.__name__] = kernels
    stub = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    stub.GLOBAL_BLOCK_SIZE = 1024
    stub.paged_stash_copy_kernel = None
    stub.paged_stash_pop_kernel = None
    sys.modules[stub.__name__] = stub


def _patch_megatron() -> None:
    """Import megatron-core's training modules without compiling, and patch its own direct uses of CUDA."""
    _stub_triton_kernels()
    # The imports warn about each GPU library that is missing on a machine without a GPU.
    with _without_compile(), warnings.catch_warnings(action="ignore"):
        import megatron.core.jit

        megatron.core.jit.disable_jit_fuser()
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
        import megatron.core.tensor_parallel.random as tensor_parallel_random
        import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    # These two call torch's CUDA generator below the public functions.
    tensor_parallel_random._get_cuda_rng_state = get_rng_state
    tensor_parallel_random._set_cuda_rng_state = set_rng_state

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # all_to_all's split sizes must be numbers; the original converts only tensors with `.is_cuda`.
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
