"""Advantage estimators on ragged trajectories (flat tensors with offsets, see the package docstring).

Guarantees
- Masked tokens (an environment's words inside a response, say) are no steps: a token's successor is the next
  live token of the same trajectory. They get advantage 0 and return 0.
- A trajectory without a live token takes no part: no mean, deviation or baseline of others depends on it.
- Groups are given by ids; the order of the trajectories matters to `spiral` alone, whose baselines follow them.
- A group of one says nothing about its answer: advantage 0. (verl takes the score itself there, which is REINFORCE
  without a baseline, on another scale than that of larger groups.)
- Everything is computed in float64 and returned in the input's dtype.

The comparisons within a group are in `comparisons`, the comparison of turns in `turns`, baselines from earlier steps in
`player_baselines`. `gae`, `reward_to_go` and `masked_whiten` work token by token.

A user's own estimator, in a file that the configuration names in `plugins`:

    @register_advantage("mine")
    def mine(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult: ...
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.algorithms.comparisons import centred, gdpo, gpg, grpo, grpo_passk, maxrl, opo, rloo
from megarl.algorithms.player_baselines import Player, rae
from megarl.algorithms.ragged import check_ragged, live_offsets, reverse_scan, segment_ids, segment_sum
from megarl.algorithms.turns import Turns, gigpo
from megarl.util.plugins import Registry


@dataclass(frozen=True)
class AdvantageBatch:
    """The input of an estimator: all trajectories of a train batch."""

    token_level_rewards: Tensor  # [tokens], 0 on masked tokens
    mask: Tensor  # bool [tokens]
    offsets: Tensor  # int64 [n + 1]
    values: Tensor | None = None  # [tokens], the critic's; for estimators with a critic
    # [n]; for estimators that compare answers to one prompt; answers of two players of a game count as answers to two prompts
    prompt_uids: Sequence[str] | None = None
    baselines: Tensor | None = None  # [n], the score of the prompt's greedy answer; for remax
    parts: Tensor | None = None  # [n, parts], named rewards of a trajectory; for gdpo
    turns: Turns | None = None  # of all trajectories; for gigpo
    players: Sequence[Player] | None = None  # [n], the game and the player; for spiral
    # As the last step left them; for spiral.
    player_baselines: Mapping[Player, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AdvantageOptions:
    """The settings of all estimators; each reads its own."""

    gamma: float = 1.0  # gae, reinforce_plus_plus, gigpo
    lam: float = 1.0  # gae
    whiten: bool = True  # gae, reinforce_plus_plus, reinforce_plus_plus_baseline
    norm_by_std: bool = True  # grpo, grpo_passk, gigpo
    part_weights: tuple[float, ...] = ()  # gdpo, [parts]
    step_weight: float = 1.0  # gigpo
    baseline_decay: float = 0.95  # spiral


@dataclass(frozen=True)
class AdvantageResult:
    advantages: Tensor  # [tokens]
    returns: Tensor | None  # [tokens], the critic's targets; None where the estimator has no critic
    player_baselines: Mapping[Player, float] | None = None  # for the next step; None: the estimator has none


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
    for column, values in (("advantages", result.advantages), ("returns", result.returns)):
        if values is not None and values.shape != batch.mask.shape:
            raise ValueError(
                f"algorithm.adv_estimator={name!r} returned {column} of shape {list(values.shape)} for a batch of "
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


@register_advantage("spiral")
def _estimate_spiral(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    """The sum of a trajectory's rewards (the KL penalty in it) less its player's baseline, on all its live tokens."""
    if batch.players is None:
        raise ValueError(
            "algorithm.adv_estimator='spiral' needs the game and the player of each trajectory; the batch has none"
        )
    rewards = batch.token_level_rewards
    trained = (segment_sum(batch.mask, batch.offsets) > 0).nonzero().squeeze(1)
    scores = segment_sum(rewards.double(), batch.offsets)
    players = [batch.players[row] for row in trained.tolist()]
    per_trajectory = torch.zeros_like(scores)
    per_trajectory[trained], baselines = rae(
        scores[trained], players, batch.player_baselines, options.baseline_decay
    )
    spread = per_trajectory.to(rewards.dtype).repeat_interleave(batch.offsets.diff())
    return AdvantageResult(torch.where(batch.mask, spread, 0.0), None, baselines)


@register_advantage("gdpo")
def _estimate_gdpo(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    if batch.prompt_uids is None:
        raise ValueError(
            "algorithm.adv_estimator='gdpo' needs the prompt of each trajectory; the batch has none"
        )
    if batch.parts is None:
        raise ValueError(
            "algorithm.adv_estimator='gdpo' needs named rewards (algorithm.reward_weights); the batch has none"
        )
    trained = (segment_sum(batch.mask, batch.offsets) > 0).nonzero().squeeze(1)
    uids = [batch.prompt_uids[row] for row in trained.tolist()]
    per_trajectory = torch.zeros(len(batch.parts), dtype=torch.float64)
    per_trajectory[trained] = gdpo(batch.parts[trained].double(), uids, options.part_weights)
    spread = per_trajectory[segment_ids(batch.offsets)].to(batch.token_level_rewards.dtype)
    return AdvantageResult(torch.where(batch.mask, spread, 0.0), None)


@register_advantage("gigpo")
def _estimate_gigpo(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
    if batch.prompt_uids is None:
        raise ValueError(
            "algorithm.adv_estimator='gigpo' needs the prompt of each trajectory; the batch has none"
        )
    if batch.turns is None:
        raise ValueError(
            "algorithm.adv_estimator='gigpo' needs the turns of each trajectory; the batch has none"
        )
    rewards, offsets = batch.token_level_rewards, batch.offsets
    values = gigpo(
        rewards,
        batch.mask,
        offsets,
        batch.turns,
        batch.prompt_uids,
        options.gamma,
        options.step_weight,
        options.norm_by_std,
    )
    return AdvantageResult(values, None)


GroupComparison = Callable[[Tensor, Sequence[str], Tensor, AdvantageOptions], Tensor]
"""(scores, prompt uids, numbers of live tokens) of the trajectories that have a live token, [trained] each, and the options
-> their advantages [trained]."""


def _register_comparison(name: str, compare: GroupComparison) -> None:
    """Register the estimator that gives each trajectory one advantage, on all its live tokens."""

    def estimate(batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageResult:
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
        per_trajectory[trained] = compare(scores[trained], uids, lengths[trained], options)
        spread = per_trajectory.to(rewards.dtype).repeat_interleave(batch.offsets.diff())
        advantages = torch.where(batch.mask, spread, 0.0)
        if name in _WHITENED and options.whiten:
            advantages = masked_whiten(advantages, batch.mask)
        return AdvantageResult(advantages, None)

    estimate.__qualname__ = f"estimate_{name}"  # for errors
    register_advantage(name)(estimate)


def gae(
    token_level_rewards: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, arXiv:1506.02438.

    delta_t = r_t + gamma V_{t+1} - V_t (eq. 11) and A_t = sum_l (gamma lam)^l delta_{t+l} (eq. 16), over the live
    tokens of each trajectory; V after the last one is 0, for truncated trajectories too.

    Args: token_level_rewards, values: [tokens]; mask: bool [tokens]; offsets: int64 [n + 1].
    Returns: advantages (not whitened) and returns = advantages + values, both [tokens], 0 on masked tokens.
    """
    check_ragged(offsets, token_level_rewards, values, mask)
    live = mask.nonzero().squeeze(1)
    bounds = live_offsets(mask, offsets)
    rewards, live_values = token_level_rewards[live].double(), values[live].double()

    next_values = torch.cat([live_values[1:], live_values.new_zeros(1)])[: live.numel()]
    next_values[bounds[1:][bounds.diff() > 0] - 1] = 0.0
    deltas = rewards + gamma * next_values - live_values
    live_advantages = reverse_scan(deltas, bounds, gamma * lam)

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[live] = live_advantages.to(values.dtype)
    returns[live] = (live_advantages + live_values).to(values.dtype)
    return advantages, returns


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with mean 0 and variance 1 over ALL live tokens given; 0 on masked ones.

    The variance is the unbiased one (divided by count - 1) and 1e-8 is added to it: the rule of verl and TRL,
    so that runs compare; at thousands of tokens the population variance hardly differs. Fewer
    than two live tokens have no spread and become 0.
    Call it on the whole train batch: on a rank's share it would whiten with that share's moments.

    Args: x [tokens], mask bool [tokens]. Returns: [tokens], x's dtype.
    """
    live = x[mask].double()
    out = torch.zeros_like(x)
    if live.numel() == 0:
        return out
    centred = live - live.mean()
    variance = centred.square().sum() / max(live.numel() - 1, 1)
    out[mask] = (centred * (variance + 1e-8).rsqrt()).to(x.dtype)
    return out


def reward_to_go(token_level_rewards: Tensor, mask: Tensor, offsets: Tensor, gamma: float) -> Tensor:
    """The rewards from each live token on: G_t = r_t + gamma G_{t+1} over its trajectory's live tokens.

    Args: token_level_rewards [tokens]; mask: bool [tokens]; offsets: int64 [n + 1].
    Returns: [tokens], the rewards' dtype, 0 on masked tokens.
    """
    check_ragged(offsets, token_level_rewards, mask)
    live = mask.nonzero().squeeze(1)
    sums = reverse_scan(token_level_rewards[live].double(), live_offsets(mask, offsets), gamma)
    out = torch.zeros_like(token_level_rewards)
    out[live] = sums.to(out.dtype)
    return out


_COMPARISONS: dict[str, GroupComparison] = {
    "grpo": lambda scores, uids, _, options: grpo(scores, uids, options.norm_by_std),
    "grpo_passk": lambda scores, uids, _, options: grpo_passk(scores, uids, options.norm_by_std),
    "rloo": lambda scores, uids, *_: rloo(scores, uids),
    "opo": lambda scores, uids, lengths, _: opo(scores, uids, lengths),
    "gpg": lambda scores, uids, *_: gpg(scores, uids),
    "maxrl": lambda scores, uids, *_: maxrl(scores, uids),
    # REINFORCE++-baseline, arXiv:2501.03262: then normalised over all tokens of the batch.
    "reinforce_plus_plus_baseline": lambda scores, uids, *_: centred(scores, uids),
}
_WHITENED = frozenset({"reinforce_plus_plus_baseline"})
for _name, _compare in _COMPARISONS.items():
    _register_comparison(_name, _compare)
