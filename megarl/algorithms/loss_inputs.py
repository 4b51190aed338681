"""What a policy loss is given, and the registry of policy losses."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.util.plugins import Registry

Sums = dict[str, Tensor]  # metric name -> float64 scalar without gradient; see megarl/algorithms/metrics.py


def _alone(total: Tensor) -> Tensor:
    """The sum over the ranks that share the trajectories, where one rank has them whole."""
    return total


@dataclass(frozen=True)
class Sequences:
    """Which trajectory each token of a micro-batch belongs to, and sums over whole trajectories.

    Attributes:
        ids: int64 [tokens], the number of the trajectory.
        count: trajectories of the micro-batch.
        all_reduce: adds up [count] numbers over the ranks that hold parts of the trajectories (context parallelism);
            with a gradient: that of the sum, to every rank's part.
    """

    ids: Tensor
    count: int
    all_reduce: Callable[[Tensor], Tensor] = _alone

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x [tokens] over each whole trajectory, float64 [count]; a collective with context parallelism."""
        total = torch.zeros(self.count, dtype=torch.float64, device=x.device)
        return self.all_reduce(total.index_add(0, self.ids, x.double()))

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """The mean of x [tokens], 0 on masked tokens, over each trajectory's live tokens, float64 [count]."""
        return self.sum(x) / self.sum(mask).clamp(min=1.0)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """A number a trajectory, [count], at each of its tokens: [tokens]."""
        return per_sequence[self.ids]


@dataclass(frozen=True)
class PolicyTokens:
    """One micro-batch's inputs on a rank, each [tokens] and aligned with the log-probs."""

    mask: Tensor  # bool; True where a response token is predicted and trained
    weights: Tensor  # float32, from aggregate.token_weights
    old_log_probs: Tensor
    advantages: Tensor
    ref_log_probs: Tensor | None = None  # needed for the KL loss, but for "full"
    full_kl: Tensor | None = None  # with gradient, the exact KL to the reference: for the KL loss "full"
    rollout_is_weights: Tensor | None = None  # of the policy loss alone (see rollout_correction)
    selected: Tensor | None = None  # bool; the tokens that clip_cov and kl_cov treat apart (see covariance)
    sequences: Sequences | None = None  # needed by losses of whole trajectories


@dataclass(frozen=True)
class PolicyLossOptions:
    clip_low: float  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float
    clip_c: float | None  # dual clip bound for negative advantages, > 1; None: no such bound
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str | None = None  # one of kl.KL_KINDS, or kl.FULL_KL; None: no KL loss
    loss_mode: str = "vanilla"  # a name of POLICY_LOSSES
    tau_pos: float = 1.0  # sapo
    tau_neg: float = 1.05  # sapo
    ppo_kl_coef: float = 1.0  # kl_cov


PolicyLoss = Callable[[Tensor, PolicyTokens, PolicyLossOptions], tuple[Tensor, Sums]]
"""(log_probs [tokens] with gradient, the other inputs, options) -> (the loss of each token, [tokens], to be minimised;
sums over live tokens for metrics under names "actor/...", which are logged as means a live token).

Inputs are clean: on masked tokens every number is 0, and what a loss returns there does not count. Weights and
importance weights are applied to what it returns; it must not apply them. With context parallelism a trajectory's
tokens are on several ranks: what looks at more than a token goes through `tokens.sequences`.
"""

POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode")
register_policy_loss = POLICY_LOSSES.register
