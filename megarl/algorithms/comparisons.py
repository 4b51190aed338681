"""Comparisons of trajectories within groups: scores [n] of trajectories that have a live token and n group ids (prompt uids) -> [n].

A group of one says nothing about its answer: advantage 0. Computed in float64, returned in the scores' dtype.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_EPS = 1e-6  # is added to a group's standard deviation


def grpo(scores: Tensor, group_ids: Sequence[str], norm_by_std: bool = True) -> Tensor:
    """(score - mean of its group) / (std of its group + 1e-6).

    DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision), with the unbiased std as verl and TRL compute
    it. `norm_by_std=False` leaves the division out (Dr. GRPO, arXiv:2503.20783).
    """
    group, size = _groups(scores, group_ids)
    values = _centred(scores.double(), group, size)
    if norm_by_std:
        values = values / (_std(values, group, size)[group] + _EPS)
    return values.to(scores.dtype)


def grpo_passk(scores: Tensor, group_ids: Sequence[str], norm_by_std: bool = True) -> Tensor:
    """The best response of a group gets its lead over the second best, the others 0; divided by the std as in `grpo`.

    Inference-time objectives, arXiv:2503.19595: the objective is the group's best score (pass@k for k = group size);
    leave-one-out, a response's advantage is max over all - max over the others, which is 0 for all but the best.
    """
    group, size = _groups(scores, group_ids)
    values = scores.double()
    best = torch.full_like(size, -torch.inf).scatter_reduce_(0, group, values, "amax")
    is_best = values == best[group]
    # Where the best score occurs twice, max over the others is the same, and nobody leads.
    alone = is_best & (torch.zeros_like(size).index_add_(0, group, is_best.double())[group] == 1)
    second = torch.full_like(size, -torch.inf).scatter_reduce_(
        0, group, torch.where(is_best, -torch.inf, values), "amax"
    )
    lead = torch.where(alone & (size[group] > 1), values - second[group], 0.0)
    if norm_by_std:
        lead = lead / (_std(_centred(values, group, size), group, size)[group] + _EPS)
    return lead.to(scores.dtype)


def rloo(scores: Tensor, group_ids: Sequence[str]) -> Tensor:
    """score - mean of the other scores of its group (RLOO, arXiv:2402.14740).

    That is (score - mean of all) * k / (k - 1) in a group of k.
    """
    group, size = _groups(scores, group_ids)
    factor = size / (size - 1).clamp(min=1)
    return (_centred(scores.double(), group, size) * factor[group]).to(scores.dtype)


def opo(scores: Tensor, group_ids: Sequence[str], lengths: Tensor) -> Tensor:
    """score - mean of its group weighted with the responses' lengths (OPO, arXiv:2505.23585).

    The baseline of least variance weighs each score with the squared norm of its gradient, which the paper takes to
    grow with the response's length.

    Args: lengths [n]: live tokens, all > 0.
    """
    group, size = _groups(scores, group_ids)
    values, weight = scores.double(), lengths.double()
    total = torch.zeros_like(size).index_add_(0, group, weight)
    baseline = torch.zeros_like(size).index_add_(0, group, weight * values) / total
    return torch.where(size[group] > 1, values - baseline[group], 0.0).to(scores.dtype)


def gpg(scores: Tensor, group_ids: Sequence[str]) -> Tensor:
    """alpha * (score - mean of its group), alpha = trajectories / trajectories in groups whose scores differ.

    GPG, arXiv:2504.02546, with F_norm = 1: alpha = B / (B - M), where the M trajectories of groups with equal scores
    give no gradient, keeps the gradient's size. (verl's alpha counts scores that are not 0 in place of B - M.)
    Groups of one count as groups with equal scores. Without any group whose scores differ all advantages are 0.
    """
    group, size = _groups(scores, group_ids)
    values = _centred(scores.double(), group, size)
    low = torch.full_like(size, torch.inf).scatter_reduce_(0, group, scores.double(), "amin")
    high = torch.full_like(size, -torch.inf).scatter_reduce_(0, group, scores.double(), "amax")
    useful = int((low < high)[group].sum())
    return (values * (scores.numel() / max(useful, 1))).to(scores.dtype)


def maxrl(scores: Tensor, group_ids: Sequence[str]) -> Tensor:
    """(score - mean of its group) / mean of its group; 0 in groups whose mean is not positive.

    MaxRL, arXiv:2602.02710: with scores 0 and 1 the gradient of the log of the probability to be right, whose first term is the gradient of
    the mean score; prompts that are rarely answered right count more.
    """
    group, size = _groups(scores, group_ids)
    values = scores.double()
    mean = torch.zeros_like(size).index_add_(0, group, values) / size
    lead = _centred(values, group, size)
    return torch.where(mean[group] > 0, lead / mean[group], 0.0).to(scores.dtype)


def gdpo(parts: Tensor, group_ids: Sequence[str], weights: Sequence[float]) -> Tensor:
    """Several rewards, each compared within its group by itself; their weighted sum is normalised over the batch.

    GDPO, arXiv:2601.05242: A = sum over rewards k of weight_k * (r_k - mean of its group) / (std of its group + 1e-6), and then
    (A - mean of all) / (std of all + 1e-6), so that the scale does not grow with the number of rewards. Rewards that are summed before they
    are compared, as for `grpo`, would count by their scales, and different combinations of them would be equal.

    Args: parts [n, rewards]; weights [rewards]. Returns: [n].
    """
    assert parts.shape[1] == len(weights), (parts.shape, len(weights))
    compared = torch.stack([grpo(part, group_ids) for part in parts.unbind(1)], dim=1).double()
    values = compared @ torch.tensor(weights, dtype=torch.float64)
    if len(values) < 2:
        return torch.zeros_like(values).to(parts.dtype)
    return ((values - values.mean()) / (values.std() + _EPS)).to(parts.dtype)


def part_spread(parts: Tensor, group_ids: Sequence[str]) -> list[float]:
    """The standard deviation of each of several rewards [n, rewards] within its groups, a mean over groups: [rewards]."""
    if not len(parts):
        return [0.0] * parts.shape[1]
    group, size = _groups(parts[:, 0], group_ids)
    return [float(_std(_centred(part.double(), group, size), group, size).mean()) for part in parts.unbind(1)]


def centred(scores: Tensor, group_ids: Sequence[str]) -> Tensor:
    """score - mean of its group."""
    group, size = _groups(scores, group_ids)
    return _centred(scores.double(), group, size).to(scores.dtype)


def _groups(scores: Tensor, group_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The group number of each trajectory, int64 [n], and the size of each group, float64 [groups]."""
    assert len(group_ids) == scores.numel(), f"{len(group_ids)} group ids for {scores.numel()} scores"
    _, inverse = np.unique(np.asarray(group_ids, dtype=str), return_inverse=True)
    group = torch.from_numpy(inverse.astype(np.int64)).to(scores.device)
    return group, torch.bincount(group).double()


def _centred(values: Tensor, group: Tensor, size: Tensor) -> Tensor:
    mean = torch.zeros_like(size).index_add_(0, group, values) / size
    return torch.where(size[group] > 1, values - mean[group], 0.0)


def _std(centred_values: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """The unbiased standard deviation of each group, [groups]; 0 in a group of one."""
    squares = torch.zeros_like(size).index_add_(0, group, centred_values.square())
    return (squares / (size - 1).clamp(min=1)).sqrt()
