"""The kernels of gated delta nets in plain torch, under the interfaces of flash-linear-attention (fla), which megatron-core 0.19.2 calls.

Sequences lie end to end; neither a state nor a convolution's window goes over their bounds. For a backward pass the inputs alone are
kept, from which everything else is computed again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import common, gdn
from torch import Tensor
from torch.nn.functional import silu


class _Again(torch.autograd.Function):
    """function(*tensors), computed again in its backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        own = [
            part.detach().requires_grad_(needs) for part, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            result = ctx.function(*own)
        found = iter(
            torch.autograd.grad(
                result, [part for part, needs in zip(own, needed, strict=True) if needs], grad
            )
        )
        return None, *(next(found) if needs else None for needs in needed)


CHUNK = 64  # tokens of a sequence that are computed by matrix products; the state passes from chunk to chunk


def install() -> None:
    """Have Megatron's gated delta nets computed by the functions below, unless fla is there."""
    if common.HAVE_FLA:
        return
    common.HAVE_FLA = True  # asked when a layer is made
    common.l2norm = l2norm
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = causal_conv1d, chunk_gated_delta_rule


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps), the sum over the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Each channel's tokens mixed with those before them in their sequence, then silu.

    x: [1, tokens, channels]; weight: [channels, window], its last column for the token itself; cu_seqlens: [sequences + 1].

    Returns: as x, and no last window.
    """
    assert bias is None and activation in ("silu", "swish") and not unused.get("output_final_state")
    return _Again.apply(partial(_convolve, cu_seqlens), x, weight), None


def _convolve(cu_seqlens: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    tokens, window = x.shape[1], weight.shape[1]
    position = torch.arange(tokens, device=x.device)
    if cu_seqlens is not None:
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        position = position - starts.repeat_interleave(lengths)
    mixed = x * weight[:, -1]
    for back in range(1, min(window, tokens)):
        earlier = x[:, :-back] * (position[back:, None] >= back)
        mixed = mixed + torch.cat([torch.zeros_like(x[:, :back]), earlier * weight[:, -1 - back]], dim=1)
    return silu(mixed)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule (Yang et al., arXiv:2412.06464, equation 10), by chunks as in its section 3.3, computed in float32.

    A head has a state S [key_dim, value_dim], zero before a sequence. At each token, with a = exp(g), it becomes
    a (S - beta k (k^T S)) + beta k v^T, and the output is S^T q / sqrt(key_dim).

    Args:
        q, k: [1, tokens, heads, key_dim], normed. v: [1, tokens, heads, value_dim]. g, beta: [1, tokens, heads].
        cu_seqlens: [sequences + 1].

    Returns: as v, and no last state.
    """
    assert q.shape[0] == 1 and unused.get("initial_state") is None and not unused.get("output_final_state")
    assert not unused.get("use_qk_l2norm_in_kernel") and unused.get("scale") is None
    return _Again.apply(partial(_by_chunks, cu_seqlens), q, k, v, g, beta), None


def _by_chunks(cu_seqlens: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    lengths = cu_seqlens.diff().tolist() if cu_seqlens is not None else [q.shape[1]]
    size = min(CHUNK, max(lengths))
    index, counts = _places(lengths, size, q.device)
    dtype = v.dtype
    q, k, v, g, beta = (_in_chunks(part[0].float(), index, size) for part in (q, k, v, g, beta))
    q = q * q.shape[-1] ** -0.5
    g = g.cumsum(-1)  # the logarithm of the decay since the chunk's beginning
    upper = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(upper, -torch.inf).exp()
    keys = k * beta[..., None]
    # What a token writes depends on what the chunk's earlier ones wrote: (1 + lower triangle) writes = values.
    mutual = (keys @ k.transpose(-1, -2) * decay).tril(-1)
    values = torch.cat([v * beta[..., None], keys * g.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(mutual, values, upper=False, unitriangular=True)
    own, of_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = q @ k.transpose(-1, -2) * decay
    reads = q * g.exp()[..., None]
    last = g[..., -1:]
    leaves = (k * (last - g).exp()[..., None]).transpose(-1, -2)

    outputs, state = [], None  # of the sequences that have so many chunks: the longest are first
    first = 0
    for count in counts:
        of_chunk = slice(first, first + count)
        written = own[of_chunk]
        if state is not None:
            state = state[:count]
            written = written - of_state[of_chunk] @ state
        output, left = within[of_chunk] @ written, leaves[of_chunk] @ written
        if state is not None:
            output = output + reads[of_chunk] @ state
            left = left + state * last[of_chunk].exp()[..., None]
        outputs.append(output)
        state, first = left, first + count
    found = torch.cat(outputs).transpose(1, 2).flatten(0, 1)  # [chunks * size, heads, value_dim]
    return found.index_select(0, index)[None].to(dtype)


def _places(lengths: list[int], size: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Where each token lies among the chunks of `size` tokens of all sequences, and how many sequences have a first, a second, ... chunk.

    Chunks are in the order of their numbers in a sequence, among these the longest sequences' first.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    chunks = [-(-length // size) for length in lengths]
    counts = [sum(chunk > number for chunk in chunks) for number in range(max(chunks))]
    rank = {number: place for place, number in enumerate(order)}
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    places = []
    for number, length in enumerate(lengths):
        steps = torch.arange(length)
        starts = torch.tensor(firsts)[steps // size] + rank[number]
        places.append(starts * size + steps % size)
    return torch.cat(places).to(device), counts


def _in_chunks(part: Tensor, index: Tensor, size: int) -> Tensor:
    """[tokens, heads, ...] -> [chunks, heads, size, ...], with zeros after a sequence's end."""
    chunks = int(index.max()) // size + 1
    out = part.new_zeros(chunks * size, *part.shape[1:]).index_copy(0, index, part)
    return out.unflatten(0, (chunks, size)).transpose(1, 2)
