"""Weights in float8 blocks on a CPU without SGLang's compiled kernels: dequantised, then used like any others.

SGLang 0.5.21 asserts AMX kernels for them. Here a layer's weights are dequantised each time they are used, which is
slow and exact: the answers are those of a model with the dequantised weights. (On a GPU the activations are
quantised, too.) Parameters keep SGLang's names and layout.
"""

from types import SimpleNamespace

import torch


def _add_float32(result, *args, **kwargs):
    return [*result, torch.float32]


def _leave_as_loaded(self, layer) -> None:
    """In place of packing for the compiled kernels."""


def _choose_linear(weight_block_size=None, act_scale_ue8m0=False):
    return _linear


def _linear(input, weight, block_size, weight_scale, input_scale=None, bias=None):
    """input: [tokens, columns]; weight: [rows, columns] float8; weight_scale: [row blocks, column blocks]."""
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    assert input_scale is None, "activations are not quantised on a CPU"
    weight = block_quant_dequant(weight, weight_scale, block_size, input.dtype)
    return torch.nn.functional.linear(input, weight, bias)


def _apply_experts(self, layer, dispatch_output):
    """As SGLang's `UnquantizedFusedMoEMethod.forward_cpu`, with the layer's experts dequantised."""
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    x, block = dispatch_output.hidden_states, self.quant_config.weight_block_size
    plain = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=block_quant_dequant(layer.w13_weight, layer.w13_weight_scale_inv, block, x.dtype),
        w2_weight=block_quant_dequant(layer.w2_weight, layer.w2_weight_scale_inv, block, x.dtype),
    )
    output = fused_moe_native.moe_forward_native(
        plain, x, dispatch_output.topk_output, self.moe_runner_config
    )
    return StandardCombineInput(hidden_states=output)


def _absorbed(weight, scales, block_size):
    """The weight from which latent attention's absorbed projections are made, and its scale.

    SGLang quantises it again, with a single scale, and multiplies in bfloat16. On GPUs, and here, it is
    dequantised: `post_load_weights` then takes it for a weight that was never quantised.
    """
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    return block_quant_dequant(weight, scales, block_size, torch.get_default_dtype()), 1.0


FP8 = "sglang.srt.layers.quantization.fp8"
HOOKS = {
    f"{FP8}.dispatch_w8a8_block_fp8_linear": ("REPLACE", _choose_linear),
    f"{FP8}.Fp8LinearMethod.process_weights_after_loading_block_quant": ("REPLACE", _leave_as_loaded),
    f"{FP8}.Fp8MoEMethod.process_weights_after_loading_block_quant": ("REPLACE", _leave_as_loaded),
    f"{FP8}.Fp8MoEMethod.apply": ("REPLACE", _apply_experts),
    f"{FP8}.Fp8Config.get_supported_act_dtypes": ("AFTER", _add_float32),
    "sglang.srt.models.deepseek_common.deepseek_weight_loader.block_quant_to_tensor_quant": (
        "REPLACE",
        _absorbed,
    ),
}
