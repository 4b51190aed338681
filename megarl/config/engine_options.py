"""`rollout.engine_kwargs`: SGLang's server arguments that may be set, and those that may not.

Written against sglang 0.5.21, whose arguments are the fields of `srt/arg_groups/fields/`. What megarl itself gives an engine is in
rollout/sglang/start.py; what a sync relies on, in weight_sync/receiver.py.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from megarl.config.options import OptionTable, option_problems
from megarl.util.record_fields import RecordField, package_folder, read_fields

_LAYOUT = (
    "it changes which rank of an engine holds which part of the weights, and a sync writes each part into the rank that the plan has for "
    "it; the layout is rollout.tensor_model_parallel_size, expert_parallel_size, attention_data_parallel_size and moe_a2a_backend"
)
_WEIGHTS = (
    "weights come from the actor by the sync, which writes them into SGLang's own parameters and verifies them there; how they are loaded, "
    "cached or swapped is not to be changed"
)
_TOKENS = "engines are given token ids and answer with token ids: no tokenizer, template or parser is used"
_PLACE = "megarl starts the engine's processes and gives them their devices, addresses and ports"
_SAMPLING = (
    "each request is sampled with its own seed from a distribution whose log-probs the trainer compares with its own; sampling is set by "
    "rollout.temperature, top_p, top_k, min_p, seed, deterministic and val_kwargs"
)
_CACHE = (
    "a sync empties the cache on the devices, and memory that is planned and released is that cache; another store of keys and values "
    "would go on serving those of earlier weights"
)
_OFFLOAD = "parameters must stay where the receiver of a sync has found them; memory is freed by rollout.free_cache_engine"
_NCCL = (
    "it changes NCCL's memory (NCCL_CUMEM_ENABLE, NCCL_NVLS_ENABLE) in the engines alone, and trainer and engine ranks exchange weights in "
    "one communicator, whose ranks must agree"
)
_NO_TEXT = "models are of text, and answer with tokens"


def _use(key: str) -> str:
    return f"use rollout.{key}"


TABLE = OptionTable(
    package="SGLang 0.5.21",
    refused={
        "sglang|vllm|trtllm": "engines are SGLang's, so its arguments stand here directly: engine_kwargs.<argument>",
        "tp_size": _use("tensor_model_parallel_size"),
        "ep_size": _use("expert_parallel_size"),
        "dp_size|enable_dp_attention": _use("attention_data_parallel_size"),
        "enable_dp_lm_head": _use("data_parallel_lm_head"),
        "enable_dp_attention_local_control_broadcast|load_balance_method": (
            "the engine's owner chooses the group of each request, and all ranks get all calls from the first one"
        ),
        "nnodes|node_rank": _use("nodes_per_engine"),
        "dtype": _use("dtype"),
        "quantization": _use("quantization"),
        "kv_cache_dtype": _use("kv_cache_dtype") + ", which the memory plan reads",
        "moe_runner_backend": _use("moe_runner_backend"),
        "moe_a2a_backend": _use("moe_a2a_backend") + ", which the layout of shared experts follows",
        "mem_fraction_static": _use("gpu_memory_utilization"),
        "max_running_requests": _use("max_num_seqs"),
        "max_total_tokens": _use("max_total_tokens"),
        "random_seed": _use("seed"),
        "enable_memory_saver": _use("free_cache_engine"),
        "enable_deterministic_inference": _use("deterministic"),
        "context_length|allow_auto_truncate": "follows from data.max_prompt_length + data.max_response_length",
        "log_level|log_level_http": "megarl sets it: warnings of a start on GPUs tell what takes minutes",
        "enable_lora.*|max_lora.*|max_loaded_loras|max_loras.*|lora_.*|experts_shared_outer_loras|uno_lora_path": (
            "adapters are the policy's: use actor_rollout_ref.model.lora and rollout.lora_sync"
        ),
        (
            "pp_.*|dcp_.*|attn_cp_size|moe_dp_size|dwdp_size|cp_strategy|enable_prefill_cp|"
            "enable_cp_.*|enable_dsa_cache_layer_split|moe_dense_tp_size|shared_experts_tp_size|enable_shared_experts_attn_tp|"
            "enable_dense_mlp_attn_tp|enable_tp_lm_head_all_to_all|enable_attn_tp_input_scattered|enable_layernorm_sp|"
            "disable_shared_experts_fusion|enforce_shared_experts_fusion|enable_waterfill"
        ): _LAYOUT,
        (
            "ep_num_redundant_experts|ep_dispatch_algorithm|init_expert_location|enable_eplb|eplb_.*|elastic_.*|enable_elastic_.*|"
            "ep_join_.*|max_ep_size"
        ): "experts would be on other ranks than the plan of a sync has them, and move while it runs",
        (
            "model_path|revision|load_format|model_loader_extra_config|custom_weight_loader|weight_loader_.*|weight_cache_.*|"
            "startup_weight_load_mode|remote_instance_.*|modelexpress_config|engine_info_bootstrap_port|download_dir|model_checksum|"
            "delete_ckpt_after_loading|decrypted_.*|checkpoint_engine_.*|weight_version|served_model_name|is_embedding"
        ): _WEIGHTS,
        (
            "json_model_override_args|model_impl|model_config_parser|quantization_param_path|modelopt_.*|quantize_and_serve|"
            "rl_quant_profile|enable_w4a4_.*|enable_int8_.*"
        ): "the engine's parameters must be those of the weight table: in rollout.dtype, or in float8 by rollout.quantization",
        "fp8_gemm_runner_backend|fp4_gemm_runner_backend": (
            "megarl leaves it to SGLang but on Blackwell, where its choice would pack scales into another type (no sync could fill them) and "
            "Triton's kernels are taken"
        ),
        "kt_.*|cpu_offload_gb|offload_.*|ple_offload_.*|enable_weights_cpu_backup|enable_draft_weights_cpu_backup": _OFFLOAD,
        (
            "tokenizer_.*|skip_tokenizer_init|detokenizer_worker_num|trust_remote_code|chat_template|hf_chat_template_name|"
            "completion_template|trust_request_chat_template|reasoning_parser|tool_call_parser|tool_server|default_chat_template_kwargs|"
            "grammar_backend|constrained_json_.*|enable_dynamic_batch_tokenizer|dynamic_batch_tokenizer_.*|enable_tokenizer_batch_encode|"
            "disable_tokenizer_batch_decode|strip_thinking_cache|enable_strict_thinking"
        ): _TOKENS,
        (
            "device|base_gpu_id|gpu_id_step|use_ray|host|port|nccl_port|dist_init_addr|gated_launch_port|grpc_.*|smg_.*|sidecar.*|"
            "ssl_.*|enable_ssl_refresh|api_key|admin_api_key|http2_.*|enable_http2|fastapi_root_path|custom_sigquit_handler|sleep_on_idle|"
            "skip_server_warmup|warmups"
        ): _PLACE,
        (
            "sampling_backend|sampling_defaults|preferred_sampling_params|rl_on_policy_target|enable_custom_logit_processor|"
            "sampling_mask_.*|mlx_enable_sampling"
        ): _SAMPLING,
        (
            "speculative_algorithm|speculative_num_steps|speculative_num_draft_tokens|speculative_eagle_topk|speculative_draft_model_path|"
            "speculative_draft_load_format|speculative_ngram_min_bfs_breadth|speculative_ngram_max_bfs_breadth"
        ): _use("speculative"),
        (
            "speculative_adaptive.*|speculative_accept_.*|speculative_use_rejection_sampling|speculative_token_map|"
            "speculative_boundary_reduction|speculative_dflash_.*|speculative_domino_.*|speculative_dspark_.*|speculative_draft_model_.*|"
            "speculative_moe_.*|speculative_dsa_.*|speculative_skip_dp_mlp_sync|speculative_ngram_external_.*|enable_multi_layer_eagle|"
            "decoupled_spec_.*|spec_trace_dir|dllm_.*"
        ): (
            "drafted tokens are checked in chains of one length, each against the one that the request's own noise draws, and a draft has the "
            "model's layout; what may be set is in rollout.speculative"
        ),
        (
            "enable_hierarchical_cache|hicache_.*|enable_lmcache|lmcache_.*|enable_flexkv|flexkv_.*|radix_cache_backend|"
            "enable_unified_.*|unified_cache_.*|enable_linker_.*|enable_session_radix_cache|enable_hisparse|hisparse_.*"
        ): _CACHE,
        (
            "disaggregation_.*|encoder_.*|language_only|language_model_only|enable_adaptive_dispatch_to_encoder|enable_pdmux|pdmux_.*|"
            "sm_group_num|num_reserved_decode_tokens|enable_pd_role_switch|optimistic_prefill_.*"
        ): "an engine does prefill and decode itself",
        "enable_nccl_nvls|enable_symm_mem": _NCCL,
        "enable_multimodal|mm_.*|enable_mm_.*|enable_broadcast_mm_.*|enable_prefix_mm_cache|limit_mm_.*|allowed_media_domains|asr_.*": _NO_TEXT,
        "stream_.*|batch_notify_size|incremental_streaming_output|enable_streaming_session|return_.*|enable_return_.*|enable_response_store": (
            "requests and answers are megarl's own protocol with the engine"
        ),
        "max_queued_requests": "requests over it would be refused, and their trajectories lost: all of a step's wait in the engine",
        "prefill_only_disable_kv_cache": "engines generate",
        "cuda_graph_config|forward_hooks|stat_loggers": "it is a Python object or of such; use the arguments that it is made of",
    },
    known={
        "chunked_prefill_size": "Tokens of prompts in a pass; -1: not cut. Smaller ones take less memory for activations.",
        "max_prefill_tokens": "Tokens of prompts that are taken up at a time.",
        "enable_mixed_chunk": "Chunks of prompts and decode steps in one pass.",
        "schedule_policy": "The order of waiting requests; the samples of a prompt share its prefill under any.",
        "schedule_conservativeness": "How much room a request must find in the cache; higher: fewer are retracted.",
        "num_continuous_decode_steps": "Decode steps between two looks at waiting requests.",
        "disable_overlap_schedule": "The scheduler waits for each step before it prepares the next: slower, for debugging.",
        "disable_radix_cache": "Prompts that begin alike share nothing: the samples of a prompt each compute it.",
        "radix_eviction_policy": "Which cached prompts leave first.",
        "page_size": "Tokens of a page of the cache; some attention kernels ask for one.",
        "attention_backend": "Attention's kernels (fa3 on Hopper, flashinfer, triton, ...). With rollout.deterministic=true SGLang takes some only.",
        "prefill_attention_backend": "Attention's kernels for prompts.",
        "decode_attention_backend": "Attention's kernels for decode steps.",
        "triton_attention_num_kv_splits": "Parts in which Triton's decode attention reads a cache.",
        "cuda_graph_max_bs_decode": "The most requests of a decode step in a CUDA graph; fewer graphs take less memory, which the plan's reserve covers.",
        "cuda_graph_bs_decode": "The numbers of requests that have a graph.",
        "cuda_graph_max_bs_prefill": "The most tokens of prompts in a graph.",
        "cuda_graph_bs_prefill": "The numbers of tokens that have a graph.",
        "disable_cuda_graph": "No CUDA graphs: much slower decode steps, faster start, 1 to 4 GiB less memory.",
        "disable_prefill_cuda_graph": "No graphs of prompts.",
        "enable_torch_compile": "Small batches through torch.compile; the start takes longer.",
        "torch_compile_max_bs": "The largest of these batches.",
        "enable_fp32_lm_head": "Logits in float32: log-probs nearer to the trainer's, for a slower head.",
        "enable_flashinfer_allreduce_fusion": "Sums over tensor parallel ranks in one kernel with the norm after them.",
        "disable_custom_all_reduce": "NCCL's sums in place of SGLang's own kernel.",
        "enable_mscclpp": "Small sums by MSCCL++.",
        "deepep_mode": "DeepEP's kernels: normal, low_latency, or auto, which takes low_latency for decode steps.",
        "deepep_config": "A file of numbers of SMs and buffers for DeepEP's normal kernels.",
        "deepep_dispatcher_output_dtype": "In which type DeepEP sends hidden states.",
        "enable_two_batch_overlap": "With DeepEP: half of a batch computes while the other half is sent.",
        "enable_single_batch_overlap": "With DeepEP: shared experts compute while tokens are sent.",
        "speculative_ngram_capacity": "Nodes of the tree of n-grams, some 200 bytes of host memory each; a token takes up to the depth of them.",
        "speculative_ngram_max_trie_depth": "Tokens of the longest n-gram.",
        "speculative_ngram_match_type": "Which continuation is drafted: BFS the latest, PROB the most frequent.",
        "speculative_attention_mode": "Which kernels attend drafted tokens: those of prompts or of decode steps.",
        "speculative_draft_attention_backend": "The attention kernels of the draft.",
        "speculative_draft_kv_cache_dtype": "The type of the draft's own keys and values.",
        "speculative_draft_window_size": "How many of the last tokens the draft attends to.",
        "watchdog_timeout": "Seconds after which a step of a scheduler that hangs ends it; rollout.request_timeout sees it, too.",
        "dist_timeout": "Seconds of SGLang's own collectives.",
        "enable_metrics": "SGLang's own Prometheus metrics.",
        "decode_log_interval": "Decode steps between two lines of SGLang's log.",
    },
    names={},
)


@cache
def engine_fields() -> dict[str, RecordField]:
    """SGLang's server arguments; empty: it is not installed, or another version has them elsewhere."""
    folder = package_folder("sglang")
    groups = None if folder is None else folder / "srt" / "arg_groups"
    if groups is None or not (groups / "fields").is_dir():
        return {}
    return read_fields(sorted((groups / "fields").glob("*.py")), lists=groups / "choices.py")


def engine_option_problems(key: str, given: Mapping[str, Any] | None) -> Iterator[str]:
    """What is wrong with `engine_kwargs`, whose dotted key is `key`."""
    if given:
        yield from option_problems(key, given, TABLE, engine_fields())
