"""Ragged inputs for the tests of this folder."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

# No deadline: a busy machine is no failure. Derandomised: the same commit gives the same verdict.
repeatable = settings(derandomize=True)
brief = settings(repeatable, max_examples=50)  # for tests whose examples take long


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


@st.composite
def ragged_masks(draw, max_trajectories: int = 6, max_length: int = 9) -> tuple[Tensor, Tensor]:
    """(mask bool [tokens], offsets [n + 1]); trajectories may be empty or completely masked."""
    lengths = draw(st.lists(st.integers(0, max_length), min_size=1, max_size=max_trajectories))
    mask = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    return torch.tensor(mask, dtype=torch.bool), offsets_of(lengths)


def rows(offsets: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def normal(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
