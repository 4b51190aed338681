"""Qwen2 on a CPU without what SGLang has between a layer's operations.

A step of a small model takes as long as Python takes to come from one operation to the next. SGLang's layers, which are the same on
every device, ask on the way which kernels there are, which modes are on, who else has a part of the weights. On a CPU, in
float32 and for a rank that holds the whole model, all that is known before: here its operations follow each other, on SGLang's own weights
and cache, each row's bits its own where the products' are (`batch_invariant`). What is otherwise is left to SGLang (0.5.21).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from megarl.sglang_cpu import rotary as cpu_rotary

KEPT = "megarl_lean_layers"  # attribute of SGLang's model: what `lean_layers` has found


@dataclass(frozen=True)
class LeanLayer:
    """SGLang's modules of a decoder layer. Their weights are looked up in each step: a sync may have put others there.

    Attributes:
        heads, key_heads, dim: of attention.
    """

    attention_norm: Any
    qkv: Any
    attention: Any
    output: Any
    mlp_norm: Any
    gate_up: Any
    down: Any
    heads: int
    key_heads: int
    dim: int


def register() -> None:
    """Called in each scheduler process on a CPU before SGLang runs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.models.qwen2.Qwen2Model.forward", forward, HookType.AROUND)


def forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around SGLang's own: [tokens], [tokens] -> the last layer's normed output, [tokens, hidden]."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend, mode = get_attn_backend(), forward_batch.forward_mode
    usual = all(value is None for value in (*args, *kwargs.values()))
    computes = mode.is_decode() or mode.is_extend()
    layers = _layers_of(model) if usual and computes else None
    if layers is None:
        return original(model, input_ids, positions, forward_batch, *args, **kwargs)
    x = model.embed_tokens(input_ids)
    turn = cpu_rotary.turn(model.layers[0].self_attn.rotary_emb, positions)
    attend = backend.attend_running if mode.is_decode() and backend.runs_on else _attend_as_sglang
    for layer in layers:
        x = through_layer(layer, x, turn, partial(attend, layer.attention, forward_batch))
    return normed(x, model.norm)


def _attend_as_sglang(
    attention: Any, forward_batch: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Like `BatchedTorchAttention.attend_running`, of any step."""
    return attention(query, keys, values, forward_batch)


def through_layer(
    layer: LeanLayer, x: torch.Tensor, turn: cpu_rotary.Turned, attend: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Tokens through a layer.

    Args:
        x: [n, hidden], as the layers before have left it.
        turn: of the tokens' positions (`cpu_rotary.turn`).
        attend: of queries [n, heads, dim], keys and values [n, key heads, dim], what they find: [n, heads, dim].
    """
    n, turned_size = len(x), (layer.heads + layer.key_heads) * layer.dim
    qkv = functional.linear(normed(x, layer.attention_norm), layer.qkv.weight, layer.qkv.bias)
    turned = cpu_rotary.turned(qkv[:, :turned_size], *turn).view(n, -1, layer.dim)
    keys, values = turned[:, layer.heads :], qkv[:, turned_size:].view(n, -1, layer.dim)
    out = attend(turned[:, : layer.heads], keys, values)
    x = torch.addmm(x, out.reshape(n, -1), layer.output.weight.t())
    gate_up = functional.linear(normed(x, layer.mlp_norm), layer.gate_up.weight)
    return torch.addmm(x, activated(gate_up), layer.down.weight.t())


def normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4) of x: [n, hidden]."""
    return torch.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def activated(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202, equation 6) of [n, 2 * width]: the gate, then what passes it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _layers_of(model: Any) -> tuple[LeanLayer, ...] | None:
    """Its `lean_layers`, found at the first step: adapters are in their places by then."""
    if not hasattr(model, KEPT):
        setattr(model, KEPT, lean_layers(model))
    return getattr(model, KEPT)


def lean_layers(model: Any) -> tuple[LeanLayer, ...] | None:
    """The layers of SGLang's Qwen2Model; None: something about it is not what is computed here."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.models.qwen2 import Qwen2DecoderLayer
    from sglang.srt.utils import cpu_has_amx_support

    layers = list(model.layers)
    if (
        cpu_has_amx_support()
        or model.layers_to_capture
        or type(model.embed_tokens) is not VocabParallelEmbedding
    ):
        return None
    if not _is_plain_norm(model.norm) or not all(type(layer) is Qwen2DecoderLayer for layer in layers):
        return None
    if any(layer.self_attn.rotary_emb is not layers[0].self_attn.rotary_emb for layer in layers):
        return None
    return tuple(_lean(layer) for layer in layers) if all(_is_plain(layer) for layer in layers) else None


def _lean(layer: Any) -> LeanLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return LeanLayer(
        attention_norm=layer.input_layernorm,
        qkv=attention.qkv_proj,
        attention=attention.attn,
        output=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm,
        gate_up=mlp.gate_up_proj,
        down=mlp.down_proj,
        heads=attention.num_heads,
        key_heads=attention.num_kv_heads,
        dim=attention.head_dim,
    )


def _is_plain(layer: Any) -> bool:
    """Whether a layer is computed by this rank alone, by its weights as they are, in float32."""
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    kinds = (QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
    whole = all(
        type(linear) is kind  # not an adapter around it
        and type(linear.quant_method) is UnquantizedLinearMethod
        and linear.weight.dtype == torch.float32
        and linear.tp_size == 1
        for linear, kind in zip(linears, kinds, strict=True)
    )
    return (
        whole
        and all(linear.bias is None for linear in linears[1:])
        and cpu_rotary.turns_halves(attention.rotary_emb)
        and attention.attn.sliding_window_size in (None, -1)
        and _is_plain_norm(layer.input_layernorm)
        and _is_plain_norm(layer.post_attention_layernorm)
    )


def _is_plain_norm(norm: Any) -> bool:
    from sglang.srt.layers.layernorm import RMSNorm

    others = ("variance_size_override", "override_orig_dtype", "fp32_residual", "cast_x_before_out_mul")
    return type(norm) is RMSNorm and not any(getattr(norm, name) for name in others)
