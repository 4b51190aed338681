"""Megatron's GPTModel from a model's facts, on this rank's place in a layout. The only place that builds one.

Guarantees:
- Parameter names are the ones of Megatron's Transformer Engine specification on every machine.
- A loss that is a plain sum gets gradients that are plain sums over micro-batches, data and context
  parallel ranks: nothing divides them (`finalize_gradients`).
- Parameters that are replicated over ranks start equal on all of them; the value head starts equal in
  every layout.

Needs `init_parallel` first. Seen with megatron-core 0.19.2.
"""

import logging
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer

from megarl import platform
from megarl.layout.grid import ParallelLayout, RankCoords, layers_of
from megarl.megatron.fsdp import is_sharded, parameters_of, wrap_sharded
from megarl.megatron.layer_spec import forget_routings, layer_modules, layer_spec
from megarl.megatron.lora.fp8_base import Float8Base, allocate, unallocated
from megarl.megatron.lora.lora import rank_pieces
from megarl.megatron.muon import mark_matrices, matrix_layout
from megarl.megatron.parallel import coords
from megarl.megatron.prediction import PredictingModel, prediction_spec
from megarl.megatron.sinks import settle_sinks
from megarl.megatron.sparse.indexer import add_indexers
from megarl.megatron.transformer_config import has_transformer_engine, rope_arguments, transformer_config
from megarl.models import BUFFERS, ModelConfig, padded_vocab_size
from megarl.models.float8 import FP8, SCALES, base_weights, check_base_block
from megarl.models.lora import linear_weights

INIT_STD = 0.02  # of every matrix's and the value head's random start


def build_model(
    config: ModelConfig,
    layout: ParallelLayout,
    *,
    head: str = "lm",
    dtype: torch.dtype,
    trainable: bool = True,
    recompute_granularity: str | None = None,
    recompute_modules: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    base_block: int | None = None,
    mtp: str | None = None,
    indexers: bool = False,
    seed: int = 1,
) -> list[GPTModel]:
    """This rank's model chunks: one, or `layout.vpp` of them.

    Args:
        head: "lm" for logits; "value" for a scalar head: the last chunk then has `value_head`
            (weight [1, hidden]), and `output_layer` is None.
        trainable: False for a model that is only evaluated: no gradients, evaluation mode.
        recompute_granularity: activations that backward computes again: None, "full" (each layer) or
            "selective" (`recompute_modules`; None: attention).
        overrides: further fields of Megatron's TransformerConfig.
        base_block: rows and columns of the blocks that share a scale where linear layers' weights are in float8: frozen, and zeros
            until they are loaded. None: the weights are in `dtype`.
        mtp: the model has its multi-token prediction layers, whose loss gives the rest of the model no gradient ("detached") or one
            ("attached"); None: it is built without them.
        indexers: whether the indexers of sparse attention are trained, by `megarl.megatron.sparse.learning`.
        seed: of the random start, which is meant to be overwritten by real weights.

    Raises:
        ValueError: the model does not divide by the layout (names both), or ranks' parts cut blocks.
    """
    assert head in ("lm", "value"), head
    assert not indexers or (config.indexer is not None and head == "lm" and base_block is None), (
        "checked before"
    )
    assert mtp is None or (head == "lm" and base_block is None), "checked before"
    settings = transformer_config(
        config, layout, dtype, recompute_granularity, recompute_modules, overrides, mtp=mtp
    )
    place = coords()
    held = _float8_base(config, layout, place, base_block)
    layers = layers_of(layout, config.num_layers, place.pp)
    chunks = []
    for chunk in range(layout.num_chunks):
        last = place.pp == layout.pp - 1 and chunk == layout.num_chunks - 1
        model = _build_chunk(
            config,
            settings,
            held=held.of_chunk(chunk),
            layers=layers[chunk],
            vocab_size=padded_vocab_size(config, layout.tp),
            first=place.pp == 0 and chunk == 0,
            last=last,
            vp_stage=chunk if layout.vpp else None,
            head=head,
            indexers=indexers,
        )
        _randomize(model, layers[chunk], seed, place)
        model.train(trainable).requires_grad_(trainable)
        chunks.append(model)
    return chunks


