"""Muon: which weights it updates, how data parallel ranks share them, and Megatron's settings for it.

Megatron's rule (0.19.2): Muon has every weight of two dimensions but the embedding and the head, that is projections, experts and routers;
AdamW has the others. Of a fused projection of queries, keys and values each of the three is orthogonalised by itself, over all heads;
gate and up of an MLP are one matrix. Here a value head, a matrix of one row, is AdamW's, too: made orthogonal it would be a unit vector.

With a distributed optimizer each data parallel rank updates full matrices (`LayerWiseDistributedOptimizer`), which must not be cut where
gradients are scattered: they lie in a buffer of their own, in which every rank's part has some of them. AdamW's weights are in another
one, cut anywhere as ever.

References: K. Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025, arXiv:2502.16982.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import megatron.core.optimizer
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import tag_params_for_buffer_routing
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.param_layout import FullParamLayout

from megarl.config.schema.models import MuonConfig, OptimConfig

MOMENTUM = "momentum_buffer"  # the one state of Muon, as emerging-optimizers 0.3.0 calls it
# torch's names for how products of float32 are computed.
_PRECISION = {"bfloat16": "medium", "float32": "highest"}


def settings(muon: MuonConfig) -> dict[str, Any]:
    """Fields of Megatron's OptimizerConfig."""
    return {
        "optimizer": "muon",
        "muon_momentum": muon.momentum,
        "muon_nesterov": muon.nesterov,
        "muon_num_ns_steps": muon.num_ns_steps,
        "muon_coefficient_type": muon.coefficients,
        "muon_fp32_matmul_prec": _PRECISION[muon.ns_dtype],
        "muon_scale_mode": muon.scale_mode,
        "muon_extra_scale_factor": muon.scale,
        "muon_tp_mode": muon.tp_mode,
    }


def whole_matrices(optim: OptimConfig) -> bool:
    """Whether each matrix must be on one data parallel rank to be updated."""
    return optim.optimizer == "muon"


def mark_matrices(chunks: list[GPTModel]) -> None:
    """Mark the weights that Muon updates, before gradients have buffers.

    Transformer Engine marks each weight as cut over tensor parallel ranks. Megatron (0.19.2) takes back that they are cut of those that all
    ranks have complete, as latent attention's projections down, but not the dimension, at which its Muon would gather them: the copies'
    step is another one than the matrix's.
    """
    for chunk in chunks:
        for weight in chunk.parameters():
            if not getattr(weight, "tensor_model_parallel", True):
                weight.partition_dim = -1
        head = getattr(chunk, "value_head", None)
        if head is not None:
            head.weight.is_embedding_or_output_parameter = True
    tag_params_for_buffer_routing(chunks)


def matrix_layout(
    chunk: GPTModel, ddp_config: DistributedDataParallelConfig, disable_bucketing: bool
) -> FullParamLayout:
    """Where the weights of a chunk lie in the buffers of a distributed optimizer: matrices uncut, others anywhere.

    Raises:
        ValueError: experts have parameters that are no matrices, which Megatron's distributed optimizer does not support next to Muon (0.19.2).
    """
    trained = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    if any(not getattr(weight, "allreduce", True) and weight.dim() != 2 for weight in trained):
        raise ValueError(
            "optim.optimizer=muon goes without megatron.use_distributed_optimizer=true for a model whose experts have biases, where "
            "expert_model_parallel_size is greater than 1; give use_distributed_optimizer=false"
        )
    # As the wrapper computes it.
    size: int | None = ddp_config.bucket_size or max(
        40_000_000, 1_000_000 * parallel_state.get_data_parallel_world_size()
    )
    if (
        disable_bucketing
        or not ddp_config.overlap_grad_reduce
        or parallel_state.get_pipeline_model_parallel_rank()
    ):
        size = None
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        trained,
        size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ddp_config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )


class _LayerWise(LayerWiseDistributedOptimizer):
    """The optimizer for float32 weights too: Megatron's own passes torch's bare optimizer to its step where there are no copies (0.19.2)."""

    def __init__(self, optimizers: list[Any], config: Any, *args: Any, **options: Any) -> None:
        if not config.bf16:
            inits = options["init_state_fn_list"]
            optimizers = [
                FP32Optimizer(inner, config, init) for inner, init in zip(optimizers, inits, strict=True)
            ]
        super().__init__(optimizers, config, *args, **options)


@contextlib.contextmanager
def layer_wise() -> Iterator[None]:
    """While this is active Megatron makes the class above in place of its own."""
    before = megatron.core.optimizer.LayerWiseDistributedOptimizer
    megatron.core.optimizer.LayerWiseDistributedOptimizer = _LayerWise
    try:
        yield
    finally:
        megatron.core.optimizer.LayerWiseDistributedOptimizer = before


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is Muon, whose state is a momentum alone."""
    return isinstance(optimizer, megatron.core.optimizer.emerging_optimizers.TensorParallelMuon)
