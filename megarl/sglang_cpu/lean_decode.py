"""Decode steps on a CPU in fewer operations: rotary embedding, Qwen2's layers, and sampling.

A decode step of a small model is hundreds of operations that each take microseconds, whatever their size, so it takes as long as Python
takes from one operation to the next.

- Rotary embedding: SGLang's plain torch rotates the halves of each head one by one and joins them, and the rest of the head, twice
  (0.5.21). Here it takes fewer steps, to the same bits.
- Qwen2: SGLang's layers are the same on every device, so between their operations they ask which kernels there are, which modes are
  on, and which ranks share the weights. On a CPU, in float32 and for a rank that holds the whole model, the answers are known
  before: here the operations follow each other, on SGLang's own weights and cache. A row's bits depend on no other row where the
  products' do not (batch_invariant.py). All other cases are left to SGLang.
- Sampling: SGLang draws with a request's seed by Gumbel noise: a hash, two logarithms and a sum in float64 for each entry of the
  vocabulary (0.5.21), which is cheap on a GPU. Here one random number is drawn for a token: the token is the first at which the
  cumulative probability exceeds it. Probabilities are summed in float64, each row by itself, so that a token does not depend on
  the other requests.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

KEPT_ROTATION = "megarl_rotation"  # attribute of SGLang's layer: (positions, cosines, sines) of the last step
MAX_KEPT_TOKENS = 1024  # tokens: a step of more is no decode step
Rotation = tuple[torch.Tensor, torch.Tensor]
KEPT_ANSWER = "megarl_is_lean"  # attribute of SGLang's model: the result of `is_lean`


def rotate(
    original: Callable[..., Rotation],
    rotary: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Rotation:
    """Around SGLang's own, which still handles other types than float32, and heads that rotate neighbours or a part alone.

    Args:
        rotary: SGLang's layer; its table: [positions, dim], the cosines and then the sines.
        positions: [tokens].
        query, key: [tokens, heads * dim].
        args, kwargs: further arguments of SGLang's; None where they are not used.
    """
    in_float32 = query.dtype == key.dtype == torch.float32
    plain = all(value is None for value in (*args, *kwargs.values()))
    if not plain or not in_float32 or not rotates_halves(rotary):
        return original(rotary, positions, query, key, *args, **kwargs)
    by = rotation_of(rotary, positions.flatten())
    return apply_rotation(query, *by), apply_rotation(key, *by)


def rotates_halves(rotary: Any) -> bool:
    """Whether SGLang's layer rotates the two halves of complete heads, by a table in float32."""
    all_rotated = rotary.is_neox_style and rotary.rotary_dim == rotary.head_size
    return (
        all_rotated and rotary.cos_sin_cache.dtype == torch.float32 and not hasattr(rotary, "sin_cos_cache")
    )


def rotation_of(rotary: Any, positions: torch.Tensor) -> Rotation:
    """Cosines and sines, both [tokens, 1, dim], the sines of a head's first half negative. Kept for the other layers of a step, which
    share the rotary layer."""
    kept = getattr(rotary, KEPT_ROTATION, None)
    if kept is not None and torch.equal(kept[0], positions):
        return kept[1:]
    cos, sin = rotary.cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
    cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
    sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
    if len(positions) <= MAX_KEPT_TOKENS:
        setattr(rotary, KEPT_ROTATION, (positions.clone(), cos, sin))
    return cos, sin


def apply_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads * dim]; cos, sin: [tokens, 1, dim], the sines of the first half negative."""
    dim = cos.shape[-1]
    heads = x.view(len(cos), -1, dim)
    other = heads.roll(dim // 2, -1).mul_(sin)
    return (heads * cos).add_(other).view(x.shape)


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
    if not (usual and computes and _known_lean(model)):
        return original(model, input_ids, positions, forward_batch, *args, **kwargs)
    x = model.embed_tokens(input_ids)
    rotation = rotation_of(model.layers[0].self_attn.rotary_emb, positions)
    attend = backend.attend_running if mode.is_decode() and backend.runs_on else _attend_as_sglang
    for layer in model.layers:
        x = through_layer(layer, x, rotation, partial(attend, layer.self_attn.attn, forward_batch))
    return normed(x, model.norm)


def _attend_as_sglang(
    attention: Any, forward_batch: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Like `BatchedTorchAttention.attend_running`, for any step."""
    return attention(query, keys, values, forward_batch)


