"""Weights that a rank does not hold as they are: a base in float8, adapters that are merged into their weight.

`ComputedWeight` says what such a weight is computed from, so that kernels may compute it where it is read
(`megarl.weight_sync.slice_kernels`) and no tensor is made.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.float8 import Block


@dataclass(frozen=True)
class LowRankTerm:
    """The term that adapters add to a weight [out, in]: factor * B A, and with DoRA (arXiv:2402.09353, equation 5) the factors of the sum's rows.

    Attributes:
        a: [tensors * rank, in], or [rank, in] where all tensors of the weight share it.
        b: [adapted rows, rank].
        rows: int32 [out]: by row of the weight, its row of `b` (in the lower 24 bits) and the number of the part of `a` that is multiplied
            with it (above them); -1: it has no adapter.
        parts: into how many parts `a` is divided, one for each tensor; 1: all tensors have all of it.
        magnitudes: [out]; None: 1.
    """

    a: Tensor
    b: Tensor
    rows: Tensor
    parts: int
    factor: float
    magnitudes: Tensor | None


@dataclass(frozen=True)
class ComputedWeight:
    """A weight [out, in] of the type `dtype`: values, in float8 with the scales of their blocks, and the adapters' term.

    Products, sums and results are rounded to `dtype`, each by itself, as torch rounds them.

    Attributes:
        values: [out, in], float8 or `dtype`.
        scales: float32 [blocks of rows, blocks of columns]; None: `values` are no float8.
    """

    values: Tensor
    scales: Tensor | None
    block: Block | None
    dtype: torch.dtype
    term: LowRankTerm | None
