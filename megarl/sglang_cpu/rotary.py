"""Rotary embedding on a CPU in fewer steps than SGLang's own, to the same bits.

A decode step of a small model is made of hundreds of operations that each take microseconds, whatever their size. SGLang's plain torch
turns the halves of each head one by one and joins them, and the rest of the head, twice (0.5.21).
"""

from collections.abc import Callable
from typing import Any

import torch

KEPT = "megarl_turn"  # attribute of SGLang's layer: (positions, cosines, sines) of the last step
MOST_KEPT = 1024  # tokens: a step of more is no decode step
Turned = tuple[torch.Tensor, torch.Tensor]


def register() -> None:
    """Called in each scheduler process on a CPU before SGLang runs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native", rotate, HookType.AROUND
    )


def rotate(
    original: Callable[..., Turned],
    rotary: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Turned:
    """Around SGLang's own, which is left what is not float32, or turns neighbours or a part of a head alone.

    Args:
        rotary: SGLang's layer; its table: [positions, dim], the cosines and then the sines.
        positions: [tokens].
        query, key: [tokens, heads * dim].
        args, kwargs: what else SGLang's takes; None where it is not used.
    """
    in_float32 = query.dtype == key.dtype == torch.float32
    plain = all(value is None for value in (*args, *kwargs.values()))
    if not plain or not in_float32 or not turns_halves(rotary):
        return original(rotary, positions, query, key, *args, **kwargs)
    by = turn(rotary, positions.flatten())
    return turned(query, *by), turned(key, *by)


def turns_halves(rotary: Any) -> bool:
    """Whether SGLang's layer turns the two halves of whole heads by its table in float32."""
    whole = rotary.is_neox_style and rotary.rotary_dim == rotary.head_size
    return whole and rotary.cos_sin_cache.dtype == torch.float32 and not hasattr(rotary, "sin_cos_cache")


def turn(rotary: Any, positions: torch.Tensor) -> Turned:
    """Cosines and sines, both [tokens, 1, dim], those of a head's first half negative: kept for the other layers of a step, which
    share the rotary layer."""
    kept = getattr(rotary, KEPT, None)
    if kept is not None and torch.equal(kept[0], positions):
        return kept[1:]
    cos, sin = rotary.cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
    cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
    sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
    if len(positions) <= MOST_KEPT:
        setattr(rotary, KEPT, (positions.clone(), cos, sin))
    return cos, sin


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads * dim]; cos, sin: [tokens, 1, dim], the sines of the first half negative."""
    dim = cos.shape[-1]
    heads = x.view(len(cos), -1, dim)
    other = heads.roll(dim // 2, -1).mul_(sin)
    return (heads * cos).add_(other).view(x.shape)