def wrap_for_training(
    chunks: list[GPTModel],
    *,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    use_distributed_optimizer: bool = True,
    overrides: Mapping[str, Any] | None = None,
    fsdp: str | None = None,
    matrices: bool = False,
) -> list[DistributedDataParallel]:
    """The chunks with gradient buffers (float32) that are summed over data and context parallel ranks.

    Moves the parameters into contiguous buffers where the optimizer is distributed: keep no reference to
    their old storage. Loading weights in place works before and after; with `fsdp` before alone.

    Args:
        overlap_param_gather: whether the weights that an optimizer's step has changed are gathered while the next forward pass begins; other
            readers of weights call `gather_parameters` first.
        overrides: further fields of Megatron's DistributedDataParallelConfig.
        fsdp: a level of `megarl.megatron.fsdp`, which decides what data parallel ranks share, whatever the other arguments say; None: no FSDP.
        matrices: whether the optimizer updates full matrices (`megarl.megatron.muon.whole_matrices`).

    Raises:
        ValueError: as `matrix_layout`.
    """
    config = chunks[0].config
    if fsdp is not None:
        assert len(chunks) == 1, "there are no pipeline stages"
        sharded = [wrap_sharded(chunks[0], fsdp)]
        config.finalize_model_grads_func = finalize_gradients
        config.no_sync_func = sharded[0].no_sync
        return sharded
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        use_distributed_optimizer=use_distributed_optimizer,
        **(overrides or {}),
    )
    layouts: list[FullParamLayout | None] = [None] * len(chunks)
    if matrices:
        mark_matrices(chunks)
        if use_distributed_optimizer:
            layouts = [matrix_layout(chunk, ddp_config, index > 0) for index, chunk in enumerate(chunks)]
    wrapped = [
        # As in Megatron: only the first chunk's reduction is on the critical path and worth bucketing. A layout already says so: the
        # switch would put its two buffers into one group of buckets, which Megatron gives to the first buffer's optimizer (0.19.2), so
        # that the second buffer's weights would be gathered before they are updated.
        DistributedDataParallel(
            config,
            ddp_config,
            chunk,
            disable_bucketing=index > 0 and layout is None,
            full_param_layout=layout,
        )
        for index, (chunk, layout) in enumerate(zip(chunks, layouts, strict=True))
    ]
    config.finalize_model_grads_func = finalize_gradients
    if overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    if overlap_param_gather:
        if ddp_config.align_param_gather:
            starts = [chunk.start_param_sync for chunk in wrapped]
            config.param_sync_func = starts if len(wrapped) > 1 else starts[0]
        for group in _bucket_groups(wrapped):
            group.param_gather_dispatched = (
                True  # all ranks have all weights: nothing is to be gathered before the first step
            )
        for chunk in wrapped:
            _gather_for_other_readers(chunk)
    return wrapped


def _gather_for_other_readers(chunk: DistributedDataParallel) -> None:
    """Gather late weights before other modules than their own read them.

    Megatron (0.19.2) gathers a module's own weights before the module is called. It never calls the convolution of a gated delta net, whose
    weight the delta net reads, nor shared experts that compute while tokens are sent: their parts are called, on a stream of their own.
    """
    for module in chunk.modules():
        if isinstance(module, GatedDeltaNet):
            # After the projection, which comes before the convolution: buckets are gathered in this order.
            module.in_proj.register_forward_hook(partial(_gather, chunk, module.conv1d))
        elif (
            isinstance(module, MoELayer)
            and module.shared_experts is not None
            and module.shared_expert_overlap
        ):
            # All of their weights, so that the layer's other weights in the same buckets are there for the main stream, too.
            module.router.register_forward_hook(partial(_gather, chunk, module.shared_experts))


def _gather(chunk: DistributedDataParallel, module: torch.nn.Module, *unused: Any) -> None:
    """Wait until a module's weights are gathered, as Megatron's hooks of modules do. `unused`: what a hook is given."""
    for parameter in module.parameters():
        group = chunk.param_to_bucket_group.get(parameter)  # None: it is frozen
        if group is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=chunk.ddp_config.align_param_gather)


def gather_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Gather on each rank all weights that an optimizer's step has changed, where `overlap_param_gather` has put this off.

    Megatron gathers before the forward pass of the module that has a weight. Code that reads weights elsewhere (heads, the weight
    sync, checkpoints, moves to the host) needs this first. Collective over data parallel ranks.
    """
    for group in _bucket_groups(chunks):
        if not group.param_gather_dispatched or group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)
            group.param_gather_dispatched = True


def _bucket_groups(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """The groups of buckets of chunks whose weights are gathered late."""
    wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    return [
        group
        for chunk in wrapped
        if chunk.ddp_config.overlap_param_gather
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]


def unwrap(chunks: list[DistributedDataParallel] | list[GPTModel]) -> list[GPTModel]:
    """The GPTModels themselves, whether or not they are wrapped."""
    return [_unwrapped(chunk) for chunk in chunks]


def _unwrapped(chunk: torch.nn.Module) -> GPTModel:
    if is_sharded(chunk):
        return chunk.module.module
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def runnable(chunks: list[DistributedDataParallel] | list[GPTModel]) -> list[torch.nn.Module]:
    """The chunks as a pass without gradients calls them: wrapped only where weights must be gathered."""
    return [chunk if is_sharded(chunk) else _unwrapped(chunk) for chunk in chunks]


def named_parameters(
    chunks: list[DistributedDataParallel] | list[GPTModel],
) -> dict[str, torch.nn.Parameter]:
    """ "<chunk>:<name>" -> parameter."""
    named = {}
    for index, chunk in enumerate(chunks):
        own = parameters_of(chunk) if is_sharded(chunk) else dict(_unwrapped(chunk).named_parameters())
        named |= {f"{index}:{name}": parameter for name, parameter in own.items()}
    return named


def local_parameters(chunks: list[DistributedDataParallel] | list[GPTModel]) -> dict[str, torch.Tensor]:
    """ "<chunk>:<name>" -> its data: this rank's local tensors as weight tables name them.

    They are the parameters, and the buffers that are weights: the routers' `expert_bias` (float32 always), and frozen indexers. Weights that data
    parallel ranks share have values only while they are gathered (`megarl.megatron.fsdp.gather`).
    """
    tensors = {name: parameter.data for name, parameter in named_parameters(chunks).items()}
    for index, chunk in enumerate(unwrap(chunks)):
        tensors |= {
            f"{index}:{name}": buffer for name, buffer in chunk.named_buffers() if BUFFERS.search(name)
        }
    return tensors


def finalize_gradients(
    chunks: list[DistributedDataParallel], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Megatron's last reductions (sequence parallel norms, tied embeddings) without its division.

    Losses come divided by the global batch's denominator already; Megatron would divide by the number of
    tokens that the micro-batches report.
    """
    finalize_model_grads(chunks, None, **options)


