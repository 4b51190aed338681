"""Megatron's TransformerConfig from a model's facts and a layout; refuses settings that Megatron would compute differently.

Written against megatron-core 0.19.2.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from megarl import platform
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.megatron.sinks import attention_settings, bias_settings, check_sinks_and_biases
from megarl.models import ModelConfig

# Parts whose output is freed and made again: megatron-core 0.19.2 asks Transformer Engine for its state there (tensor_parallel/random.py).
_WITHOUT_OUTPUT = frozenset({"layernorm", "mla_up_proj", "moe_act"})


def has_transformer_engine() -> bool:
    """Whether models are made of Transformer Engine's modules here, rather than of their stand-ins in torch."""
    return platform.is_cuda() and gpt_layer_specs.HAVE_TE


def transformer_config(
    config: ModelConfig,
    layout: ParallelLayout,
    dtype: torch.dtype,
    recompute_granularity: str | None,
    recompute_modules: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    mtp: str | None = None,
) -> TransformerConfig:
    """The settings that all layers share; an MLATransformerConfig where the model has latent attention.

    Args:
        recompute_modules: of "selective"; None: core_attn.
        overrides: `megatron.override_transformer_config`, which `megatron_option_problems` does not refuse.
        mtp: "detached", "attached" or None, as `build_model`'s.

    Raises:
        ValueError: as `check_layout`, Megatron refuses an override, or Transformer Engine has no attention in float32.
    """
    check_layout(config, layout)
    if mtp is not None:
        _assert_predicts(config, layout)
    fused = has_transformer_engine()
    if fused and dtype == torch.float32 and layout.cp > 1:
        # Flash attention and cuDNN's take no float32, and the unfused one no context parallelism (Transformer Engine 2.18).
        raise ValueError(
            f"megatron.dtype=float32 with megatron.context_parallel_size={layout.cp}: Transformer Engine has no attention for both; set dtype to "
            "bfloat16, or context_parallel_size to 1"
        )
    if (
        recompute_granularity == "selective"
        and not fused
        and (fine := sorted(_WITHOUT_OUTPUT & set(recompute_modules or ())))
    ):
        raise ValueError(
            f"megatron.recompute_modules has {', '.join(fine)}: Megatron-core computes these parts again by code that needs Transformer Engine, "
            "which is not there; mlp, moe, shared_experts and core_attn do not need it"
        )
    settings: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "attention_output_gate": config.output_gate,
        "layernorm_zero_centered_gamma": config.zero_centered_norms,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,  # `build` fills the local shards instead
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "calculate_per_token_loss": True,
        # Weights' gradients are added to the float32 ones within the matrix product. Megatron's own layers need apex for it.
        "gradient_accumulation_fusion": fused
        or (platform.is_cuda() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None),
        # The fused kernel for grouped-query attention leaves out yarn's factor on sine and cosine; the one for
        # latent attention is for yarn only.
        "apply_rope_fusion": fused
        and (config.mla is not None) == _is_yarn(config)
        and _fits_fused_rotary(config, layout.tp),
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "persist_layer_norm": fused,
        "masked_softmax_fusion": False,
    }
    predicted = config.num_mtp_layers if mtp is not None else 0
    settings |= _parallel_settings(layout, dtype, predicted) | _recompute_settings(
        recompute_granularity, recompute_modules
    )
    if predicted:
        settings |= {"mtp_num_layers": predicted, "mtp_detach_heads": mtp == "detached"}
    # The default dispatcher is refused with variable lengths, experts or not.
    settings["moe_token_dispatcher_type"] = "alltoall"
    settings |= attention_settings(config, layout) | bias_settings(config)
    if config.moe is not None:
        # In plain torch a layer's tokens are sorted by masks and gathered by several kernels, and the choice of experts takes about ten.
        settings |= _moe_settings(config) | {"moe_permute_fusion": fused, "moe_router_fusion": fused}
    if config.delta_net is not None:
        settings |= _delta_net_settings(config)
    kind: type[TransformerConfig] = TransformerConfig
    if config.mla is not None:
        kind, settings = MLATransformerConfig, settings | _mla_settings(config)
    result = _make(kind, settings, overrides or {})
    if config.mla is None and _is_yarn(config):
        for name, value in _yarn_settings(config).items():
            # GPTModel reads these as attributes that TransformerConfig has no fields for.
            setattr(result, f"yarn_{name}", value)
    return result


