"""`megatron.override_transformer_config` and `override_ddp_config`: Megatron-core's settings that may be set, and those that may not.

Written against megatron-core 0.19.2. What megarl itself sets is in megatron/transformer_config.py and megatron/build.py.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from megarl.config.options import OptionTable, option_problems
from megarl.config.schema.models import MegatronConfig
from megarl.util.record_fields import RecordField, package_folder, read_fields

_FACT = "it is a fact of the model: megarl reads it from config.json"
_DTYPE = "use megatron.dtype"
_LOSS = (
    "losses are sums with the denominators of the whole mini-batch, of the policy's own log-probs: another term, divisor or noise would make "
    "them depend on how a batch is cut"
)
_HEAD = "megarl computes log-probs from the head's weight itself (megatron/heads); Megatron's output layer and loss are not used"
_SCHEDULE = "it needs Megatron's own schedule of a layer's parts, which megarl's forward pass does not have"
_FLOAT8 = (
    "of float8 megarl has linear layers in blocks, megatron.fp8: attention, heads, messages and saved values stay in megatron.dtype, as the memory "
    "plan has them"
)
_GRAPHS = "packed batches differ in shape from step to step, and memory leaves the devices between phases: a captured graph would be of neither"
_MEMORY = "the weights' place is megarl's: use megatron.param_offload, optim.optimizer_cpu_offload and recompute_modules"
_INFERENCE = "Megatron's models generate nothing here: engines do"
_START = "megarl makes the shards itself and fills them from the model's folder"
_LAYOUT = "it changes which rank holds which part of the weights, which loading, checkpoints and syncs follow from the keys of megatron"
_INVARIANT = (
    "it changes the sums of attention alone: the products whose bits do not depend on the batch are put in by Megatron-core's "
    "set_batch_invariant_mode(), which megarl does not call"
)
_GROUPS = (
    "megarl makes micro-batches a multiple of pipeline_model_parallel_size, which is Megatron's own value; larger groups need as many micro-batches, "
    "whose number follows from the lengths of texts"
)
_CALLS = "it is a function or process state that Megatron is given while it runs"

TRANSFORMER = OptionTable(
    package="Megatron-core 0.19.2 (TransformerConfig)",
    refused={
        "tensor_model_parallel_size|pipeline_model_parallel_size|virtual_pipeline_model_parallel_size|context_parallel_size|"
        "expert_model_parallel_size|expert_tensor_parallel_size|sequence_parallel|num_layers_in_first_pipeline_stage|"
        "num_layers_in_last_pipeline_stage|pipeline_model_parallel_layout|recompute_granularity|recompute_modules": (
            "use the key of this name in megatron, which the plans and layouts read"
        ),
        "recompute_method|recompute_num_layers|moe_layer_recompute|distribute_saved_activations|"
        "num_microbatches_with_partial_activation_checkpoints": (
            "full recomputation is of each layer by itself, as the memory plan has it; use megatron.recompute_granularity and recompute_modules"
        ),
        "account_for_.*|tensor_parallel_num_weight_shards|gtp_.*|expert_gtp_.*|expert_tensor_parallel_num_weight_shards|"
        "hierarchical_context_parallel_sizes|hybrid_context_parallel|max_seqlen_per_dp_cp_rank|mtp_standalone|moe_single_grouped_.*|"
        "mla_down_proj_fusion|moe_mlp_glu_interleave_size|moe_shared_expert_glu_interleave_size|use_grouped_gemm_for_.*|moe_grouped_gemm": _LAYOUT,
        "fp16|bf16|params_dtype|pipeline_dtype|enable_autocast|autocast_dtype": _DTYPE,
        "fp8|fp8_recipe|first_last_layers_bf16|num_layers_at_(start|end)_in_bf16": (
            "use megatron.fp8, fp8_recipe, num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16, which packing and plans read"
        ),
        "fp8_param": (
            "parameters are in megatron.dtype, which weight syncs, checkpoints and exports read; in blocks Megatron-core 0.19.2 also keeps no copy "
            "of a float8 parameter in full precision but its optimizer's"
        ),
        "moe_router_padding_for_.*": (
            "it would give experts tokens that their router has not chosen, which routing replay and the experts' loads count; Transformer Engine "
            "fills up each expert's rows instead"
        ),
        "fp8_.*|fp4|fp4_.*|quant_recipe|tp_only_amax_red|use_kitchen.*|kitchen_.*|activation_func_fp8_input_store|"
        "disable_parameter_transpose_cache": _FLOAT8,
        "num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels|normalization|layernorm_.*|"
        "gated_linear_unit|activation_func|activation_func_clamp_value|glu_linear_offset|add_bias_linear|add_qkv_bias|qk_layernorm|qk_l2_norm|"
        "qk_clip.*|softmax_.*|window_.*|no_rope_freq|rotary_.*|mrope_section|fused_single_qkv_rope|attention_output_gate|"
        "apply_residual_connection_post_layernorm|apply_query_key_layer_scaling|fp32_residual_connection|multi_latent_attention|q_lora_rank|"
        "kv_lora_rank|qk_head_dim|qk_pos_emb_head_dim|v_head_dim|rope_type|original_max_position_embeddings|beta_fast|beta_slow|mscale|"
        "mscale_all_dim|num_moe_experts|moe_ffn_hidden_size|moe_shared_expert_intermediate_size|moe_shared_expert_gate|moe_layer_freq|"
        "moe_latent_size|moe_router_topk|moe_router_topk_.*|moe_router_num_groups|moe_router_group_topk|moe_router_pre_softmax|"
        "moe_router_score_function|moe_router_dtype|moe_apply_probs_on_input|experimental_attention_variant.*|dsa_(?!indexer_.*loss).*|linear_.*|mamba_.*|"
        "use_mamba_.*|is_hybrid_model|use_mup|mup_.*|heterogeneous_.*|hetereogenous_.*|use_fused_weighted_squared_relu": _FACT,
        "mtp_.*": "use model.mtp, mtp_loss_coef and mtp_detached",
        "dsa_indexer_.*loss.*": "use model.indexer and indexer_loss_coef",
        "hidden_dropout|attention_dropout": (
            "log-probs must be those of the policy that the engines serve, which drops nothing; dropout of adapters is model.lora.dropout"
        ),
        "calculate_per_token_loss|moe_aux_loss_coeff|moe_z_loss_coeff|moe_router_load_balancing_type|moe_input_jitter_eps|moe_token_.*drop.*|"
        "moe_expert_capacity_factor|moe_pad_expert.*|moe_expert_rank_capacity_factor|moe_router_force_.*|moe_router_enable_expert_bias|"
        "moe_router_bias_update_rate|moe_router_quantile_.*|moe_enable_routing_replay": _LOSS,
        "cross_entropy_.*|defer_embedding_wgrad_compute|wgrad_deferral_limit": _HEAD,
        "overlap_moe_expert_parallel_comm|delay_wgrad_compute|overlap_dispatch_backward_.*|ep_overlap_.*|high_priority_a2a_comm_stream": _SCHEDULE,
        "tp_comm_.*": "it needs Transformer Engine's user buffers, which are of one size, while packed batches are of many",
        "variable_seq_lengths|overlap_p2p_comm.*|batch_p2p_.*|use_ring_exchange_p2p|deallocate_pipeline_outputs": (
            "megarl sets it: micro-batches are packed and of different lengths, and the interleaved schedule pairs up wrong chunks otherwise"
        ),
        "enable_cuda_graph|cuda_graph_.*|external_cuda_graph|inference_cuda_graph_scope|moe_paged_stash.*|delay_offload_until_cuda_graph": _GRAPHS,
        "cpu_offloading.*": _MEMORY,
        "perform_initialization|use_cpu_initialization|init_.*|output_layer_init_method|embedding_init_.*": _START,
        "transformer_impl|use_transformer_engine_op_fuser|use_inference_optimized_layers|use_te_activation_func|fused_residual_rmsnorm": (
            "layers are Transformer Engine's where it is installed, by Megatron's own specification; loading knows their parameters by name"
        ),
        "inference_.*|flash_decode|symmetric_ar_type|nccl_all_reduce_for_prefill|mlp_chunks_for_.*|cache_mla_latents|"
        "moe_pad_experts_for_.*|clone_scatter_output_in_embedding": _INFERENCE,
        "batch_invariant_mode": _INVARIANT,
        "microbatch_group_size_per_vp_stage": _GROUPS,
        ".*_func|timers|use_te_rng_tracker|config_logger_dir|test_mode": _CALLS,
    },
    known={
        "moe_token_dispatcher_type": "alltoall, or flex: experts' tokens by DeepEP's or HybridEP's kernels, which must be installed.",
        "moe_flex_dispatcher_backend": "Of flex: deepep, or hybridep.",
        "moe_flex_dispatcher_num_sms": "SMs that DeepEP's kernels take.",
        "moe_permute_fusion": "Tokens sorted by expert in one kernel of Transformer Engine's; on GPUs true where that is there.",
        "moe_router_fusion": "Scores and choice of experts in one kernel of Transformer Engine's; on GPUs true where that is there, but with router_replay.",
        "moe_shared_expert_overlap": "Shared experts compute while tokens are sent to others.",
        "apply_rope_fusion": "Rotary embedding in one kernel; on GPUs true where it computes the same.",
        "bias_activation_fusion": "The gated unit in one kernel; on GPUs true.",
        "bias_dropout_fusion": "The residual sum in one kernel; on GPUs true.",
        "persist_layer_norm": "Norms that keep their grid; on GPUs true.",
        "memory_efficient_layer_norm": "Norms whose backward pass starts from the output.",
        "gradient_accumulation_fusion": "Weights' gradients are added to the float32 ones within the product; on GPUs true where it can be.",
        "attention_backend": "Which attention Transformer Engine takes: flash, fused (cuDNN), unfused, or auto.",
        "flash_attention_version": "Of flash attention: 2 or 3.",
        "cp_comm_type": "How context parallel ranks exchange keys and values: p2p, all_gather, or a2a, which cuts a rank's heads.",
        "deterministic_mode": "Kernels that give the same bits each time, slower. With Transformer Engine the environment that Ray is started in "
        "needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0.",
        "fine_grained_activation_offloading": "Activations of offload_modules go to the host; the memory plan does not count it.",
        "offload_modules": "Which.",
    },
    names={
        "attention_backend": ("flash", "fused", "unfused", "auto"),
        "moe_token_dispatcher_type": ("alltoall", "flex"),
    },
)

DDP = OptionTable(
    package="Megatron-core 0.19.2 (DistributedDataParallelConfig)",
    refused={
        "overlap_grad_reduce|overlap_param_gather|use_distributed_optimizer": "use the key of this name in megatron, which the plans read",
        "grad_reduce_in_fp32|reduce_scatter_with_fp32_accumulation|param_name_patterns_for_fp32_local_accumulation": (
            "gradients are float32 sums, whatever the layout"
        ),
        "average_in_collective|gradient_reduce_div_fusion": (
            "losses carry the denominator of the mini-batch already: gradients are summed and divided by nothing"
        ),
        "check_for_nan_in_grad|check_for_large_grads": (
            "numbers that are not finite are found before the optimizer's step and reported with role, rank and trajectory (trainer.on_nonfinite)"
        ),
        "num_distributed_optimizer_instances": "checkpoints have each optimizer state once, from the ranks of one instance",
        "fp8_.*|fp4_.*|reuse_grad_buf_for_.*|keep_fp8_.*": "parameters are in megatron.dtype, which syncs and checkpoints read",
        "use_megatron_fsdp|use_custom_fsdp|megatron_fsdp_.*|fsdp_.*|data_parallel_sharding_strategy|outer_dp_sharding_strategy|"
        "suggested_communication_unit_size": "weights are shared out by tensor, pipeline and expert parallelism, which loading and syncs know",
        "nccl_ub|disable_symmetric_registration": "gradient buffers leave the devices between phases, and registered memory must not",
        "delay_wgrad_compute": "it needs Megatron's own schedule of a layer's parts, which megarl's forward pass does not have",
    },
    known={
        "bucket_size": "Elements of gradients that are reduced together, with overlap_grad_reduce.",
        "num_buckets": "Or how many parts.",
        "pad_buckets_for_high_nccl_busbw": "Buckets padded to sizes at which NCCL is fast.",
        "align_param_gather": "All stages gather parameters at the same time, with overlap_param_gather.",
    },
    names={},
)


@cache
def transformer_fields() -> dict[str, RecordField]:
    """The fields of Megatron's TransformerConfig and of its bases; empty: Megatron-core is not installed."""
    folder = package_folder("megatron")
    if folder is None or not (folder / "core").is_dir():
        return {}
    files = [folder / "core/model_parallel_config.py", folder / "core/transformer/transformer_config.py"]
    return read_fields(files, ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig"))


@cache
def ddp_fields() -> dict[str, RecordField]:
    """The fields of Megatron's DistributedDataParallelConfig; empty: Megatron-core is not installed."""
    folder = package_folder("megatron")
    if folder is None or not (folder / "core").is_dir():
        return {}
    file = folder / "core/distributed/distributed_data_parallel_config.py"
    return read_fields([file], ("DistributedDataParallelConfig",))


def megatron_option_problems(key: str, megatron: MegatronConfig) -> Iterator[str]:
    """What is wrong with the overrides of a section `megatron`, whose dotted key is `key`."""
    if megatron.override_transformer_config:
        given = megatron.override_transformer_config
        yield from option_problems(
            f"{key}.override_transformer_config", given, TRANSFORMER, transformer_fields()
        )
        yield from _attention_problems(f"{key}.override_transformer_config", given)
    if megatron.override_ddp_config:
        yield from option_problems(
            f"{key}.override_ddp_config", megatron.override_ddp_config, DDP, ddp_fields()
        )


def _attention_problems(key: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Values with which Transformer Engine (2.18) has no attention."""
    if given.get("flash_attention_version") == 4:
        yield (
            f"{key}.flash_attention_version=4: ranks have flash-attn-4 turned off, since SGLang brings another version of it than Transformer Engine "
            "(2.18) was made for; give 2 or 3, or leave it out"
        )
    for kind in _exchanges(given):
        if kind == "a2a+p2p":
            yield f"{key}.cp_comm_type=a2a+p2p: Transformer Engine (2.18) has it for texts of one length alone, and megarl packs texts; give p2p, all_gather or a2a"
        elif kind not in ("p2p", "all_gather", "a2a"):
            yield f"{key}.cp_comm_type={kind!r}: it is one of p2p, all_gather, a2a"


def _exchanges(given: Mapping[str, Any]) -> list[str]:
    """The values of `cp_comm_type`, each once: there is one for all layers, or a list of one for each."""
    value = given.get("cp_comm_type")
    values = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(one for one in values if isinstance(one, str)))


def exchange_problems(
    key: str, megatron: MegatronConfig, heads: Mapping[str, int], sinks: bool
) -> Iterator[str]:
    """What is wrong with a section's `cp_comm_type` for a model: `a2a` gives context parallel ranks a part of a rank's heads, and alone has sinks
    (Transformer Engine 2.18, context_parallel.py).

    Args:
        heads: the numbers of attention's heads that must be cut, by name.
        sinks: whether the model has attention sinks, whose heads are checked whatever is given.
    """
    kinds = _exchanges(megatron.override_transformer_config or {})
    tp, cp = megatron.tensor_model_parallel_size, megatron.context_parallel_size
    name = f"{key}.override_transformer_config.cp_comm_type"
    if cp == 1:
        return
    if sinks:
        for kind in kinds:
            if kind != "a2a":
                yield f"{name}={kind}: Transformer Engine (2.18) has attention sinks with a2a alone; leave it out"
    elif "a2a" in kinds:
        for fact, count in heads.items():
            if count % tp == 0 and count % (tp * cp):
                yield (
                    f"{name}=a2a cuts heads, and {fact}={count} cannot be divided by {tp * cp}, {key}.tensor_model_parallel_size={tp} times "
                    f"context_parallel_size={cp}; leave it out for p2p"
                )
