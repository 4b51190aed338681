"""The entry points of this room: they supply the parts that SGLang's wheel lacks on a machine without a GPU, without editing SGLang.

Seen with sglang 0.5.21, torch 2.13.0, torchvision 0.28.0. setup.py names them. The first two run in every process, SGLang's
spawned schedulers included:

* `on_torch_import` (torch.backends) runs at the end of `import torch`;
* `on_sglang_start` (sglang.srt.plugins) runs when SGLang loads its plugins, before its models;
* `on_scheduler_start` (megarl.cpu_engine) is called by the schedulers of engines that megarl starts, and by no other process.

Guarantees: a module or operator that is really installed always wins, since the stand-ins are
asked last; nothing of SGLang's is touched unless SGLANG_USE_CPU_ENGINE=1, SGLang's own switch for its
CPU engine; `import torch` costs two list operations more, and imports nothing more.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

SWITCH = "SGLANG_USE_CPU_ENGINE"


def on_torch_import() -> None:
    """Install the import hooks. Called by torch; must not import torch's or SGLang's parts."""
    sys.meta_path.insert(0, _TorchvisionSchemas())
    sys.meta_path.append(_StandIns())


def on_sglang_start() -> None:
    """Let SGLang's CPU engine work as its GPU engine does.

    It gets the GPU's weight layout, expert parallelism, weights in float8, memory that can be freed, and numbers that do not depend
    on other requests; it does without NCCL and pinned memory, and groups of gloo share a device. SGLang calls this in each of its processes (engine, schedulers,
    detokenizer) before it builds a model.
    """
    if os.environ.get(SWITCH) != "1":
        return
    from sglang.srt.utils import cpu_has_amx_support

    from megarl.sglang_cpu import batch_invariant, delta_net, fp8, gpt_oss, memory_saver, minimax_m2
    from megarl.util.gloo import share_device

    share_device()
    _register(HOOKS)
    _register(gpt_oss.HOOKS)
    batch_invariant.offer_backend()
    _register(batch_invariant.HOOKS)
    _register(memory_saver.hooks())
    if not cpu_has_amx_support():  # true only with SGLang's compiled kernels
        _register(fp8.HOOKS | delta_net.HOOKS | minimax_m2.HOOKS)
    _unpin_lora()


def on_scheduler_start() -> None:
    """Speed up the CPU engines that megarl starts; their schedulers call this before SGLang loads its plugins.

    Not part of `on_sglang_start`: engines that other programs start on this machine stay SGLang's own.
    """
    from megarl.sglang_cpu import attention, lean_decode

    attention.take_the_place_of_torch_native()
    _register(attention.HOOKS | lean_decode.HOOKS)


def _register(hooks: dict) -> None:
    """Register hooks, given by function of SGLang's: the kind of hook (a name of SGLang's HookType), and the hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (kind, hook) in hooks.items():
        HookRegistry.register(target, hook, HookType[kind])


def _present_experts(original, layer, x, topk_output, moe_runner_config):
    """SGLang's plain-torch experts for a rank that holds some of them (expert parallelism).

    Its dispatcher marks the experts of other ranks by -1, which its compiled kernels skip and its plain code takes for
    an index. So each pair of a token and an expert of this rank is passed as a token of its own.

    x: [tokens, hidden]; topk_output.topk_ids, .topk_weights: [tokens, experts of a token].
    """
    import torch

    tokens, slots = torch.nonzero(topk_output.topk_ids >= 0, as_tuple=True)
    if len(tokens) == topk_output.topk_ids.numel():
        return original(layer, x, topk_output, moe_runner_config)
    if len(tokens) == 0:
        return torch.zeros_like(x)
    pairs = topk_output._replace(
        topk_ids=topk_output.topk_ids[tokens, slots][:, None],
        topk_weights=topk_output.topk_weights[tokens, slots][:, None],
    )
    return torch.zeros_like(x).index_add_(0, tokens, original(layer, x[tokens], pairs, moe_runner_config))


