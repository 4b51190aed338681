"""The operators of gated delta nets and gated attention (Qwen3-Next, Qwen3.5) that SGLang's CPU engine has in its compiled `sgl_kernel` (sglang 0.5.21), in plain torch.

The state of a request lies in a slot of SGLang's pool: the last inputs of its convolution, and a matrix for each head. Tokens change it
one after the other, whatever part of a prompt they come with, and each row of a result is computed from its own request alone: so bits
depend neither on other requests nor on how a prompt was cut. To this end sums are added up in an order of their own (`_sum`), and
functions get numbers of elements at which torch computes all of them alike (`_alike`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

EPS = 1e-6  # of the norm of queries and keys
TWO_VECTORS = 32  # elements, of AVX-512: torch computes the last ones of a tensor, less than these, by another exp (batch_invariant.py)


def convolve_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **unused: Any,
) -> Tensor:
    """Mix each channel's tokens with those before them in their request, then silu; keep the last ones.

    Args:
        x: [channels, tokens] of all requests, end to end. weight: [channels, window].
        conv_states: [slots, channels, window - 1]; the requests' slots are filled.
        has_initial_state: [requests], whether a request's tokens follow those in its slot. cache_indices: [requests], slots.
        query_start_loc: [requests + 1].

    Returns: as x.
    """
    assert bias is None and activation in ("silu", "swish")
    bounds, before, out = query_start_loc.tolist(), weight.shape[1] - 1, torch.empty_like(x)
    for number, (slot, follows) in enumerate(
        zip(cache_indices.tolist(), has_initial_state.tolist(), strict=True)
    ):
        tokens = slice(bounds[number], bounds[number + 1])
        earlier = conv_states[slot].to(x.dtype) if follows else x.new_zeros(x.shape[0], before)
        window = torch.cat([earlier, x[:, tokens]], dim=1)
        out[:, tokens] = _mixed(window.unfold(1, before + 1, 1), weight[:, None])
        conv_states[slot] = window[:, window.shape[1] - before :].to(conv_states.dtype)
    return out


def convolve_next(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    conv_state_indices: Tensor,
    **unused: Any,
) -> Tensor:
    """As `convolve_prompts`, of the next token of each request. x: [requests, channels] -> as x."""
    assert bias is None and activation in ("silu", "swish") and not any(unused.values())
    slots = conv_state_indices.long()
    window = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], dim=2)
    conv_states[slots] = window[:, :, 1:].to(conv_states.dtype)
    return _mixed(window, weight)


def _mixed(window: Tensor, weight: Tensor) -> Tensor:
    """silu of the windows' sums [..., window] by weights."""
    return _alike(silu, _sum(window * weight))


def _sum(x: Tensor) -> Tensor:
    """The sums over the last dimension, by halves: torch's order depends on where the elements lie in memory."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([x, rest], dim=-1) if rest.shape[-1] else x
    return x[..., 0]


def _alike(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each element, so that its bits do not depend on where it lies."""
    return function(pad(x.reshape(-1), (0, -x.numel() % TWO_VECTORS)))[: x.numel()].view(x.shape)


def gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of decays, and the betas, from the projections: [tokens, heads] each -> [1, tokens, heads] in float32."""
    decay = -_alike(torch.exp, a_log.float()) * _alike(softplus, a.float() + dt_bias.float())
    return decay[None], _alike(torch.sigmoid, b.float())[None]


def rule_of_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    **unused: Any,
) -> tuple[Tensor, None, None]:
    """The gated delta rule over the tokens of requests, end to end; their states follow.

    Args:
        q, k: [1, tokens, key heads, key_dim], before their norm. v: [1, tokens, heads, value_dim]. g, beta: as `gates` returns them.
        initial_state: [slots, heads, value_dim, key_dim], float32; the requests' states go on from what their slots hold.
        cu_seqlens: [requests + 1]. initial_state_indices: [requests], slots.

    Returns: as v; None for the last states and for the states between chunks.
    """
    out, slots = torch.empty_like(v), initial_state_indices.long()
    bounds = cu_seqlens.tolist()
    states = initial_state[slots].float()
    parts = _prepared(q[0], k[0], v[0], g[0], beta[0])  # of all tokens, row by row
    for number in range(len(slots)):
        for token in range(bounds[number], bounds[number + 1]):
            at = slice(token, token + 1)
            out[0, at], states[number : number + 1] = _step(
                states[number : number + 1], *(part[at] for part in parts)
            )
    initial_state[slots] = states.to(initial_state.dtype)
    return out, None, None


def rule_of_next(
    a_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """As `rule_of_prompts`, of the next token of each request: q, k, v [1, requests, heads, ...]; a, b [requests, heads] -> as v."""
    g, beta = gates(a_log, a, b, dt_bias)
    rows = slots.long()
    out, after = _step(states[rows].float(), *_prepared(q[0], k[0], v[0], g[0], beta[0]))
    states[rows] = after.to(states.dtype)
    return out[None].to(v.dtype)


def _prepared(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """The inputs of `_step` for n tokens: q, k [n, key heads, key_dim]; v [n, heads, value_dim]; g, beta [n, heads]."""
    each = v.shape[1] // k.shape[1]
    q, k = (_normed(part.float()).repeat_interleave(each, 1)[:, :, None] for part in (q, k))
    decay = _alike(torch.exp, g.float())[..., None, None]
    return q * q.shape[-1] ** -0.5, k, v.float(), decay, beta.float()[..., None]


def _step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """A token of each of n requests: the output [n, heads, value_dim], and the states after it. state: [n, heads, value_dim, key_dim]."""
    state = state * decay
    change = (v - _sum(state * k)) * beta
    state = state + change[..., None] * k
    return _sum(state * q), state


def _normed(x: Tensor) -> Tensor:
    return x * (_sum(x.square())[..., None] + EPS).rsqrt()


def gated_norm(layer: Any, x: Tensor, g: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In place of `FusedRMSNormGated.forward` (Qwen3-Next) and `RMSNorm.forward` (Qwen3.5), whose kernels are Triton's or compiled: RMS norm, weight, then silu of the gate."""
    assert layer.activation in ("silu", "swish") and not args and not kwargs
    wide = x.float()
    normed = wide * (_sum(wide.square())[..., None] / wide.shape[-1] + layer.eps).rsqrt()
    return (normed.to(x.dtype) * layer.weight * _alike(silu, g.float())).to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of the rows, then 1 + weight."""
    wide = x.float()
    normed = wide * (_sum(wide.square())[..., None] / wide.shape[-1] + eps).rsqrt()
    return (normed * (1.0 + weight.float())).to(x.dtype)


def norm_heads(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """q, k: [tokens, heads * head_dim] -> [tokens * heads, head_dim], each head normed."""
    return gemma_norm(q.reshape(-1, head_dim), q_weight, eps), gemma_norm(
        k.reshape(-1, head_dim), k_weight, eps
    )


def norm_gated_heads(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `norm_heads`, of queries each of whose heads is followed by its gates: [tokens, heads * 2 * head_dim]. The gates are the last
    result."""
    q, gate = q_gate.reshape(-1, 2 * head_dim).chunk(2, dim=-1)
    normed = norm_heads(q.contiguous(), k, q_weight, k_weight, eps, head_dim)
    return *normed, gate.contiguous()


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> None:
    """Multiply x [tokens, width] in place by the sigmoids of as many gates."""
    x.copy_(x.float() * _alike(torch.sigmoid, gate.reshape(x.shape).float()))


def split_inputs(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[tokens, queries | keys | values | gates] and [tokens, betas | decays] -> the first three, gates [tokens, heads, value_dim], betas, decays."""
    mixed = 2 * key_heads * key_dim + value_heads * value_dim
    gates = qkvz[:, mixed:].reshape(len(qkvz), value_heads, value_dim)
    parts = (qkvz[:, :mixed], gates, ba[:, :value_heads], ba[:, value_heads:])
    mixed_qkv, z, b, a = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return mixed_qkv, z, b, a


def add_gated(hidden: Tensor, gate_weight: Tensor, shared: Tensor, output: Tensor) -> None:
    """Add to the experts' output [tokens, hidden] the shared expert's, times the sigmoid of its gate: in place of a kernel of Triton's."""
    gate = _alike(torch.sigmoid, _sum(hidden.float() * gate_weight.float())[..., None])
    output.copy_(gate * shared.float() + output.float())


HOOKS = {
    "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward": ("REPLACE", gated_norm),
    "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward": ("REPLACE", gated_norm),
    "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add": ("REPLACE", add_gated),
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn_cpu": convolve_prompts,
    "causal_conv1d_update_cpu": convolve_next,
    "chunk_gated_delta_rule_cpu": rule_of_prompts,
}
"""What SGLang imports from `sgl_kernel.mamba`."""


def define_operators(library: Any) -> None:
    """Declare the operators that SGLang takes from `torch.ops.sgl_kernel`."""
    library.define(
        "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)"
    )
    library.impl("fused_gdn_gating_cpu", gates, "CPU")
    library.define(
        "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, "
        "float softplus_beta, float softplus_threshold) -> Tensor"
    )
    library.impl(
        "fused_sigmoid_gating_delta_rule_update_cpu",
        lambda a_log, dt_bias, q, k, v, a, b, states, slots, *rest: rule_of_next(
            a_log, dt_bias, q, k, v, a, b, states, slots
        ),
        "CPU",
    )
    for schema, function in _OF_QWEN3_5.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")


_OF_QWEN3_5: dict[str, Callable[..., Any]] = {
    "fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()": multiply_by_sigmoid,
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> (Tensor, Tensor)": norm_heads,
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, "
    "int num_heads) -> (Tensor, Tensor, Tensor)": norm_gated_heads,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int num_heads_v, int head_qk, "
    "int head_v) -> (Tensor, Tensor, Tensor, Tensor)": split_inputs,
}
