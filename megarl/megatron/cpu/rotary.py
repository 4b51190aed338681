"""Rotary embedding (Su et al. 2021, arXiv:2104.09864, equation 34) of packed sequences in plain torch, all of them at once.

Megatron-core 0.19.2 rotates one sequence after the other and writes each into its part of one tensor. Its backward pass
then copies that entire tensor once for each sequence: a quarter of an update's time with 64 sequences of 57 tokens.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor


def install() -> None:
    """Have Megatron rotate packed sequences by `rotate_packed` wherever it has no kernel for it."""
    rope_utils._apply_rotary_pos_emb_thd = rotate_packed


def rotate_packed(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> Tensor:
    """Megatron's `_apply_rotary_pos_emb_thd`. For its backward pass nothing is kept but positions and angles.

    Args:
        t: [tokens, heads, dim]; the first `rotated` of dim are rotated.
        cu_seqlens: [sequences + 1], cumulative lengths, counted before context parallel splitting; with an attribute
            `positions` [tokens] the positions of this rank's tokens are known (`PackedBatch.cu_seqlens`), else the device is asked for lengths.
        freqs: [positions, 1, 1, rotated], angles; both halves of the last dimension are the same.
        mla_rotary_interleaved: pairs are neighbours in `t`, and in halves in the result.
        mscale: factor of the rotated part.
    """
    assert not rotary_interleaved and cp_group is not None
    angles = freqs[:, 0, :, : freqs.shape[-1] // 2]
    positions = getattr(cu_seqlens, "positions", None)
    if positions is None:
        positions = local_positions(cu_seqlens, cp_group.size(), cp_group.rank())
    return _Rotation.apply(t, positions, angles, mla_rotary_interleaved, mscale)


def rotate(t: Tensor, positions: Tensor, freqs: Tensor, interleaved: bool, mscale: float) -> Tensor:
    """`rotate_packed` of tokens at these positions [tokens] of their sequences."""
    return _Rotation.apply(t, positions, freqs[:, 0, :, : freqs.shape[-1] // 2], interleaved, mscale)


def local_positions(cu_seqlens: Tensor, cp: int, rank: int) -> Tensor:
    """[tokens]: the position in its sequence of each token that context parallel rank `rank` of `cp` holds: of 2 cp equal
    parts of each sequence the parts `rank` and 2 cp - 1 - rank."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long() // cp
    ends = lengths.cumsum(0)
    index = torch.arange(int(ends[-1]), device=cu_seqlens.device)
    index -= (ends - lengths).repeat_interleave(lengths)
    if cp == 1:
        return index
    half = (lengths // 2).repeat_interleave(lengths)
    return torch.where(index < half, rank * half + index, (2 * cp - 1 - rank) * half + index - half)


class _Rotation(torch.autograd.Function):
    """(y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin); its backward pass is the rotation the other way round."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        positions: Tensor,
        angles: Tensor,
        interleaved: bool,
        factor: float,
    ) -> Tensor:
        ctx.save_for_backward(positions, angles)
        ctx.options = (interleaved, factor)
        cos, sin = _tables(positions, angles, factor, x.dtype)
        out, rotated = x.new_empty(x.shape), 2 * angles.shape[-1]
        _rotate(_pairs(x, rotated, interleaved), _pairs(out, rotated), cos, sin)
        out[..., rotated:] = x[..., rotated:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, angles = ctx.saved_tensors
        interleaved, factor = ctx.options
        cos, sin = _tables(positions, angles, factor, grad.dtype)
        out, rotated = grad.new_empty(grad.shape), 2 * angles.shape[-1]
        _rotate(_pairs(grad, rotated), _pairs(out, rotated, interleaved), cos, sin.neg_())
        out[..., rotated:] = grad[..., rotated:]
        return out, None, None, None, None


def _tables(positions: Tensor, angles: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the tokens at `positions`: [tokens, 1, rotated / 2] each."""
    cos, sin = ((table * factor).to(dtype) for table in (angles.cos(), angles.sin()))
    return cos.index_select(0, positions), sin.index_select(0, positions)


def _pairs(x: Tensor, rotated: int, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """The first and the second numbers of the pairs that are rotated together: views [tokens, heads, rotated / 2]."""
    if interleaved:
        return x[..., 0:rotated:2], x[..., 1:rotated:2]
    return x[..., : rotated // 2], x[..., rotated // 2 : rotated]


def _rotate(source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> None:
    """Few passes over memory, none of them for a temporary tensor."""
    torch.mul(source[0], cos, out=target[0]).addcmul_(source[1], sin, value=-1)
    torch.mul(source[1], cos, out=target[1]).addcmul_(source[0], sin)
