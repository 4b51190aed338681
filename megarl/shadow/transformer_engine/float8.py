"""Transformer Engine's kernels of float8 blocks as stand-ins that know shapes only; written from csrc/extensions of 2.18.0.

The Python classes of quantised tensors are the package's own: these functions allocate what the kernels would fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

DATA_ALIGNMENT, SCALE_ALIGNMENT = 256, 16  # bytes, of a part's start in a buffer for all experts
SCALE = 4  # bytes
PRODUCT, FLOAT8_PRODUCT = "te.gemm", "te.gemm in float8"  # kernels, in the counts of operations
SUMMED = 16  # divides the number of products that cuBLAS adds up in float8


def sizes(matrix: Any) -> tuple[int, ...]:
    """The shape of a matrix, in float8 or not."""
    return tuple(matrix.size())


def as_matrix(operand: Any) -> tuple[int, int]:
    """Rows and columns of an operand of a product."""
    *rows, columns = sizes(operand)
    return prod(rows), columns


def product(*operands: tuple[Any, bool]) -> str:
    """The kernel of a product, by its operands' type. `operands`: each with whether it is summed along its rows (else along columns)."""
    quantised = [hasattr(matrix, "_rowwise_data") for matrix, _ in operands]
    if not any(quantised):
        return PRODUCT
    assert all(quantised), "both or none are in float8"
    for matrix, along_rows in operands:
        # cuBLAS adds up along rows alone: of the other orientation it takes the transposed copy.
        rows, columns = as_matrix(matrix)
        data = matrix._rowwise_data if along_rows else matrix._columnwise_data
        assert data is not None, "an orientation that was not quantised"
        assert (columns if along_rows else rows) % SUMMED == 0, (rows, columns)
    return FLOAT8_PRODUCT


def kernels() -> dict[str, Callable[..., Any]]:
    """By name; arguments in the order of the extension's own."""

    def quantize(
        tensor: torch.Tensor, quantizer: Any, output: Any = None, noop_flag: torch.Tensor | None = None
    ) -> Any:
        if output is None:
            return _tensor(quantizer, sizes(tensor), tensor.dtype, tensor.device)
        # An earlier copy lacks an orientation where it was made by a pass without gradients.
        made = _parts(quantizer, sizes(tensor), tensor.device)
        for name, part in made.items():
            if part is None or getattr(output, f"_{name}") is None:
                setattr(output, f"_{name}", part)
        return output

    def bgrad_quantize(tensor: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
        bias = torch.empty(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
        return bias, quantize(tensor, quantizer)

    def create_empty_quantized_tensor(
        quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
    ) -> Any:
        return _tensor(quantizer, tuple(shape), dtype, device)

    def split_quantize(
        tensor: torch.Tensor,
        splits: Sequence[int],
        quantizers: Sequence[Any],
        disable_bulk_allocation: bool = False,
    ) -> list[Any]:
        """All experts' rows: a buffer with data and scales for each orientation, which is there until the last of its parts is gone."""
        shapes = [(rows, tensor.shape[-1]) for rows in splits]
        parts: list[dict[str, torch.Tensor | None]] = [{} for _ in shapes]
        for columnwise in (False, True):
            side = "columnwise" if columnwise else "rowwise"
            used = getattr(quantizers[0], f"{side}_usage")
            datas = [
                quantizer.get_columnwise_shape(shape) if columnwise else shape
                for quantizer, shape in zip(quantizers, shapes, strict=True)
            ]
            scales = [
                quantizer.get_scale_shape(shape, columnwise)
                for quantizer, shape in zip(quantizers, shapes, strict=True)
            ]
            buffers = _in_one_buffer(datas, scales, tensor.device) if used else [(None, None)] * len(shapes)
            for part, (data, scale) in zip(parts, buffers, strict=True):
                part[f"{side}_data"], part[f"{side}_scale_inv"] = data, scale
        return [
            _made(quantizer, part, tensor.dtype) for quantizer, part in zip(quantizers, parts, strict=True)
        ]

    def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The transpose of weights that a pass without gradients, as a recomputed layer's first one, has quantised along rows alone."""
        rows, columns = as_matrix(data)
        return torch.empty((columns, rows), dtype=data.dtype, device=data.device) if out is None else out

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Rows go into tensors that are there."""

    def swap_first_dims(tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is not None:
            return out
        shape = (tensor.shape[1], tensor.shape[0], *tensor.shape[2:])
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    return {
        "quantize": quantize,
        "bgrad_quantize": bgrad_quantize,
        "create_empty_quantized_tensor": create_empty_quantized_tensor,
        "split_quantize": split_quantize,
        "fused_multi_row_padding": nothing,
        "fused_multi_row_unpadding": nothing,
        "fp8_transpose": fp8_transpose,
        "swap_first_dims": swap_first_dims,
    }


def _tensor(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    return _made(quantizer, _parts(quantizer, shape, device), dtype)


def _parts(quantizer: Any, shape: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor | None]:
    """Data and scales of each orientation that the quantiser is to make."""
    found: dict[str, torch.Tensor | None] = {}
    for side, columnwise in (("rowwise", False), ("columnwise", True)):
        used = getattr(quantizer, f"{side}_usage")
        data = quantizer.get_columnwise_shape(shape) if columnwise else shape
        scale = quantizer.get_scale_shape(shape, columnwise)
        found[f"{side}_data"] = torch.empty(data, dtype=torch.uint8, device=device) if used else None
        found[f"{side}_scale_inv"] = torch.empty(scale, dtype=torch.float32, device=device) if used else None
    return found


def _made(quantizer: Any, parts: dict[str, torch.Tensor | None], dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )

    facts = {
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "is_2D_scaled": quantizer.block_scaling_dim == 2,
    }
    if quantizer.internal:
        return Float8BlockwiseQTensorStorage(**parts, **facts, fake_dtype=dtype)
    rowwise = parts["rowwise_data"]
    assert rowwise is not None, "weights and what is cached have rows"
    return Float8BlockwiseQTensor(
        shape=rowwise.shape, dtype=dtype, device=rowwise.device, **parts, **facts, requires_grad=False
    )


def _in_one_buffer(
    datas: Sequence[tuple[int, ...]], scales: Sequence[tuple[int, ...]], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Data and scales of each part, in one tensor: all data, then all scales."""
    spans = [-(-prod(shape) // DATA_ALIGNMENT) * DATA_ALIGNMENT for shape in datas]
    spans += [-(-SCALE * prod(shape) // SCALE_ALIGNMENT) * SCALE_ALIGNMENT for shape in scales]
    *starts, total = accumulate(spans, initial=0)
    buffer = torch.empty(total, dtype=torch.uint8, device=device)
    for number, (data, scale) in enumerate(zip(datas, scales, strict=True)):
        first, second = starts[number], starts[len(datas) + number]
        yield (
            buffer[first : first + prod(data)].view(data),
            buffer[second : second + SCALE * prod(scale)].view(torch.float32).view(scale),
        )