def _float8_base(
    config: ModelConfig, layout: ParallelLayout, place: RankCoords, block: int | None
) -> Float8Base:
    if block is None:
        return Float8Base({}, (1, 1))
    check_base_block(config, layout, block)
    return Float8Base(
        base_weights(rank_pieces(config, layout, place), linear_weights(config)), (block, block)
    )


def _build_chunk(
    config: ModelConfig,
    settings: TransformerConfig,
    *,
    held: Float8Base,
    layers: list[int],
    vocab_size: int,
    first: bool,
    last: bool,
    vp_stage: int | None,
    head: str,
    indexers: bool = False,
) -> GPTModel:
    # 0.19.2 logs at every construction that GPTModel will give way to HybridModel.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    with layer_modules(), unallocated(held):
        spec = layer_spec(
            settings, vp_stage, last, config.qk_norm_all_heads, sparse=config.indexer is not None
        )
        model = (PredictingModel if settings.mtp_num_layers else GPTModel)(
            config=settings,
            transformer_layer_spec=spec,
            mtp_block_spec=prediction_spec(settings, spec, vp_stage) if last else None,
            vocab_size=vocab_size,
            max_sequence_length=config.max_position_embeddings,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=config.tie_word_embeddings and head == "lm",
            vp_stage=vp_stage,
            **rope_arguments(config),
        )
    forget_routings(model)
    settle_sinks(model, fused=has_transformer_engine())
    add_indexers(model, config, layers, trained=indexers)
    allocate(model, held)
    model.to(platform.device())  # routers' weights start on the CPU
    if head == "value" and last:
        model.output_layer = None
        model.value_head = _value_head(settings)
    return model


def _value_head(settings: TransformerConfig) -> torch.nn.Linear:
    head = torch.nn.Linear(
        settings.hidden_size, 1, bias=False, dtype=settings.params_dtype, device=platform.device()
    )
    # Applied to this rank's part of the sequence, so its gradient is summed over tensor parallel ranks.
    head.weight.sequence_parallel = settings.sequence_parallel
    return head


@torch.no_grad()
def add_value_head(chunks: list[GPTModel], seed: int) -> None:
    """Give a language model a value head in addition to its own, on the last stage; it starts as `build_model`'s does."""
    if chunks[-1].post_process:
        chunks[-1].value_head = _value_head(chunks[-1].config)
        _draw(chunks[-1].value_head.weight, f"{seed} value_head.weight all")


@torch.no_grad()
def _randomize(model: GPTModel, layers: list[int], seed: int, place: RankCoords) -> None:
    """Norms' factors 1, biases 0, matrices N(0, INIT_STD); only local shards are drawn.

    A parameter's stream is named by the seed, its name in the full model and, where it is a tensor
    parallel shard, the shard: replicas come out equal, and so do tied embeddings on two stages.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype == FP8 or name.endswith(SCALES):
            continue
        if parameter.dim() == 1:
            around_zero = model.config.layernorm_zero_centered_gamma and "out_norm" not in name
            parameter.fill_(1.0 if "norm" in name and not around_zero else 0.0)
            continue
        whole, tp_rank = name, place.tp
        if name.startswith("decoder.layers."):
            index, rest = name.removeprefix("decoder.layers.").split(".", 1)
            whole = f"decoder.layers.{layers[int(index)]}.{rest}"
        elif name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            whole = "embedding.word_embeddings.weight"
        if ".experts." in name:
            whole, tp_rank = f"{whole} of expert parallel rank {place.ep}", place.etp
        shard = tp_rank if getattr(parameter, "tensor_model_parallel", False) else "all"
        _draw(parameter, f"{seed} {whole} {shard}")


def _draw(parameter: torch.nn.Parameter, stream: str) -> None:
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(stream.encode()))
    parameter.normal_(0.0, INIT_STD, generator=generator)
