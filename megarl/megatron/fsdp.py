"""Models whose weights, gradients and optimizer states are shared out over data parallel ranks: Megatron-FSDP.

What a rank keeps, by Megatron's names of the levels (data and context parallel ranks share; ZeRO's stages 2 and 3, arXiv:1910.02054):

    optim_grads           weights whole, gradients and optimizer states shared
    optim_grads_params    all shared; a transformer layer's weights are gathered for its forward and its backward pass

The level `optim` is Megatron's distributed optimizer without any of this, and left to it: with whole gradients Megatron-FSDP still asks
Transformer Engine to overwrite them in each micro-batch (megatron_fsdp.py:511, `overwrite_main_grad`), so that on a GPU only the
last one's would be left.

Guarantees, with tests:
- Gradients, norms and updates are those of every other layout: losses are sums, and nothing divides their gradients.
- Weights are gathered during a pass and a weight sync alone (`gather`, `release`): between passes a rank holds its shard.
- Names, shapes and places of weights are those of the model before it was wrapped.

Megatron-FSDP (megatron-core 0.19.2) puts each layer's parameters end to end in a bucket, in any order, pads it and cuts it into equal
shards: what a rank holds of a parameter is a range of its elements, in row-major order, or nothing. It makes its mesh of devices from
all ranks, without pipeline stages (mcore_fsdp_adapter.py, `_get_dp_tp_mesh`), so a model with FSDP has none.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl import platform
from megarl.megatron.cpu.fsdp import numbered_device

FULL = "optim_grads_params"
LEVELS = ("optim_grads", FULL)
LARGEST_BUCKET = (
    40_000_000  # elements at which a bucket ends; Megatron-core's own default for small data parallel sizes
)


class Shard(NamedTuple):
    """What this rank holds of a parameter: the elements from `start` on, [number of elements], which may be none."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    values: torch.Tensor


def wrap_sharded(chunk: GPTModel, level: str) -> FullyShardedDataParallel:
    """The model with its weights, gradients and states shared out; its weights must be loaded.

    The gradients of each micro-batch are summed over ranks in float32 while its backward pass runs.
    While this runs the whole model of this rank's tensor parallel share is on the device, and its shards as they are made.

    Args:
        level: of `LEVELS`.
    """
    assert level in LEVELS, level
    dtype = next(chunk.parameters()).dtype
    trained = any(parameter.requires_grad for parameter in chunk.parameters())
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,  # as Megatron-FSDP has it in any case where gradients are shared
        overlap_param_gather=level == FULL,
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=level,
        # Else weights in float32 would have copies that equal them.
        megatron_fsdp_main_params_dtype=None if dtype == torch.float32 else torch.float32,
        megatron_fsdp_main_grads_dtype=torch.float32,
        suggested_communication_unit_size=largest_unit(chunk) - 1,
        # Weights in no layer would else be one bucket, whose gradients are summed when the last one is there. With shared weights it
        # must be one: heads read the output layer's weight, which is gathered with the embedding.
        bucket_size=None if level == FULL else LARGEST_BUCKET,
        # With it the gathering would begin before the optimizer's states have left.
        fsdp_all_gather_in_start_param_sync=False,
    )
    with numbered_device():
        wrapped = FullyShardedDataParallel(chunk.config, config, chunk, device=platform.device())
    wrapped.train(trained)
    return wrapped


def largest_unit(chunk: GPTModel) -> int:
    """Elements of the largest transformer layer.

    With one element less as its communication size Megatron-FSDP gathers one layer ahead, and lets one layer's gradients wait to be
    summed; its own default is half a billion weights and a billion gradients.
    """
    sizes = (
        sum(parameter.numel() for parameter in module.parameters())
        for module in chunk.modules()
        if isinstance(module, TransformerLayer)
    )
    return max(sizes)


def is_sharded(chunk: torch.nn.Module) -> bool:
    """Whether it was wrapped by `wrap_sharded`."""
    return isinstance(chunk, FullyShardedDataParallel)


def shares_weights(chunk: torch.nn.Module) -> bool:
    """Whether a rank holds only a share of the chunk's weights."""
    return is_sharded(chunk) and chunk.ddp_config.data_parallel_sharding_strategy == FULL


def parameters_of(chunk: FullyShardedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The model's own parameters by name, in their order. Megatron-FSDP puts others in their places between passes."""
    return chunk.module.raw_param


def shards_of(chunk: FullyShardedDataParallel) -> Iterator[Shard]:
    """This rank's shards of all parameters' weights, as views."""
    buffer = chunk.param_and_grad_buffer
    for name, parameter in parameters_of(chunk).items():
        weights = buffer.parameter_groups[buffer.param_to_param_group[parameter]].model_weight_buffer
        item = weights.param_idx[parameter]
        # No public function tells the range (0.19.2).
        start, _ = weights._get_item_slice_in_shard(item)
        yield Shard(name, parameter, start, weights.get_item(item, only_shard=True))


def first_element(updated: Any) -> int:
    """The first element of its parameter that an optimizer's tensor has: the start of the shard."""
    original = updated.orig_param
    buffer = updated._megatron_fsdp_model.param_and_grad_buffer
    weights = buffer.parameter_groups[buffer.param_to_param_group[original]].model_weight_buffer
    return weights._get_item_slice_in_shard(weights.param_idx[original])[0]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of an optimizer's tensor: all of it, unless Megatron-FSDP shares it out."""
    return getattr(tensor, "_local_tensor", tensor)


def weight_buffers(chunk: FullyShardedDataParallel) -> list[torch.Tensor]:
    """The tensors that hold the weights between passes."""
    return [group.model_weight_buffer.data for group in chunk.param_and_grad_buffer.parameter_groups]


def gradient_buffers(chunk: FullyShardedDataParallel) -> list[torch.Tensor]:
    """The tensors that hold the gradients."""
    groups = chunk.param_and_grad_buffer.parameter_groups
    return [group.main_grad_buffer.data for group in groups if group.main_grad_buffer is not None]


def gathered_bytes(chunk: FullyShardedDataParallel) -> int:
    """The bytes of gathered weights, 0 between passes."""
    if not shares_weights(chunk):
        return 0
    held = {tensor.untyped_storage()._cdata for tensor in weight_buffers(chunk)}
    storages = {
        parameter.untyped_storage()._cdata: parameter.untyped_storage()
        for parameter in parameters_of(chunk).values()
    }
    return sum(storage.nbytes() for key, storage in storages.items() if key not in held)


@torch.no_grad()
def gather(chunks: Sequence[torch.nn.Module]) -> None:
    """Gather all weights of the model into its parameters, until `release` or the end of the next pass; all ranks call it."""
    for chunk in filter(shares_weights, chunks):
        pipeline = chunk.module.all_gather_pipeline
        pipeline.all_gather_params(list(parameters_of(chunk).values()), prefetch=False)
        for bucket in range(pipeline.num_buckets):
            pipeline.wait_bucket_ready(bucket, False)


@torch.no_grad()
def release(chunks: Sequence[torch.nn.Module]) -> None:
    """Free gathered weights. Megatron-FSDP itself would keep embedding and head, which are in no layer, from their first pass on."""
    for chunk in filter(shares_weights, chunks):
        chunk.module.all_gather_pipeline.reset(preserve_non_fsdp_units=False)
