"""Loss aggregation as a weight for every token, computed before the mini-batch is split.

Guarantee: `sum(weights * loss)` over all micro-batches of all ranks is the mode's mean over the global
mini-batch, however it was split, because the denominators are counted on the whole mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.ragged import check_ragged, segment_ids, segment_sum

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True)
class LossAggregation:
    """How token losses become a mini-batch's loss.

    Attributes:
        mode: one of LOSS_AGG_MODES.
        scale_factor: of "seq-mean-token-sum-norm": the divisor of a trajectory's sum (Dr. GRPO,
            arXiv:2503.20783: a constant, the longest possible response); the other modes ignore it.
    """

    mode: str
    scale_factor: float | None = None


@dataclass(frozen=True)
class LossCounts:
    """The counts of a mini-batch; counts of disjoint parts add up with `+`."""

    tokens: int  # live tokens
    trajectories: int  # trajectories with at least one live token

    def __add__(self, other: LossCounts) -> LossCounts:
        return LossCounts(self.tokens + other.tokens, self.trajectories + other.trajectories)


def loss_counts(mask: Tensor, offsets: Tensor) -> LossCounts:
    """Count the live tokens and trajectories of (a part of) a mini-batch; mask bool [tokens], offsets [n + 1]."""
    check_ragged(offsets, mask)
    return LossCounts(int(mask.sum()), int((segment_sum(mask, offsets) > 0).sum()))


def token_weights(agg: LossAggregation, mask: Tensor, offsets: Tensor, counts: LossCounts) -> Tensor:
    """The factor of each token's loss in the sum, float32 [tokens]; 0 on masked tokens.

    "token-mean": the mean over all live tokens. "token-sum": their sum (a larger batch is a larger gradient).
    "seq-mean-token-sum": the sum over a trajectory's live tokens, then the mean over trajectories.
    "seq-mean-token-mean": the mean over each, then over trajectories. "seq-mean-token-sum-norm": as
    "seq-mean-token-sum", divided by `scale_factor`. Trajectories without a live token are not counted.

    `mask` and `offsets` may be any part of the mini-batch in WHOLE trajectories (before context parallelism
    slices them); `counts` are the counts of the whole mini-batch over all ranks.
    """
    check_ragged(offsets, mask)
    local = loss_counts(mask, offsets)
    assert local.tokens <= counts.tokens and local.trajectories <= counts.trajectories, (
        f"the part ({local}) is larger than the mini-batch ({counts}): counts must be those of all ranks"
    )
    if agg.mode == "token-mean":
        weight = mask.double() / max(counts.tokens, 1)
    elif agg.mode == "token-sum":
        weight = mask.double()
    elif agg.mode == "seq-mean-token-sum":
        weight = mask.double() / max(counts.trajectories, 1)
    elif agg.mode == "seq-mean-token-sum-norm":
        assert agg.scale_factor is not None and agg.scale_factor > 0, agg
        weight = mask.double() / (max(counts.trajectories, 1) * agg.scale_factor)
    elif agg.mode == "seq-mean-token-mean":
        lengths = segment_sum(mask, offsets).clamp(min=1)
        weight = mask.double() / (lengths[segment_ids(offsets)] * max(counts.trajectories, 1))
    else:
        raise ValueError(f"loss_agg_mode={agg.mode!r} is unknown; known: {', '.join(LOSS_AGG_MODES)}")
    return weight.to(torch.float32)
