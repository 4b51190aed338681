"""RMS norms of queries and keys over all heads together, which are spread over tensor parallel ranks (MiniMax-M2); in torch, on any machine.

Megatron-core 0.19.2 norms each head by itself. Every rank has the complete weight and uses the rows of its heads: the gradient of the
other rows is 0, and Megatron's sum over tensor parallel ranks (`finalize_model_grads`, of parameters called `q_layernorm` or
`k_layernorm`) is the gradient.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.distributed import ProcessGroup


class AllHeadsNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the mean over all heads of all tensor parallel ranks.

    Args:
        hidden_size: width of a head.
        heads: the field of `config` that says how many heads all ranks have together.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: str, **unused: Any
    ) -> None:
        super().__init__()
        self.group, self.eps = parallel_state.get_tensor_model_parallel_group(), eps
        total = getattr(config, heads)
        self.own = total // self.group.size()
        self.weight = torch.nn.Parameter(
            torch.ones(total * hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, batch, heads of this rank, width of a head] -> the same."""
        rows = self.weight.view(-1, x.shape[-1]).narrow(0, self.group.rank() * self.own, self.own)
        return _AllHeadsNorm.apply(x.contiguous(), rows, self.eps, self.group)


class _AllHeadsNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps): dx = r dy weight - r^3 x mean(dy weight x), dweight = sum(r dy x) (Zhang and Sennrich 2019,
    arXiv:1910.07467). Both means are over all ranks' heads. Computed in float32; x is kept, and one number for each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: ProcessGroup) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32).square_()
        scale = _mean(squares, weight, group).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.group = group
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        product = grad * x.float()
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.einsum("tbhd,tb->hd", product, scale[..., 0, 0]).to(weight.dtype)
        along = _mean(product.mul_(weight).sum((-2, -1), keepdim=True), weight, ctx.group)
        grad_x = torch.mul(grad, weight, out=product).mul_(scale).addcmul_(x, along.mul_(scale**3), value=-1)
        return grad_x.to(x.dtype), grad_weight, None, None


def _mean(sums: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """The mean over all ranks' elements, from this rank's sums; `weight` has as many elements as a rank has of a token."""
    if group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    return sums.div_(weight.numel() * group.size())


def norm_all_heads(spec: TransformerBlockSubmodules) -> None:
    """Have the attention of the specification's layers norm queries and keys over all heads."""
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = partial(AllHeadsNorm, heads="num_attention_heads")
        attention.k_layernorm = partial(AllHeadsNorm, heads="num_query_groups")