def _make(
    kind: type[TransformerConfig], settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> TransformerConfig:
    _check_overrides(overrides)
    if "attention_backend" in overrides:
        overrides = {**overrides, "attention_backend": AttnBackend[overrides["attention_backend"]]}
    try:
        return kind(**{**settings, **overrides})
    except (AssertionError, ValueError) as error:
        if not overrides:
            raise
        raise ValueError(
            f"megatron.override_transformer_config: Megatron-core refuses the settings: {error}"
        ) from error


def _check_overrides(overrides: Mapping[str, Any]) -> None:
    """Refuse overrides that need packages or environment variables that this machine lacks, which a configuration's checks cannot know.

    Raises:
        ValueError: DeepEP's or HybridEP's kernels are asked for, and are not installed here; deterministic attention is, of which
            Transformer Engine (2.18) is told by the environment alone.
    """
    variable = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    if overrides.get("deterministic_mode") and has_transformer_engine() and os.environ.get(variable) != "0":
        raise ValueError(
            f"megatron.override_transformer_config.deterministic_mode=true needs {variable}=0 in the environment of ranks, which is "
            f"{os.environ.get(variable, 'not set')}: Transformer Engine's attention is deterministic by it alone; start Ray with it, or leave "
            "deterministic_mode out"
        )
    if overrides.get("moe_token_dispatcher_type") == "flex" and importlib.util.find_spec("deep_ep") is None:
        raise ValueError(
            "megatron.override_transformer_config.moe_token_dispatcher_type=flex sends tokens by DeepEP's kernels: the package deep_ep is not "
            "installed; leave it out for alltoall"
        )


def rope_arguments(config: ModelConfig) -> dict[str, Any]:
    """GPTModel's arguments for grouped-query attention's rotary embedding (latent attention has its own)."""
    scaling = config.rope_scaling
    llama3 = scaling is not None and scaling["rope_type"] == "llama3"
    return {
        "position_embedding_type": "yarn" if _is_yarn(config) and config.mla is None else "rope",
        "rotary_base": config.rope_theta,
        "rotary_percent": config.rotary_percent,
        "rope_scaling": llama3,
        "rope_scaling_factor": scaling["factor"] if llama3 else 1.0,
    }


def check_layout(config: ModelConfig, layout: ParallelLayout) -> None:
    """Refuse a layout that the model does not divide by, and facts that Megatron computes differently.

    Raises:
        ValueError: names the fact, and the key of the layout.
    """
    _check_divisible(config, layout)
    if layout.cp > 1 and platform.is_cuda() and not has_transformer_engine():
        raise ValueError(
            f"megatron.context_parallel_size={layout.cp} needs Transformer Engine on GPUs: megarl's attention in torch would hold all "
            "scores of a sequence; install it (requirements/gpu.txt) or set it to 1"
        )
    if config.delta_net is not None and fused_without_fla():
        raise ValueError(
            f"{config.family}: gated delta nets need flash-linear-attention's kernels on GPUs; install fla-core (requirements/gpu.txt)"
        )
    kinds = {"latent attention": config.mla, "experts": config.moe, "gated delta nets": config.delta_net}
    if layout.tp > 1 and not layout.sp and any(facts is not None for facts in kinds.values()):
        # Latent attention: each rank would add only its heads' part to the gradient of the rotary key, which
        # all heads share. Experts: Megatron refuses it, since ranks would compute the same tokens. Delta nets: the norm of the output is
        # one for all heads, and its gradient would be of a rank's heads alone (megatron-core 0.19.2).
        kind = next(kind for kind, facts in kinds.items() if facts is not None)
        raise ValueError(
            f"a model with {kind} and megatron.tensor_model_parallel_size={layout.tp} needs "
            "megatron.sequence_parallel=true"
        )
    if _is_yarn(config):
        _check_yarn(config)
    if config.moe is not None:
        _check_routing(config)
    check_sinks_and_biases(config, layout, has_transformer_engine())


def _assert_predicts(config: ModelConfig, layout: ParallelLayout) -> None:
    """Assert what a configuration's checks ensure (`megarl.config.model_fit`): Megatron-core 0.19.2 would build other layers, or none."""
    assert config.num_mtp_layers, "the model has no MTP layers"
    assert not (config.tie_word_embeddings and layout.pp > 1), (
        "the last stage would have an embedding and a head"
    )
    assert config.moe is None or config.num_layers - 1 not in config.moe.dense_layers
    assert layers_of(layout, config.num_layers, layout.pp - 1)[-1], (
        "MTP layers are made like the chunk's last layer"
    )


def _check_divisible(config: ModelConfig, layout: ParallelLayout) -> None:
    key = "tensor_model_parallel_size"
    sizes = [("attention heads", config.num_attention_heads, key, layout.tp)]
    if config.mla is None:
        sizes.append(("key/value heads", config.num_query_groups, key, layout.tp))
    net, moe = config.delta_net, config.moe
    if net is not None:
        heads = "tensor_model_parallel_size x context_parallel_size"
        sizes += [("delta nets' key heads", net.key_heads, heads, layout.tp * layout.cp)]
    if moe is None or moe.dense_layers:
        sizes.append(("MLP width", config.ffn_hidden_size, key, layout.tp))
    if moe is not None:
        sizes.append(("shared experts' width", moe.shared_ffn_hidden_size, key, layout.tp))
        sizes.append(("number of experts", moe.num_experts, "expert_model_parallel_size", layout.ep))
        sizes.append(("experts' width", moe.ffn_hidden_size, "expert_tensor_parallel_size", layout.etp))
    elif layout.ep > 1 or layout.etp > 1:
        raise ValueError(
            f"megatron.expert_model_parallel_size={layout.ep} and expert_tensor_parallel_size={layout.etp} must "
            "be 1: the model has no experts"
        )
    for fact, value, name, size in sizes:
        if value % size:
            raise ValueError(f"the model's {fact} ({value}) cannot be divided by megatron.{name}={size}")


def fused_without_fla() -> bool:
    """Whether Transformer Engine's modules are there and the kernels of gated delta nets are not."""
    return has_transformer_engine() and importlib.util.find_spec("fla") is None


def _check_yarn(config: ModelConfig) -> None:
    scaling = config.rope_scaling
    assert scaling is not None
    if scaling.get("mscale_all_dim") and not scaling.get("mscale"):
        raise ValueError(
            f"rope scaling with mscale_all_dim={scaling['mscale_all_dim']} but no mscale is not supported; "
            "both or neither are"
        )
    if config.mla is None and config.rotary_percent != 1:
        raise ValueError(
            f"rope type 'yarn' with a partial rotary factor of {config.rotary_percent} is not supported; 1 is"
        )


def _check_routing(config: ModelConfig) -> None:
    """Refuse routing that Megatron computes otherwise: it always divides sigmoid scores by their sum, but for a single expert; Hugging Face
    does so if the configuration says so."""
    moe = config.moe
    assert moe is not None
    if moe.scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"router scores {moe.scoring!r} are not supported; softmax and sigmoid are")
    normalised = moe.norm_topk_prob
    if (normalised and moe.top_k == 1) or (not normalised and moe.top_k > 1 and moe.scoring == "sigmoid"):
        raise ValueError(
            f"norm_topk_prob={normalised} with {moe.scoring} scores and num_experts_per_tok={moe.top_k} is not "
            "supported"
        )
    if moe.scoring == "softmax" and (moe.expert_bias or _is_grouped(config)):
        raise ValueError("softmax router scores with an expert bias or with expert groups are not supported")
    if not _is_grouped(config):
        return
    if moe.num_experts % moe.num_groups:
        raise ValueError(f"the {moe.num_experts} experts cannot be divided by n_group={moe.num_groups}")
    if moe.top_k // moe.topk_group != 2:
        # Megatron ranks groups by their best top_k // topk_group experts, DeepSeek-V3 by their best two.
        raise ValueError(
            f"num_experts_per_tok={moe.top_k} with topk_group={moe.topk_group} is not supported: there must be "
            "two experts a group"
        )