def _unpadded_sizes(original, model_config, load_config, tp_size):
    """Keep the model's own sizes on a CPU, as on a GPU.

    SGLang's compiled AMX kernels want sizes in multiples of 32, so its CPU engine enlarges the MLP to a
    multiple of 32 * tp and, where tp does not divide the key/value heads, adds empty heads (GPUs repeat
    heads instead). Without those kernels the enlarged layout only costs memory, and it would be a second
    layout that every weight table had to know.
    """
    from sglang.srt.utils import cpu_has_amx_support

    if cpu_has_amx_support():
        return original(model_config, load_config, tp_size)
    config = model_config.hf_text_config
    for heads in ("linear_num_key_heads", "linear_num_value_heads"):
        if hasattr(config, heads):  # gated delta nets read them under the names of the enlarged numbers
            setattr(config, f"{heads}_cpu", getattr(config, heads))
    return model_config


def _no_nccl() -> str:
    """Let SGLang's search for NCCL fail, as it does under a CPU build of torch: SGLang then does without NCCL.

    The CUDA build (2.13.0+cu130) brings an NCCL that loads without a device, and SGLang 0.5.21 takes that
    for a GPU: each engine with TP ranks died while it made a communicator for the device "cpu".
    """
    raise ValueError("no NCCL: SGLang runs on the CPU, over gloo")


def _not_registered(buffer, registration_granularity_bytes=None) -> None:
    """Leave host memory as it is: SGLang registers it with CUDA for its copies from the device, also where there is none (0.5.21)."""


def _reduce_scatterv(group, input_, output=None, sizes=None):
    """Give each rank as many rows of a sum as it has requests: SGLang has NCCL for that, and sums all rows over gloo only where
    responses are deterministic (0.5.21)."""
    return group._deterministic_reduce_scatterv(input_, output, sizes)


HOOKS = {
    "sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv": ("REPLACE", _reduce_scatterv),
    "sglang.srt.mem_cache.pool_host.common._cuda_host_register": ("REPLACE", _not_registered),
    "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp": ("AROUND", _unpadded_sizes),
    "sglang.srt.distributed.device_communicators.pynccl_wrapper.find_nccl_library": ("REPLACE", _no_nccl),
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": ("AROUND", _present_experts),
}


def _unpin_lora() -> None:
    """Let SGLang's LoRA run without pinned memory.

    sglang/srt/lora pins its host tensors whatever the device is, and torch without a CUDA device
    raises on that. Only those modules get other factories: replacing torch.empty or torch.zeros
    everywhere gave wrong Hugging Face models.
    """
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.lora import layers, lora, mem_pool
    from sglang.srt.lora.backend import torch_backend

    torch.Tensor.pin_memory = lambda self, device=None: self
    for module in (layers, lora, mem_pool, torch_backend):
        module.torch = _UnpinnedTorch(torch)


class _UnpinnedTorch:
    """The torch module, with factories that ignore `pin_memory`."""

    def __init__(self, torch):
        self._torch = torch

    def __getattr__(self, name):
        value = getattr(self._torch, name)
        if name not in ("arange", "empty", "full", "ones", "tensor", "zeros"):
            return value
        return lambda *args, pin_memory=False, **kwargs: value(*args, **kwargs)


class _TorchvisionSchemas(importlib.abc.MetaPathFinder):
    """Declares torchvision's `nms` and `qnms` when its C extension did not.

    The index has torchvision for CUDA only. Its extension does not load on a CPU build of torch, and
    torchvision/_meta_registrations.py then fails on these two operators, which it takes for granted;
    transformers and SGLang import it. The moment of that import is the first at which it is known
    whether the extension loaded. This finder finds nothing: the module itself is the real one.
    """

    library = None  # keeps the declarations alive: torch drops them with their Library

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision._meta_registrations":
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                type(self).library = library = torch.library.Library("torchvision", "FRAGMENT")
                for name in ("nms", "qnms"):
                    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `triton` and `sgl_kernel` for SGLang's CPU engine, where they are not installed."""

    def find_spec(self, fullname, path=None, target=None):
        top = fullname.partition(".")[0]
        wanted = top == "triton" or fullname in ("sgl_kernel", "sgl_kernel.speculative", "sgl_kernel.mamba")
        if wanted and os.environ.get(SWITCH) == "1":
            is_package = top == "triton" or fullname == "sgl_kernel"
            return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)
        return None

    def create_module(self, spec):
        return _Triton(spec.name) if spec.name.startswith("triton") else types.ModuleType(spec.name)

    def exec_module(self, module):
        if module.__name__ == "triton":
            _fill_triton(module)
        elif module.__name__ == "sgl_kernel":
            _fill_sgl_kernel(module)
        elif module.__name__ == "sgl_kernel.speculative":
            _add_operators(module)
        elif module.__name__ == "sgl_kernel.mamba":
            from megarl.sglang_cpu.delta_net import FUNCTIONS

            vars(module).update(FUNCTIONS)


