"""Transformer Engine's own Python code over kernels that know shapes only.

The package `transformer_engine` is pure Python; its kernels are in the extension `transformer_engine_torch`, which needs CUDA.
`install` puts a module of that name there, whose functions allocate what the kernels return. Written from their callers in the Python
code of version 2.18.0; a function that is not known here raises an error with its name. Libraries' scratch memory is not modelled, except for
the Python code's own allocations.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megarl.shadow.mode import Shadow
from megarl.shadow.transformer_engine.float8 import as_matrix, kernels, product, sizes

VERSION = "2.18.0"
EXTENSION = "transformer_engine_torch"
_LIBRARIES = {"get_cublasLt_version": 130000, "get_cudnn_version": 92000, "get_num_cublas_streams": 4}
_NO = ("device_supports_multicast", "ubuf_built_with_mpi")
# They write into tensors that they are given.
_IN_PLACE = (
    *(
        "multi_tensor_adam",
        "multi_tensor_adam_param_remainder",
        "multi_tensor_adam_fp8",
        "multi_tensor_adam_capturable",
    ),
    *(
        "multi_tensor_adam_capturable_master",
        "multi_tensor_sgd",
        "multi_tensor_scale",
        "multi_tensor_scale_tensor",
    ),
    *("multi_tensor_unscale_l2norm", "multi_tensor_compute_scale_and_scale_inv"),
    *("thd_second_half_lse_correction", "thd_out_correction", "thd_grad_correction"),
    "fused_topk_with_score_function_bwd",
)


class DType(enum.IntEnum):
    """transformer_engine::DType."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def install(current: Callable[[], Shadow | None]) -> None:
    """Let `transformer_engine.pytorch` import, and count the operations of its matrix products and attention.

    Args:
        current: the shadow that runs now; None: none does.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the package's own way not to load its libraries
    extension = types.ModuleType(EXTENSION)
    _enums(extension)
    for name, kernel in _kernels(current).items():
        setattr(extension, name, kernel)
    for name in _IN_PLACE:
        setattr(extension, name, lambda *args, **kwargs: None)
    for name, answer in (*_LIBRARIES.items(), *((name, False) for name in _NO)):
        setattr(extension, name, lambda *args, answer=answer: answer)
    extension.get_grouped_gemm_setup_workspace_size = lambda *args: 1 << 20
    extension.__getattr__ = _unknown
    for name in _names_used():  # the package imports some of them by `import *`
        if name not in vars(extension):
            setattr(extension, name, _unknown(name))
    sys.modules[EXTENSION] = extension
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch

    _attention_takes_fakes()


def forget_workspaces() -> None:
    """Free tensors that the package keeps on the device for the life of its process: the next rank begins without them."""
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module import base

    base._dummy_wgrads.clear()
    for function in vars(gemm).values():
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()


def _unknown(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{EXTENSION}.{name} has no shapes in a shadow run")

    return call


def _names_used() -> set[str]:
    """Every name of the extension that the package's Python code mentions."""
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.submodule_search_locations, "device.missing() has looked for it"
    files = Path(spec.submodule_search_locations[0], "pytorch").rglob("*.py")
    return {name for file in files for name in re.findall(r"\btex\.(\w+)", file.read_text())}


