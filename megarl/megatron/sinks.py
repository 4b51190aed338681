"""Settings of attention with sinks and windows, and of layers that all have biases, as in gpt-oss; combinations that Megatron lacks are refused.

Written against megatron-core 0.19.2 and Transformer Engine 2.18, which has sinks of packed sequences in cuDNN's attention from 9.18 on.
"""

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor

from megarl import platform
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig


def check_sinks_and_biases(config: ModelConfig, layout: ParallelLayout, fused: bool) -> None:
    """Refuse layouts that hold all scores of a sequence, cut key/value heads that do not divide, or add a bias once a rank.

    Args:
        fused: whether Transformer Engine is there.

    Raises:
        ValueError: names the fact, and the key of the layout.
    """
    attention = "attention sinks" if config.sinks else "attention to a window of positions"
    if config.sinks or config.window is not None:
        if platform.is_cuda() and not fused:
            raise ValueError(
                f"a model with {attention} needs Transformer Engine on GPUs: megarl's attention in torch would hold all scores of a sequence; "
                "install it (requirements/gpu.txt)"
            )
        if layout.cp > 1 and config.num_query_groups % (layout.tp * layout.cp):
            raise ValueError(
                f"a model with {attention} has its heads cut by context parallelism: its {config.num_query_groups} key/value heads cannot be "
                f"divided by megatron.tensor_model_parallel_size={layout.tp} times context_parallel_size={layout.cp}"
            )
    if config.moe is not None and config.moe.biases and layout.etp > 1:
        raise ValueError(
            f"experts with biases and megatron.expert_tensor_parallel_size={layout.etp}: each rank that has a part of an expert would add the "
            "bias of its output; set it to 1, and megatron.expert_model_parallel_size up to "
            f"{config.moe.num_experts}"
        )


def attention_settings(config: ModelConfig, layout: ParallelLayout) -> dict[str, Any]:
    """Megatron's settings of attention with sinks and windows."""
    settings: dict[str, Any] = {}
    if config.window is not None:
        settings["window_size"] = (config.window - 1, 0)  # positions before a query's own, and after it
        settings["window_attn_skip_freq"] = [
            int(layer in config.window_layers) for layer in range(config.num_layers)
        ]
    if config.sinks:
        settings["softmax_type"] = "learnable"
    if layout.cp > 1 and (config.sinks or config.window is not None):
        settings["cp_comm_type"] = "a2a"  # the only way in which Transformer Engine (2.18) has sinks
    return settings


def bias_settings(config: ModelConfig) -> dict[str, Any]:
    """Megatron's settings of linear layers that all have biases, and of experts with a clamped gated unit."""
    settings: dict[str, Any] = {}
    moe = config.moe
    if moe is not None and moe.biases:
        # Megatron-core 0.19.2 refuses the fusion of dropout for experts with biases.
        settings = {"add_bias_linear": True, "bias_dropout_fusion": False}
    if moe is not None and moe.clamp is not None:
        settings |= {
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": moe.clamp,
        }
    return settings


def settle_sinks(model: GPTModel, *, fused: bool) -> None:
    """Give attention's sinks the model's type, mark them as cut over tensor parallel ranks, and let gradients of context parallel ranks add up.

    Transformer Engine (2.18) makes them in float32 and without the mark; a gradient's norm would count the first rank's alone. It computes
    the gradient of a head's sink from the tokens of all context parallel ranks (`AttnFuncWithCPAndQKVOA2A`) and gives it to each of these,
    over which gradients are summed.

    fused: whether attention is Transformer Engine's.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".softmax_offset"):
            parameter.data = parameter.data.to(model.config.params_dtype)
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
            if fused and model.config.context_parallel_size > 1:
                parameter.register_hook(partial(_part, ranks=model.config.context_parallel_size))


def _part(gradient: Tensor, ranks: int) -> Tensor:
    """A gradient that equal ones of so many ranks add up to."""
    return gradient / ranks