class _Placeholder:
    """Base of the classes that importers take from `triton`: accepts any arguments, does nothing."""

    def __init__(self, *args, **kwargs):
        pass


class _Triton(types.ModuleType):
    """A module whose every attribute is such a module or, if capitalised, a class; called, a decorator.

    SGLang imports triton at the top of modules that the CPU path needs too (srt/utils/common.py,
    srt/layers/dp_attention.py, ...) and decorates kernels that a CPU never launches.
    """

    __path__: list[str] = []  # noqa: RUF012  a package: submodules are looked up through the finder

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            child = type(name, (_Placeholder,), {})
        else:
            child = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, child)
        return child

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


def _fill_triton(module) -> None:
    module.__version__ = "3.7.1"  # the version that torch 2.13.0 pins; compared by importers
    module.backends = types.SimpleNamespace(backends={})  # torch looks here for a CPU backend
    module.cdiv = lambda a, b: -(a // -b)
    module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


def _fill_sgl_kernel(module) -> None:
    """The operators that SGLang calls on a CPU; any other name raises when it is called.

    The index has sgl_kernel for CUDA only. Importing a missing name must succeed, since SGLang imports
    many at the top of its modules.
    """

    def missing(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def fail(*args, **kwargs):
            raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's compiled CPU kernels")

        return fail

    import torch

    from megarl.sglang_cpu.delta_net import define_operators

    module.assign_req_to_token_pool_cpu = _assign_req_to_token_pool
    _add_operators(module)
    module.library = torch.library.Library("sgl_kernel", "FRAGMENT")
    module.library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    module.library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
    define_operators(module.library)
    module.__getattr__ = missing


def _add_operators(module) -> None:
    from megarl.sglang_cpu.speculation import OPERATORS

    vars(module).update(OPERATORS[module.__name__])


def _assign_req_to_token_pool(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len) -> None:
    """Record the KV cache slots of each request's tokens start..end."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def _murmur_hash32(seed, positions, columns):
    """MurmurHash3_x86_32 of (seed, position, column): int64 [n, m] in [0, 2**32).

    The noise of sampling with a seed per request; the numbers are those of SGLang's GPU kernel
    (sglang/kernels/ops/sampling/murmur_hash.py). seed, positions: [n]; columns: [m].
    """
    import numpy as np
    import torch

    # In numpy, which has uint32 arithmetic; torch (2.13.0) needs two to three passes over int32 for it.
    def rotate(x, bits):
        return x << np.uint32(bits) | x >> np.uint32(32 - bits)

    def mix(h, k):
        k = rotate(k * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        h = rotate(h ^ k, 13)
        h *= np.uint32(5)
        h += np.uint32(0xE6546B64)
        return h

    seeds = seed.numpy().view(np.uint64)
    h = mix(np.uint32(0), seeds.astype(np.uint32))  # the lower half of the bits
    h = mix(h, (seeds >> np.uint64(32)).astype(np.uint32))
    h = mix(h, positions.numpy().astype(np.uint32))
    h = mix(h[:, None], columns.numpy().astype(np.uint32)[None, :])
    h ^= np.uint32(16)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return torch.from_numpy(h.astype(np.int64))
