"""Transformer Engine's modules in plain torch, under its parameter names.

Where Transformer Engine is missing, these let Megatron's own GPU layer specification be built, so that
parameter names, checkpoints and weight tables are the same on a CPU and on a GPU. Written against
megatron-core 0.19.2, whose specification functions look the modules up as globals of their own module.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import mla_qk_norm_config, multi_latent_attention
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.functional import linear

from megarl.megatron.cpu import delta_net, rotary
from megarl.megatron.cpu.attention import PackedAttention

# RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4), with a backward pass of its own. On a CPU torch's own (2.13.0)
# consists of elementwise operations: their backward passes go through memory several times more, and keep the normed values where
# the weight is trained.


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


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    """A norm's factor: the weight, or 1 + weight in float32."""
    return weight.float() + 1 if zero_centered else weight


class RMSNorm(torch.nn.RMSNorm):
    """Stands for TENorm with normalization="RMSNorm"."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        assert config.normalization == "RMSNorm"
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.centered = config.layernorm_zero_centered_gamma
        # Under sequence parallelism each rank sees a part of the tokens: finalize_model_grads sums these.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, _factor(self.weight, self.centered), self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """Stands for TELayerNormColumnParallelLinear: RMS norm, then a column parallel linear layer."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **arguments: Any
    ) -> None:
        assert config.normalization == "RMSNorm"
        super().__init__(input_size, output_size, config=config, **arguments)
        self.eps = config.layernorm_epsilon
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.layer_norm_weight.allreduce = True

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        factor = _factor(self.layer_norm_weight, self.zero_centered_gamma)
        normed = rms_norm(input_, factor, self.eps)
        return super().forward(normed, *args, **kwargs)


class DuplicatedLinear(torch.nn.Linear):
    """Stands for TELinear with parallel_mode="duplicated": the same weight on every tensor parallel rank."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
        parallel_mode: str,
        **unused: Any,
    ) -> None:
        assert parallel_mode == "duplicated" and not bias
        device = torch.cuda.current_device()
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype, device=device)
        self.weight.allreduce = True
        # Each rank applies it to its part of the sequence: finalize_model_grads sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel
        self.weight.tensor_model_parallel = False
        self.weight.partition_dim, self.weight.partition_stride = 0, 1  # as Transformer Engine leaves them

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(input_), None


class GroupedLinear(torch.nn.Module):
    """Stands for TEGroupedLinear: `weight0`, `weight1`, ..., one for each expert of this rank.

    Megatron's dispatcher moves tokens between ranks: here each expert sees its own tokens only.
    """

    partition_dim: int  # of a weight [output, input], which expert tensor parallel ranks share

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert not bias or pg_collection.expt_tp.size() == 1, (
            "Megatron refuses it: each rank would add the bias"
        )
        self.num_gemms, self.pg_collection = num_gemms, pg_collection
        self.has_bias, self.returns_bias = bias, bias and skip_bias_add
        shape = [output_size, input_size]
        assert shape[self.partition_dim] % pg_collection.expt_tp.size() == 0
        shape[self.partition_dim] //= pg_collection.expt_tp.size()
        for index in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            # As Transformer Engine's: False where an expert's replicas, over which gradients are
            # summed, are on other ranks than a dense weight's.
            weight.allreduce = (
                config.expert_model_parallel_size == 1
                and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
            )
            weight.tensor_model_parallel = True
            weight.partition_dim, weight.partition_stride = self.partition_dim, 1
            self.register_parameter(f"weight{index}", weight)
            if bias:
                vector = torch.nn.Parameter(weight.new_zeros(output_size))
                vector.allreduce = weight.allreduce
                self.register_parameter(f"bias{index}", vector)

    def forward(
        self, input_: torch.Tensor, m_splits: list[int]
    ) -> tuple[torch.Tensor, list[torch.nn.Parameter] | None]:
        """input_ [tokens, input], sorted by expert; m_splits: how many tokens each expert has. Biases that are not added are returned."""
        biases = [
            self.get_parameter(f"bias{index}") for index in range(self.num_gemms if self.has_bias else 0)
        ]
        added = [None] * self.num_gemms if self.returns_bias or not biases else biases
        parts = [
            linear(tokens, self.get_parameter(f"weight{index}"), bias)
            for index, (tokens, bias) in enumerate(zip(input_.split(m_splits), added, strict=True))
        ]
        return torch.cat(parts), biases if self.returns_bias else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """For distributed checkpoints: all experts' weights are one tensor there, `weight`, with an axis of experts.

        As Transformer Engine's, but without its extra state (of FP8).
        """
        groups, metadata = self.pg_collection, ensure_metadata_has_dp_cp_group(metadata)
        assert not metadata.get("singleton_local_shards"), "a tensor for each expert is not supported"
        shards = {}
        for index in range(self.num_gemms):
            expert = groups.ep.rank() * self.num_gemms + index
            axis = (len(sharded_offsets), expert, groups.ep.size() * self.num_gemms)
            kinds = ("weight", "bias") if self.has_bias else ("weight",)
            made = make_sharded_tensors_for_checkpoint(
                {kind: self.get_parameter(f"{kind}{index}") for kind in kinds},
                prefix,
                {"weight": self.partition_dim},
                (*sharded_offsets, axis),
                tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for kind, shard in zip(kinds, made.values(), strict=True):
                shard.replica_id = (*shard.replica_id[:2], groups.expt_dp.rank())
                shards[f"{prefix}{kind}{index}"] = shard
        return shards


class ColumnParallelGroupedLinear(GroupedLinear):
    """Stands for TEColumnParallelGroupedLinear."""

    partition_dim = 0


class RowParallelGroupedLinear(GroupedLinear):
    """Stands for TERowParallelGroupedLinear."""

    partition_dim = 1


class TorchTEProvider(LocalSpecProvider):
    """Which modules stand for Transformer Engine's; the rest are Megatron's own."""

    def linear(self) -> type:
        return DuplicatedLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Callable[..., torch.nn.Module]:
        assert moe_use_grouped_gemm
        submodules = GroupedMLPSubmodules(
            linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear
        )
        return partial(TEGroupedMLP, submodules=submodules)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """While this is active, Megatron's GPU specification, and models made of it, have the modules above.

    Its rotary embedding and the kernels of gated delta nets are replaced for good: they are looked up whenever a model runs.
    """
    rotary.install()
    delta_net.install()
    stand_ins = [
        (gpt_layer_specs, "TESpecProvider", TorchTEProvider),
        (gpt_layer_specs, "TENorm", RMSNorm),
        (experimental_attention_variant_module_specs, "TESpecProvider", TorchTEProvider),
        # Latent attention compares its projections with TELinear, and asks for the modules of a "backend",
        # when a layer is made, not when its specification is.
        (multi_latent_attention, "TELinear", DuplicatedLinear),
        (mla_qk_norm_config, "get_backend", lambda transformer_impl: TorchTEProvider()),
    ]
    saved = [(module, name, getattr(module, name, None)) for module, name, _ in stand_ins]
    for module, name, stand_in in stand_ins:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name, original in saved:
            setattr(module, name, original)
