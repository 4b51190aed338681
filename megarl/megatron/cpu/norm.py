"""RMS norm in plain torch (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4), with a backward pass of its own.

On a CPU torch's own (2.13.0) is made of elementwise operations: their backward passes go through memory several times more,
and keep the normed values where the weight is trained.
"""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension; computed in float32.

    For its backward pass x is kept, and one number for each mean.

    x: [..., width], weight: [width] -> as x.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps): dx = r dy weight - r^3 x mean(dy weight x), dweight = sum(r dy x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, grad, wide_weight = x.float(), grad.float(), weight.float()
        product = grad * wide
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (scale.flatten() @ product.flatten(0, -2)).to(weight.dtype)
        along = (product @ wide_weight)[..., None].mul_(scale**3).div_(x.shape[-1])
        grad_x = torch.mul(grad, wide_weight, out=product).mul_(scale).addcmul_(wide, along, value=-1)
        return grad_x.to(x.dtype), grad_weight, None
