"""Megatron's GPTModel from a model's facts, on this rank's place in a layout. The only place that builds one.

Guarantees:
- Parameter names are those of Megatron's Transformer Engine specification on every machine.
- A loss that is a plain sum gets gradients that are plain sums over micro-batches, data and context
  parallel ranks: nothing divides them (`finalize_gradients`).
- Parameters that are replicated over ranks start equal on all of them; the value head starts equal in
  every layout.

Needs `init_parallel` first. Seen with megatron-core 0.19.2.
"""

import importlib.util
import logging
import zlib
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import TransformerConfig

from megarl import platform
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.megatron import torch_te
from megarl.megatron.parallel import coords
from megarl.models import ModelConfig, padded_vocab_size

INIT_STD = 0.02  # of every matrix's and the value head's random start


def build_model(
    config: ModelConfig,
    layout: ParallelLayout,
    *,
    head: str = "lm",
    dtype: torch.dtype,
    trainable: bool = True,
    recompute_granularity: str | None = None,
    seed: int = 1,
) -> list[GPTModel]:
    """This rank's model chunks: one, or `layout.vpp` of them.

    Args:
        head: "lm" for logits; "value" for a scalar head: the last chunk then has `value_head`
            (weight [1, hidden]), and `output_layer` is None.
        trainable: False for a model that is only evaluated: no gradients, evaluation mode.
        recompute_granularity: activations that backward computes again: None, "full" (each layer) or
            "selective" (attention).
        seed: of the random start, which is meant to be overwritten by real weights.

    Raises:
        ValueError: the model does not divide by the layout; names both.
    """
    assert head in ("lm", "value"), head
    _check_divisible(config, layout)
    place = coords()
    layers = layers_of(layout, config.num_layers, place.pp)
    transformer_config = _transformer_config(config, layout, dtype, recompute_granularity)
    chunks = []
    for chunk in range(layout.num_chunks):
        last = place.pp == layout.pp - 1 and chunk == layout.num_chunks - 1
        model = _build_chunk(
            config,
            transformer_config,
            vocab_size=padded_vocab_size(config, layout.tp),
            first=place.pp == 0 and chunk == 0,
            last=last,
            vp_stage=chunk if layout.vpp else None,
            head=head,
        )
        _randomize(model, layers[chunk], seed, place.tp)
        model.train(trainable).requires_grad_(trainable)
        chunks.append(model)
    return chunks


def wrap_for_training(
    chunks: list[GPTModel],
    *,
    overlap_grad_reduce: bool = False,
    use_distributed_optimizer: bool = True,
) -> list[DistributedDataParallel]:
    """The chunks with gradient buffers (float32) that are summed over data and context parallel ranks.

    Moves the parameters into contiguous buffers where the optimizer is distributed: keep no reference to
    their old storage. Loading weights in place works before and after.
    """
    config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    wrapped = [
        # As in Megatron: only the first chunk's reduction is on the critical path and worth bucketing.
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_gradients
    if overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


def unwrap(chunks: list[DistributedDataParallel] | list[GPTModel]) -> list[GPTModel]:
    """The GPTModels themselves, whether or not they are wrapped."""
    return [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]


def local_parameters(chunks: list[DistributedDataParallel] | list[GPTModel]) -> dict[str, torch.Tensor]:
    """ "<chunk>:<parameter name>" -> its data: this rank's local tensors as weight tables name them."""
    return {
        f"{index}:{name}": parameter.data
        for index, chunk in enumerate(unwrap(chunks))
        for name, parameter in chunk.named_parameters()
    }


def finalize_gradients(
    chunks: list[DistributedDataParallel], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Megatron's last reductions (sequence parallel norms, tied embeddings) without its division.

    Losses come divided by the global batch's denominator already; Megatron would divide by the number of
    tokens that the micro-batches report.
    """
    finalize_model_grads(chunks, None, **options)


def _check_divisible(config: ModelConfig, layout: ParallelLayout) -> None:
    for fact, value in (
        ("attention heads", config.num_attention_heads),
        ("key/value heads", config.num_query_groups),
        ("MLP width", config.ffn_hidden_size),
    ):
        if value % layout.tp:
            raise ValueError(
                f"the model's {fact} ({value}) cannot be divided by "
                f"megatron.tensor_model_parallel_size={layout.tp}"
            )


def _transformer_config(
    config: ModelConfig, layout: ParallelLayout, dtype: torch.dtype, recompute_granularity: str | None
) -> TransformerConfig:
    fused = platform.is_cuda() and gpt_layer_specs.HAVE_TE
    recompute: dict[str, Any] = {}
    if recompute_granularity is not None:
        recompute["recompute_granularity"] = recompute_granularity
    if recompute_granularity == "full":
        recompute.update(recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,  # `_randomize` fills the local shards instead
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sp,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default one is refused with variable lengths, experts or not
        calculate_per_token_loss=True,
        # With two stages the interleaved schedule's batched send/receive pairs up wrong chunks: wrong
        # losses without an error. Megatron's own command line sets the same two.
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        deallocate_pipeline_outputs=True,  # a stage's output is freed once it is sent
        gradient_accumulation_fusion=platform.is_cuda()
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        apply_rope_fusion=fused,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        persist_layer_norm=fused,
        masked_softmax_fusion=False,
        **recompute,
    )


def _build_chunk(
    config: ModelConfig,
    transformer_config: TransformerConfig,
    *,
    vocab_size: int,
    first: bool,
    last: bool,
    vp_stage: int | None,
    head: str,
) -> GPTModel:
    # 0.19.2 logs at every construction that GPTModel will give way to HybridModel.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    scaling = config.rope_scaling
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=_layer_spec(transformer_config, vp_stage),
        vocab_size=vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=config.tie_word_embeddings and head == "lm",
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling["factor"] if scaling is not None else 1.0,
        vp_stage=vp_stage,
    )
    if head == "value" and last:
        model.output_layer = None
        model.value_head = torch.nn.Linear(
            config.hidden_size,
            1,
            bias=False,
            dtype=transformer_config.params_dtype,
            device=platform.device(),
        )
        # Applied to this rank's part of the sequence, so its gradient is summed over tensor parallel ranks.
        model.value_head.weight.sequence_parallel = transformer_config.sequence_parallel
    return model


def _layer_spec(config: TransformerConfig, vp_stage: int | None) -> Any:
    """Megatron's GPU specification; its modules are Transformer Engine's, or their doubles in torch."""
    if platform.is_cuda() and gpt_layer_specs.HAVE_TE:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, vp_stage=vp_stage
        )
    with torch_te.standing_in():
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, vp_stage=vp_stage
        )


@torch.no_grad()
def _randomize(model: GPTModel, layers: list[int], seed: int, tp_rank: int) -> None:
    """Norms 1, biases 0, matrices N(0, INIT_STD); only local shards are drawn.

    A parameter's stream is named by the seed, its name in the whole model and, where it is a tensor
    parallel shard, the shard: replicas come out equal, and so do tied embeddings on two stages.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if "norm" in name else 0.0)
            continue
        whole = name
        if name.startswith("decoder.layers."):
            index, rest = name.removeprefix("decoder.layers.").split(".", 1)
            whole = f"decoder.layers.{layers[int(index)]}.{rest}"
        elif name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            whole = "embedding.word_embeddings.weight"
        shard = tp_rank if getattr(parameter, "tensor_model_parallel", False) else "all"
        generator = torch.Generator(parameter.device)
        generator.manual_seed(zlib.crc32(f"{seed} {whole} {shard}".encode()))
        parameter.normal_(0.0, INIT_STD, generator=generator)
