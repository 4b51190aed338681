"""Outputs and gradients of a kernel, in pairs with torch's, and the inputs that both have; attention by its formula."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from megarl.gpu_test.runner import Check


class Compared(NamedTuple):
    """One output, or gradient, of both."""

    name: str
    found: torch.Tensor
    expected: torch.Tensor


def compared(name: str, case: Callable[[], Iterable[Compared]], tolerance: float) -> Check:
    """Whether all pairs of a case are as close as `tolerance`, relative to the largest expected number.

    A case that raises is a check that is wrong: the others are looked at nonetheless.
    """
    errors: dict[str, float] = {}
    try:
        for pair in case():
            errors[pair.name] = difference(pair)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Check(name, False, f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})")
    wrong = [part for part, error in errors.items() if not error <= tolerance]
    text = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
    return Check(name, bool(errors) and not wrong, f"{text} (at most {tolerance:g})", dict(errors))


def difference(pair: Compared) -> float:
    """The largest difference, relative to the largest expected number; infinite for other shapes and non-finite numbers."""
    found, expected = pair.found.detach().double().cpu(), pair.expected.detach().double().cpu()
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    return float((found - expected).abs().max()) / max(scale, 1e-30) if found.numel() else 0.0


BF16 = 2e-2  # of the largest number: bfloat16 has 8 bits, sums are of some hundred products
LENGTHS = (70, 1, 129, 56)  # of packed sequences
Case = Callable[[str], Iterator[Compared]]


def made(device: str, *shape: int, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf in bfloat16 on the device, and one of the same numbers in float32."""
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16().to(device)
    return values.clone().requires_grad_(), values.float().requires_grad_()


def queries_keys_values(
    device: str, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """The inputs of an attention as leaves of `with_gradients`."""
    shapes = {"queries": query, "keys": key, "values": value}
    return [(name, *made(device, *shape, seed=seed)) for seed, (name, shape) in enumerate(shapes.items(), 1)]


def ends_of(lengths: Sequence[int], device: str) -> torch.Tensor:
    """Cumulative lengths of packed sequences, 0 first, int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def with_gradients(
    found: torch.Tensor, expected: torch.Tensor, leaves: Iterable[tuple[str, torch.Tensor, torch.Tensor]]
) -> Iterator[Compared]:
    """An output and, after a backward pass, the gradients of its leaves, each with its reference."""
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(99)).to(expected.device)
    found.backward(weight.to(found.dtype))
    expected.backward(weight)
    yield Compared("output", found, expected)
    for name, leaf, other in leaves:
        yield Compared(f"gradient of {name}", leaf.grad, other.grad)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of packed sequences by its formula, in float32.

    query, key, value: [tokens, heads, width]; sinks: [heads], further logits of each head's softmax, which have no value; None: there are
    none; window: positions that a query sees, its own included; None: all.
    """
    outputs, first = [], 0
    times = query.shape[1] // key.shape[1]
    for length in LENGTHS:
        q, k, v = (part[first : first + length].transpose(0, 1) for part in (query, key, value))
        k, v = k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        scores = (q @ k.transpose(1, 2) / query.shape[2] ** 0.5).masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], -1)
        outputs.append((scores.softmax(-1)[..., :length] @ v).transpose(0, 1))
        first += length
    return torch.cat(outputs)