def _enums(extension: types.ModuleType) -> None:
    """The types of the extension; members of enums without values here are their own names."""
    extension.DType = DType
    extension.FP8FwdTensors = enum.IntEnum(
        "FP8FwdTensors",
        [f"GEMM{number}_{what}" for number in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
        start=0,
    )
    extension.FP8BwdTensors = enum.IntEnum(
        "FP8BwdTensors",
        [f"GRAD_{what}{number}" for number in (1, 2, 3) for what in ("OUTPUT", "INPUT")],
        start=0,
    )
    formats = enum.IntEnum("RoutingMapFormat", ["BYTEMAP", "BITMAP_U8"], start=0)
    extension.NVTERoutingMapFormat = extension.RoutingMapFormat = formats
    extension.NVTE_Fused_Attn_Backend = enum.IntEnum(
        "NVTE_Fused_Attn_Backend",
        ["NVTE_No_Backend", "NVTE_F16_max512_seqlen", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8"],
        start=0,
    )
    for name in (
        *("NVTE_QKV_Layout", "NVTE_QKV_Format", "NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_Softmax_Type"),
        *(
            "CommOverlapType",
            "CommOverlapAlgo",
            "Float8BlockScaleTensorFormat",
            "CommGemmOverlapRole",
            "CommOverlapMethod",
        ),
    ):
        setattr(extension, name, _Named(name, (), {}))
    for name in (
        *("CommOverlap", "CommOverlapP2P", "CommOverlapHelper", "CommOverlapCore", "CommOverlapBase"),
        *("CommOverlapP2PBase", "FP8TensorMeta"),
    ):
        setattr(extension, name, type(name, (), {}))


class _Named(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        member = f"{cls.__name__}.{name}"
        setattr(cls, name, member)
        return member


def _dtype(code: Any, like: torch.Tensor) -> torch.dtype:
    if code is None:
        return like.dtype
    return code if isinstance(code, torch.dtype) else _DTYPES[DType(int(code))]


def _kernels(current: Callable[[], Shadow | None]) -> dict[str, Callable[..., Any]]:
    """The kernels, which allocate their results, by name; arguments in the order of the extension's own."""

    def count(kernel: str, number: float) -> None:
        shadow = current()
        if shadow is not None:
            shadow.count_flops(kernel, number)

    float8 = kernels()

    def generic_gemm(
        A, transa, B, transb, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, *rest, **more
    ):
        """cuBLAS's columns are our rows: out [.., rows of op(B), columns of op(A)] = op(B) op(A)."""
        assert not gelu and quantizer is None
        a, b = (as_matrix(matrix) for matrix in (A, B))
        rows, inner = (b[1], b[0]) if transb else (b[0], b[1])
        inner_of_a, columns = (a[1], a[0]) if transa else (a[0], a[1])
        assert inner == inner_of_a, (A.shape, transa, B.shape, transb)
        count(product((A, transa), (B, not transb)), 2 * rows * columns * inner)
        if out is None:
            shape = (rows, columns) if transb else (*sizes(B)[:-1], columns)
            out = torch.empty(shape, dtype=_dtype(out_dtype, A), device=A.device)
        assert out.numel() == rows * columns, (out.shape, rows, columns)
        bias_grad = torch.empty(rows, dtype=A.dtype, device=A.device) if grad and bias is not None else None
        return out, bias_grad, None, None

    def te_general_grouped_gemm(A, transa, B, transb, out, out_dtype, m_splits, bias, *rest):
        for a, b in zip(A, B, strict=True):
            (rows, inner), (rows_of_a, columns) = as_matrix(b), as_matrix(a)
            if rows * inner:
                # Both share the dimension that is summed over: the rows of both where B is transposed, else B's columns.
                other = columns if transb else rows_of_a * columns // inner
                count(product((a, transa), (b, not transb)), 2 * rows * inner * other)
        return bias

    def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, margin, zero_centered):
        y = torch.empty(x.shape, dtype=_dtype(dtype, x), device=x.device) if out is None else out
        if quantizer is not None:
            assert out is None
            y = float8["quantize"](y, quantizer)  # a kernel of its own, after the norm's
        return y, None, torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)

    def rmsnorm_bwd(dz, x, rsigma, weight, margin, zero_centered):
        return torch.empty_like(x), torch.empty_like(weight)

    def fused_rope(t, *rest):
        return torch.empty(t.shape, dtype=t.dtype, device=t.device)

    def get_fused_attn_backend(
        training,
        q,
        kv,
        layout,
        bias,
        mask,
        softmax,
        dropout,
        heads,
        groups,
        max_q,
        max_kv,
        dim_qk,
        dim_v,
        *rest,
    ):
        assert max(dim_qk, dim_v) <= 256 and dim_qk % 8 == dim_v % 8 == 0, (dim_qk, dim_v)
        return sys.modules[EXTENSION].NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen

    def fused_attn_fwd(*args):
        before, cu_q, q, v = args[12][0], args[14], args[16], args[18]
        lengths = (cu_q[1:] - cu_q[:-1]).tolist()
        # Of a sequence half of all pairs, or those within a window.
        pairs = [n * n / 2 if before < 0 else n * n / 2 - max(0, n - before - 1) ** 2 / 2 for n in lengths]
        count("te.attention", 2 * sum(pairs) * q.shape[-2] * (q.shape[-1] + v.shape[-1]))
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        # cuDNN's log-sum-exp.
        statistics = torch.empty((*q.shape[:-1], 1), dtype=torch.float32, device=q.device)
        return [out, statistics, torch.empty(2, dtype=torch.int64, device=q.device)]

    def fused_attn_bwd(*args):
        q, k, v = args[19:22]
        sinks = None
        if not str(args[13]).endswith("NVTE_VANILLA_SOFTMAX"):
            sinks = torch.empty((1, q.shape[-2], 1, 1), dtype=torch.float32, device=q.device)
        return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, sinks]

    def multi_tensor_l2norm(chunk, flag, lists, per_tensor):
        norm = torch.empty(1, dtype=torch.float32, device="cuda")
        return norm, torch.empty(len(lists[0]) if per_tensor else 0, dtype=torch.float32, device="cuda")

    def swiglu(x, quantizer):
        return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)

    def thd_get_partitioned_indices(cu_seqlens, total, size, rank):
        return torch.empty(total // size, dtype=torch.int32, device=cu_seqlens.device)

    def thd_read_half_tensor(tensor, cu_seqlens, half):
        shape = list(tensor.shape)
        shape[1 if tensor.dim() > 3 and tensor.shape[0] == 2 else 0] //= (
            2  # keys and values are stacked before the tokens
        )
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    def thd_read_second_half_lse(lse, cu_seqlens, packed, tokens):
        shape = (lse.shape[0], tokens) if packed else (*lse.shape[:2], lse.shape[2] // 2)
        return torch.empty(shape, dtype=lse.dtype, device=lse.device)

    def splits_to_offsets(sizes, factor):
        return torch.empty(sizes.shape[0] + 1, dtype=torch.int64, device=sizes.device)

    def fused_topk_with_score_function_fwd(logits, topk, *rest):
        # The shadow chooses, as for torch.topk: the map has values, from which the numbers of tokens follow.
        chosen = torch.topk(logits, topk, dim=-1).indices
        taken = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter(-1, chosen, True)
        return (
            torch.empty_like(logits),
            taken,
            torch.empty(logits.shape, dtype=torch.float32, device=logits.device),
        )

    return {
        **float8,
        "fused_topk_with_score_function_fwd": fused_topk_with_score_function_fwd,
        "generic_gemm": generic_gemm,
        "te_general_grouped_gemm": te_general_grouped_gemm,
        "rmsnorm_fwd": rmsnorm_fwd,
        "rmsnorm_bwd": rmsnorm_bwd,
        "fused_rope_forward": fused_rope,
        "fused_rope_backward": fused_rope,
        "get_fused_attn_backend": get_fused_attn_backend,
        "fused_attn_fwd": fused_attn_fwd,
        "fused_attn_bwd": fused_attn_bwd,
        "multi_tensor_l2norm": multi_tensor_l2norm,
        "swiglu": swiglu,
        "thd_get_partitioned_indices": thd_get_partitioned_indices,
        "thd_read_half_tensor": thd_read_half_tensor,
        "thd_read_second_half_lse": thd_read_second_half_lse,
        "splits_to_offsets": splits_to_offsets,
        # Tokens in another order.
        **dict.fromkeys(
            ("thd_cp_rank_order_to_sequence_order", "thd_sequence_order_to_cp_rank_order"),
            lambda tensor, *rest: torch.empty_like(tensor),
        ),
    }


def _attention_takes_fakes() -> None:
    """The choice of a backend knows plain tensors alone: it takes fake tensors for such."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    choose = utils.get_attention_backend

    def get_attention_backend(attention_params: Any) -> Any:
        attention_params.qkv_type = torch.Tensor
        return choose(attention_params)

    utils.get_attention_backend = get_attention_backend