def through_layer(
    layer: Any, x: torch.Tensor, rotation: Rotation, attend: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Tokens through a layer.

    Args:
        layer: SGLang's. Its weights are looked up in each step, since a sync may have replaced them.
        x: [n, hidden], the output of the layers before.
        rotation: rotation of the tokens' positions (`rotation_of`).
        attend: attention: queries [n, heads, dim], keys and values [n, key heads, dim] -> [n, heads, dim].
    """
    attention, mlp = layer.self_attn, layer.mlp
    n, heads, dim = len(x), attention.num_heads, attention.head_dim
    rotated_size = (heads + attention.num_kv_heads) * dim
    qkv_proj = attention.qkv_proj
    qkv = functional.linear(normed(x, layer.input_layernorm), qkv_proj.weight, qkv_proj.bias)
    rotated = apply_rotation(qkv[:, :rotated_size], *rotation).view(n, -1, dim)
    keys, values = rotated[:, heads:], qkv[:, rotated_size:].view(n, -1, dim)
    out = attend(rotated[:, :heads], keys, values)
    x = torch.addmm(x, out.reshape(n, -1), attention.o_proj.weight.t())
    gate_up = functional.linear(normed(x, layer.post_attention_layernorm), mlp.gate_up_proj.weight)
    return torch.addmm(x, activated(gate_up), mlp.down_proj.weight.t())


def normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4) of x: [n, hidden]."""
    return torch.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def activated(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202, equation 6) of [n, 2 * width]: the gate, then the gated half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _known_lean(model: Any) -> bool:
    """The model's `is_lean`, found at the first step, when adapters are in place."""
    if not hasattr(model, KEPT_ANSWER):
        setattr(model, KEPT_ANSWER, is_lean(model))
    return getattr(model, KEPT_ANSWER)


def is_lean(model: Any) -> bool:
    """Whether `through_layer` computes all features of the layers of SGLang's Qwen2Model."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.models.qwen2 import Qwen2DecoderLayer
    from sglang.srt.utils import cpu_has_amx_support

    layers = list(model.layers)
    return (
        not cpu_has_amx_support()
        and not model.layers_to_capture
        and type(model.embed_tokens) is VocabParallelEmbedding
        and _is_plain_norm(model.norm)
        and all(type(layer) is Qwen2DecoderLayer for layer in layers)
        and all(layer.self_attn.rotary_emb is layers[0].self_attn.rotary_emb for layer in layers)
        and all(_is_plain(layer) for layer in layers)
    )


def _is_plain(layer: Any) -> bool:
    """Whether this rank alone computes a layer, with plain weights in float32."""
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    kinds = (QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
    plain_linears = all(
        type(linear) is kind  # not an adapter around it
        and type(linear.quant_method) is UnquantizedLinearMethod
        and linear.weight.dtype == torch.float32
        and linear.tp_size == 1
        for linear, kind in zip(linears, kinds, strict=True)
    )
    return (
        plain_linears
        and all(linear.bias is None for linear in linears[1:])
        and rotates_halves(attention.rotary_emb)
        and attention.attn.sliding_window_size in (None, -1)
        and _is_plain_norm(layer.input_layernorm)
        and _is_plain_norm(layer.post_attention_layernorm)
    )


def _is_plain_norm(norm: Any) -> bool:
    from sglang.srt.layers.layernorm import RMSNorm

    others = ("variance_size_override", "override_orig_dtype", "fp32_residual", "cast_x_before_out_mul")
    return type(norm) is RMSNorm and not any(getattr(norm, name) for name in others)


def sample(
    original: Callable[..., torch.Tensor],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around SGLang's own, which still handles requests without seeds.

    Args:
        probs: [n, vocabulary], nonnegative; their sums need not be 1.
        sampling_seed, positions: [n], int64: a request's, and of the token before the one that is drawn.

    Returns:
        [n], int32; no token of probability 0.
    """
    if sampling_seed is None:
        return original(probs, sampling_seed, positions)
    up_to = probs.cumsum(-1, dtype=torch.float64)
    drawn = torch.from_numpy(uniforms(sampling_seed.numpy(), positions.numpy()))[:, None] * up_to[:, -1:]
    tokens = torch.searchsorted(up_to, drawn, right=True, out_int32=True).view(-1)
    # Only rows with NaNs yield a token beyond the last one; their log-probs show it.
    return tokens.clamp_(max=probs.shape[-1] - 1)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The numbers at `positions` of the SplitMix64 streams that begin at `seeds` (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators", OOPSLA, figure 17; mix64 is its variant 13).

    Args:
        seeds, positions: [n], int64; positions from 0.

    Returns:
        [n], float64 in [0, 1), of 53 bits.
    """
    z = seeds.view(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return ((z ^ z >> np.uint64(31)) >> np.uint64(11)) * 2.0**-53


HOOKS = {
    "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native": ("AROUND", rotate),
    "sglang.srt.models.qwen2.Qwen2Model.forward": ("AROUND", forward),
    "sglang.srt.layers.sampler.sampling_from_probs_torch": ("AROUND", sample),
}