def _is_yarn(config: ModelConfig) -> bool:
    return config.rope_scaling is not None and config.rope_scaling["rope_type"] == "yarn"


def _fits_fused_rotary(config: ModelConfig, tp: int) -> bool:
    """Whether latent attention's widths and the heads of a rank are powers of two (fused_mla_yarn_rope_apply.py).

    A Triton kernel's ranges must be powers of two. A block of heads that reaches beyond the last one is not masked: it overwrites the first heads of
    the next token (megatron-core 0.19.2; seen on an H100 with 3 heads in blocks of 2). Blocks of 1 to 128 heads are tried for their speed.
    """
    mla = config.mla
    if mla is None:
        return True
    sizes = (
        mla.qk_nope_head_dim,
        mla.v_head_dim,
        mla.qk_rope_head_dim // 2,
        config.num_attention_heads // tp,
    )
    return all(size & (size - 1) == 0 for size in sizes)


def _is_grouped(config: ModelConfig) -> bool:
    """Whether the choice of experts is limited to some groups."""
    return config.moe is not None and config.moe.topk_group < config.moe.num_groups


def _parallel_settings(layout: ParallelLayout, dtype: torch.dtype, predicted: int) -> dict[str, Any]:
    """`predicted`: layers of multi-token prediction."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "num_layers_in_first_pipeline_stage": layout.first_layers,
        # With two stages the last one's layers follow from the first one's; megatron-core would divide by the number of stages between.
        "num_layers_in_last_pipeline_stage": None
        if layout.pp == 2 and layout.first_layers is not None
        else layout.last_layers,
        "pipeline_model_parallel_layout": _pipeline_layout(layout, predicted),
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sp,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": True,
        # With two stages the interleaved schedule's batched send/receive pairs up wrong chunks: wrong losses
        # without an error. Megatron's own command line sets the same two.
        "overlap_p2p_comm": layout.vpp is not None,
        "batch_p2p_comm": layout.vpp is None,
        "deallocate_pipeline_outputs": True,  # a stage's output is freed once it is sent
    }


def _pipeline_layout(layout: ParallelLayout, predicted: int) -> list[list[str]] | None:
    """The layout as Megatron takes it: by chunk, the first chunks of all stages first."""
    if layout.chunk_layers is None:
        return None
    parts = [["decoder"] * count for count in layout.chunk_layers]
    parts[0].insert(0, "embedding")
    parts[-1] += [*["mtp"] * predicted, "loss"]
    return parts


def _recompute_settings(granularity: str | None, modules: Sequence[str] | None) -> dict[str, Any]:
    if granularity is None:
        return {}
    if granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        "recompute_granularity": granularity,
        "recompute_modules": None if modules is None else list(modules),
    }


def _moe_settings(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    settings: dict[str, Any] = {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_layer_freq": [int(layer not in moe.dense_layers) for layer in range(config.num_layers)],
        "moe_grouped_gemm": True,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.scoring,
        # A softmax over the chosen experts' logits is one over all experts' divided by the chosen ones' sum.
        "moe_router_pre_softmax": moe.scoring == "softmax" and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": moe.scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": 0.0,  # the bias is a weight like others; Megatron would balance loads
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    if _is_grouped(config):
        settings["moe_router_num_groups"] = moe.num_groups
        settings["moe_router_group_topk"] = moe.topk_group
    return settings


def _delta_net_settings(config: ModelConfig) -> dict[str, Any]:
    net = config.delta_net
    assert net is not None
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer in net.layers) for layer in range(config.num_layers)],
        "linear_conv_kernel_dim": net.conv,
        "linear_key_head_dim": net.key_dim,
        "linear_value_head_dim": net.value_dim,
        "linear_num_key_heads": net.key_heads,
        "linear_num_value_heads": net.value_heads,
    }


def _mla_settings(config: ModelConfig) -> dict[str, Any]:
    mla = config.mla
    assert mla is not None
    settings = {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "num_query_groups": config.num_attention_heads,
        "qk_layernorm": True,  # of the compressed queries, keys and values
        "rotary_base": config.rope_theta,
    }
    if not _is_yarn(config):
        # The scaling factor is yarn's, but attention's scale depends on it for any type.
        return settings | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    yarn = _yarn_settings(config)
    del yarn["correction_range_round_to_int"]  # not an option here, and always true
    return settings | {"rope_type": "yarn"} | yarn


def _yarn_settings(config: ModelConfig) -> dict[str, Any]:
    """Yarn's settings as Hugging Face reads them: without `mscale_all_dim`, `mscale` is taken for 1."""
    scaling = config.rope_scaling
    assert scaling is not None
    all_dim = scaling.get("mscale_all_dim") or 0.0
    return {
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32.0,
        "beta_slow": scaling.get("beta_slow") or 1.0,
        "mscale": scaling["mscale"] if all_dim else 1.0,
        "mscale_all_dim": all_dim,
        "correction_range_round_to_int": scaling.get("truncate", True),
    }
