"""Tensors of a kernel beside those of a reference, as a check."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from megarl.gpu_test.runner import Check


class Pair(NamedTuple):
    """One output, or gradient, of both."""

    name: str
    found: torch.Tensor
    expected: torch.Tensor


def compared(name: str, case: Callable[[], Iterable[Pair]], tolerance: float) -> Check:
    """Whether all pairs of a case are as close as `tolerance`, relative to the largest number of what is expected.

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


def difference(pair: Pair) -> float:
    """The largest, relative to the largest number that is expected; infinite for other shapes, and for what is not finite."""
    found, expected = pair.found.detach().double().cpu(), pair.expected.detach().double().cpu()
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    return float((found - expected).abs().max()) / max(scale, 1e-30) if found.numel() else 0.0
