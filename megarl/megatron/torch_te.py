"""Transformer Engine's modules in plain torch, under its parameter names.

Where Transformer Engine is missing, these let Megatron's own GPU layer specification be built, so that
parameter names, checkpoints and weight tables are the same on a CPU and on a GPU. Written against
megatron-core 0.19.2, whose specification functions look the modules up as globals of their own module.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import rms_norm

from megarl.megatron.attention import PackedAttention


class RMSNorm(torch.nn.RMSNorm):
    """Stands for TENorm with normalization="RMSNorm"."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        assert config.normalization == "RMSNorm"
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        # Under sequence parallelism each rank sees a part of the tokens: finalize_model_grads sums these.
        self.weight.sequence_parallel = config.sequence_parallel


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """Stands for TELayerNormColumnParallelLinear: RMS norm, then a column parallel linear layer."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **arguments: Any
    ) -> None:
        assert config.normalization == "RMSNorm"
        super().__init__(input_size, output_size, config=config, **arguments)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.layer_norm_weight.allreduce = True

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = rms_norm(input_, (input_.shape[-1],), self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


class TorchTEProvider(LocalSpecProvider):
    """Which modules stand for Transformer Engine's; the rest are Megatron's own."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """While this is active, Megatron's GPU specification is built from the modules above."""
    saved = gpt_layer_specs.TESpecProvider, gpt_layer_specs.TENorm
    gpt_layer_specs.TESpecProvider, gpt_layer_specs.TENorm = TorchTEProvider, RMSNorm
    try:
        yield
    finally:
        gpt_layer_specs.TESpecProvider, gpt_layer_specs.TENorm = saved
