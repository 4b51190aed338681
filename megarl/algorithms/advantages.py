"""Advantage estimators on ragged trajectories (flat tensors with offsets, see the package docstring).

Guarantees
- Masked tokens (an environment's words inside a response, say) are no steps: a token's successor is the next
  live token of the same trajectory. They get advantage 0 and return 0.
- A trajectory without a live token takes no part: no mean, deviation or baseline of others knows of it.
- Groups are given by ids; the order of the trajectories never matters.
- Everything is computed in float64 and returned in the input's dtype.

One's own estimator, in a file that the configuration names in `plugins`:

    @register_advantage("mine")
    def mine(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult: ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.groups import centred, gpg, grpo, grpo_passk, opo, rloo
from megarl.algorithms.ragged import check_ragged, segment_ids, segment_sum
from megarl.algorithms.returns import gae, masked_whiten, reward_to_go
from megarl.util.plugins import Registry


@dataclass(frozen=True)
class AdvantageBatch:
    """What an estimator may look at: all trajectories of a train batch."""

    token_level_rewards: Tensor  # [tokens], 0 on masked tokens
    mask: Tensor  # bool [tokens]
    offsets: Tensor  # int64 [n + 1]
    values: Tensor | None = None  # [tokens], the critic's; for estimators with a critic
    prompt_uids: Sequence[str] | None = None  # [n]; for estimators that compare answers to one prompt
    baselines: Tensor | None = None  # [n], the score of the prompt's greedy answer; for remax


@dataclass(frozen=True)
class AdvantageOptions:
    """The settings of all estimators; each reads its own."""

    gamma: float = 1.0  # gae, reinforce_plus_plus
    lam: float = 1.0  # gae
    whiten: bool = True  # gae, reinforce_plus_plus, reinforce_plus_plus_baseline
    norm_by_std: bool = True  # grpo, grpo_passk


@dataclass(frozen=True)
class AdvantageResult:
    advantages: Tensor  # [tokens]
    returns: Tensor | None  # [tokens], the critic's targets; None where the estimator has no critic


Estimator = Callable[[AdvantageBatch, AdvantageOptions], AdvantageResult]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator", "algorithm.adv_estimator")
register_advantage = ESTIMATORS.register


def compute_advantages(name: str, batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    """Advantages (and returns) of a train batch by the estimator `name`.

    ValueError: unknown name; an input that the estimator needs is missing; a reward stands on a masked token; the
    estimator's result does not fit the batch.
    """
    estimate = ESTIMATORS[name]
    check_ragged(batch.offsets, batch.token_level_rewards, batch.mask)
    lost = int((batch.token_level_rewards[~batch.mask] != 0).sum())
    if lost:
        raise ValueError(
            f"{lost} non-zero token level rewards stand on masked tokens, where no advantage would see them; "
            "put each on the last unmasked token before it"
        )
    result = estimate(batch, options)
    for field, values in (("advantages", result.advantages), ("returns", result.returns)):
        if values is not None and values.shape != batch.mask.shape:
            raise ValueError(
                f"algorithm.adv_estimator={name!r} returned {field} of shape {list(values.shape)} for a batch of "
                f"{batch.mask.numel()} tokens; it must be one number a token"
            )
    return result


@register_advantage("gae")
def _estimate_gae(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    if batch.values is None:
        raise ValueError("algorithm.adv_estimator='gae' needs the critic's values; the batch has none")
    advantages, returns = gae(
        batch.token_level_rewards, batch.values, batch.mask, batch.offsets, options.gamma, options.lam
    )
    if options.whiten:
        advantages = masked_whiten(advantages, batch.mask)
    return AdvantageResult(advantages, returns)


@register_advantage("reinforce_plus_plus")
def _estimate_reinforce_plus_plus(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    """REINFORCE++, arXiv:2501.03262: rewards to go (the KL penalty in them), normalised over the whole batch."""
    advantages = reward_to_go(batch.token_level_rewards, batch.mask, batch.offsets, options.gamma)
    if options.whiten:
        advantages = masked_whiten(advantages, batch.mask)
    return AdvantageResult(advantages, None)


@register_advantage("reinforce_plus_plus_baseline")
def _estimate_reinforce_plus_plus_baseline(
    batch: AdvantageBatch, options: AdvantageOptions
) -> AdvantageResult:
    """REINFORCE++-baseline, arXiv:2501.03262: score - mean of its group, normalised over all tokens of the batch."""
    advantages = _per_group(
        batch, "reinforce_plus_plus_baseline", lambda scores, ids, _: centred(scores, ids)
    )
    if options.whiten:
        advantages = masked_whiten(advantages, batch.mask)
    return AdvantageResult(advantages, None)


@register_advantage("remax")
def _estimate_remax(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    """ReMax, arXiv:2310.10505, algorithm 1: the rewards to go minus the score of the prompt's greedy response."""
    if batch.baselines is None:
        raise ValueError(
            "algorithm.adv_estimator='remax' needs the score of each prompt's greedy response; the batch has none"
        )
    rewards = batch.token_level_rewards
    to_go = reward_to_go(rewards.double(), batch.mask, batch.offsets, gamma=1.0)
    difference = to_go - batch.baselines.double()[segment_ids(batch.offsets)]
    return AdvantageResult(torch.where(batch.mask, difference, 0.0).to(rewards.dtype), None)


@register_advantage("grpo")
def _estimate_grpo(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    advantages = _per_group(batch, "grpo", lambda scores, ids, _: grpo(scores, ids, options.norm_by_std))
    return AdvantageResult(advantages, None)


@register_advantage("grpo_passk")
def _estimate_grpo_passk(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    advantages = _per_group(
        batch, "grpo_passk", lambda scores, ids, _: grpo_passk(scores, ids, options.norm_by_std)
    )
    return AdvantageResult(advantages, None)


@register_advantage("rloo")
def _estimate_rloo(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    return AdvantageResult(_per_group(batch, "rloo", lambda scores, ids, _: rloo(scores, ids)), None)


@register_advantage("opo")
def _estimate_opo(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    return AdvantageResult(_per_group(batch, "opo", opo), None)


@register_advantage("gpg")
def _estimate_gpg(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    return AdvantageResult(_per_group(batch, "gpg", lambda scores, ids, _: gpg(scores, ids)), None)


def _per_group(
    batch: AdvantageBatch, name: str, compare: Callable[[Tensor, Sequence[str], Tensor], Tensor]
) -> Tensor:
    """One advantage a trajectory, on each of its live tokens: [tokens].

    Args:
        compare: (scores, prompt uids, numbers of live tokens) of the trajectories that have a live token, [trained]
            each, to their advantages.
    """
    if batch.prompt_uids is None:
        raise ValueError(
            f"algorithm.adv_estimator={name!r} needs the prompt of each trajectory; the batch has none"
        )
    rewards = batch.token_level_rewards
    lengths = segment_sum(batch.mask, batch.offsets)
    trained = (lengths > 0).nonzero().squeeze(1)
    # The sum, not the score alone: it holds the KL penalty where that is part of the reward.
    scores = segment_sum(rewards.double(), batch.offsets)
    uids = [batch.prompt_uids[row] for row in trained.tolist()]
    per_trajectory = torch.zeros_like(scores)
    per_trajectory[trained] = compare(scores[trained], uids, lengths[trained])
    spread = per_trajectory.to(rewards.dtype).repeat_interleave(batch.offsets.diff())
    return torch.where(batch.mask, spread, 0.0)
