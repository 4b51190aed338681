"""What SGLang's CPU engine lacks for gpt-oss, other than attention (attention.py).

Seen with sglang 0.5.21: it compiles the experts' gated unit with inductor in each scheduler, and has the sinks in bfloat16 whatever the
engine's type, so that a float32 engine would not have the trainer's.
"""

import torch


def _gated(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """x [tokens, 2 ffn], gate's and up's columns in turn -> [tokens, ffn]."""
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def _widen_sinks(result, attention, *args, **kwargs):
    """After SGLang has made an attention layer: sinks in the type of its other weights."""
    sinks = torch.empty_like(attention.sinks, dtype=attention.qkv_proj.weight.dtype)
    attention.sinks = torch.nn.Parameter(sinks, requires_grad=False)
    return result


HOOKS = {
    "sglang.srt.layers.moe.fused_moe_native.swiglu_gpt_oss_sigmoid_alpha": ("REPLACE", _gated),
    "sglang.srt.models.gpt_oss.GptOssAttention.__init__": ("AFTER", _widen_sinks),
}
