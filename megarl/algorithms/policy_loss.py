"""The actor's losses on packed tokens: sums with weights, and sums for the metrics.

Guarantees
- Every returned number is a sum over the tokens given: results of micro-batches and ranks that hold different
  tokens are added, never averaged.
- Values on masked tokens (NaN included) change neither value nor gradient.
- With log_probs equal to old_log_probs every ratio is exactly 1 and the KL exactly 0.

A ratio is new probability / old probability. Log ratios are clamped to +-20, so that one broken token cannot make the
loss infinite; it then passes no gradient.

A user's own policy loss, in a file that the configuration names in `plugins` (see `PolicyLoss`):

    @register_policy_loss("mine")
    def mine(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]: ...

clip_cov and kl_cov treat the tokens of largest covariance apart ("The Entropy Mechanism of Reinforcement Learning",
arXiv:2505.22617): the policy's entropy falls with the covariance of a token's log-prob and its advantage, and a few tokens
make up most of it. `select_tokens` chooses them before the mini-batch is cut into micro-batches, from the OLD log-probs (the
paper takes the log-probs of the policy at each update, the same in a step's first update). verl chooses in each micro-batch,
which makes the choice depend on how the mini-batch is cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.kl import FULL_KL, TOP_K, kl_estimate
from megarl.algorithms.metrics import TEACHER_KL, TEACHER_TOKENS
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
    full_kl: Tensor | None = (
        None  # with gradient, a divergence from the reference: for the KL losses "full" and "top_k"
    )
    rollout_is_weights: Tensor | None = None  # of the policy loss alone (see rollout_correction)
    selected: Tensor | None = None  # bool; tokens that clip_cov and kl_cov treat apart (see select_tokens)
    sequences: Sequences | None = None  # needed by losses of whole trajectories
    # bool; False on given responses, which the KL loss alone learns from; None: all are the policy's
    own: Tensor | None = None
    judges: Tensor | None = None  # the number of the token's teacher; None: there are not several teachers
    judge_names: tuple[str, ...] = ()  # of these teachers


@dataclass(frozen=True)
class PolicyLossOptions:
    clip_low: float  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float
    clip_c: float | None  # dual clip bound for negative advantages, > 1; None: no such bound
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str | None = None  # one of kl.KL_KINDS, kl.FULL_KL or kl.TOP_K; None: no KL loss
    kl_beta: float = 1.0  # of the last two: which divergence (megarl.megatron.heads.divergence)
    pg_coef: float = 1.0
    loss_mode: str = "vanilla"  # a name of POLICY_LOSSES
    tau_pos: float = 1.0  # sapo
    tau_neg: float = 1.05  # sapo
    ppo_kl_coef: float = 1.0  # kl_cov


PolicyLoss = Callable[[Tensor, PolicyTokens, PolicyLossOptions], tuple[Tensor, Sums]]
"""(log_probs [tokens] with gradient, the other inputs, options) -> (the loss of each token, [tokens], to be minimised;
sums over live tokens for metrics under names "actor/...", which are logged as means a live token).

Inputs are clean: on masked tokens every number is 0, and the loss that is returned there does not count. Weights and
importance weights are applied to the returned losses; a policy loss must not apply them. With context parallelism a trajectory's
tokens are on several ranks: sums over more than a token go through `tokens.sequences`.
"""

POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode")
register_policy_loss = POLICY_LOSSES.register


def actor_loss(
    log_probs: Tensor, entropy: Tensor | None, tokens: PolicyTokens, options: PolicyLossOptions
) -> tuple[Tensor, Sums]:
    """The actor's whole loss: the policy loss, minus the entropy bonus, plus the KL loss, each with its coefficient. On given responses
    (`tokens.own`) it is the KL loss alone.

    Args: log_probs [tokens] and entropy [tokens] (or None: not measured; only with entropy_coef 0) carry the
    gradient. Returns: the loss as a scalar sum, ready for backward(), and the sums for the metrics.
    """
    trained = tokens if tokens.own is None else replace(tokens, mask=tokens.mask & tokens.own)
    loss, sums = policy_loss(log_probs, trained, options)
    loss = options.pg_coef * loss
    if entropy is not None:
        bonus, entropy_sums = entropy_bonus(entropy, trained.mask, trained.weights)
        sums |= entropy_sums
        if options.entropy_coef != 0.0:
            loss = loss - options.entropy_coef * bonus
    else:
        assert options.entropy_coef == 0.0, "an entropy bonus needs the entropy"
    if options.kl_kind is not None:
        kl, kl_sums = kl_loss(log_probs, tokens, options.kl_kind)
        sums |= kl_sums
        loss = loss + options.kl_coef * kl
    sums["actor/loss"] = loss.detach().double()
    return loss, sums


def policy_loss(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """The policy loss `options.loss_mode`, summed with the weights (and importance weights, if there are).

    ValueError: an unknown name, or a loss of a plugin that is not one number a token.

    Sums: actor/pg_loss (weighted loss); over live tokens: actor/tokens, actor/ppo_kl (old - new log-prob),
    actor/log_ratio_abs (its absolute value), actor/ratio, and the sums of the loss itself.
    """
    mask, zero = tokens.mask, log_probs.new_zeros(())
    log_probs = torch.where(mask, log_probs, zero)
    clean = _without_masked(tokens)
    losses, own_sums = POLICY_LOSSES[options.loss_mode](log_probs, clean, options)
    if losses.shape != mask.shape:
        raise ValueError(
            f"{POLICY_LOSSES.key}={options.loss_mode!r} returned losses of shape {list(losses.shape)} for a micro-batch of "
            f"{mask.numel()} tokens; it must be one number a token"
        )
    weights = clean.weights
    if clean.rollout_is_weights is not None:
        weights = weights * clean.rollout_is_weights
    loss = (weights * torch.where(mask, losses, zero)).sum()
    change = log_ratio(log_probs.detach(), clean)
    return loss, {
        "actor/pg_loss": loss.detach().double(),
        "actor/tokens": mask.sum().double(),
        "actor/ppo_kl": _total(-change),
        "actor/log_ratio_abs": _total(change.abs()),
        "actor/ratio": _total(torch.where(mask, change.exp(), zero)),
        **own_sums,
    }


def entropy_bonus(entropy: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """The weighted sum of the policy's entropy (nats), to be SUBTRACTED from the loss times its coefficient.

    Sums: actor/entropy, the plain sum over live tokens.
    """
    zero = entropy.new_zeros(())
    entropy = torch.where(mask, entropy, zero)
    return (torch.where(mask, weights, zero) * entropy).sum(), {"actor/entropy": _total(entropy)}


def kl_loss(log_probs: Tensor, tokens: PolicyTokens, kind: str) -> tuple[Tensor, Sums]:
    """The weighted sum of the KL to the reference, before its coefficient: of `tokens.full_kl` (kinds kl.FULL_KL and kl.TOP_K), else of
    its estimate (see kl.kl_estimate).

    Sums: actor/kl_loss, the weighted sum itself; where responses are given, plain sums: actor/own_kl over the policy's own live tokens,
    actor/given_kl over the given ones, and actor/given_tokens, the number of these; with several teachers, the same by their names under
    TEACHER_KL and TEACHER_TOKENS.
    """
    mask, weights, zero = tokens.mask, tokens.weights, log_probs.new_zeros(())
    if kind in (FULL_KL, TOP_K):
        assert tokens.full_kl is not None, "the exact KL comes with the log-probs"
        estimate = torch.where(mask, tokens.full_kl, zero)
    else:
        assert tokens.ref_log_probs is not None, "a KL loss needs the reference policy's log-probs"
        ref_log_probs = torch.where(mask, tokens.ref_log_probs, zero)
        estimate = kl_estimate(torch.where(mask, log_probs, zero), ref_log_probs, kind)
    loss = (torch.where(mask, weights, zero) * estimate).sum()
    sums = {"actor/kl_loss": loss.detach().double()}
    if tokens.own is not None:
        sums["actor/own_kl"] = _total(torch.where(tokens.own, estimate, zero))
        sums["actor/given_kl"] = _total(torch.where(tokens.own, zero, estimate))
        sums["actor/given_tokens"] = (mask & ~tokens.own).sum().double()
    for number, name in enumerate(tokens.judge_names if tokens.judges is not None else ()):
        there = mask & (tokens.judges == number)
        sums[f"{TEACHER_KL}{name}"] = _total(torch.where(there, estimate, zero))
        sums[f"{TEACHER_TOKENS}{name}"] = there.sum().double()
    return loss, sums


def _without_masked(tokens: PolicyTokens) -> PolicyTokens:
    """The inputs of the policy loss with 0 on masked tokens: multiplied by 0 a NaN would stay one."""

    def clean(x: Tensor) -> Tensor:
        return torch.where(tokens.mask, x, x.new_zeros(()))

    names = ("weights", "old_log_probs", "advantages", "rollout_is_weights", "selected")
    columns: dict[str, Any] = {name: clean(x) for name in names if (x := getattr(tokens, name)) is not None}
    return replace(tokens, **columns)


def _total(x: Tensor) -> Tensor:
    return x.detach().double().sum()


def ptx_loss(log_probs: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The third term of PPO-ptx's objective (InstructGPT, arXiv:2203.02155, equation 2), negated:

        -ptx_coef E_{x ~ D_pretrain}[log pi(x)],    here a mean over the learnt tokens of a batch of texts.

    Args:
        log_probs: float [tokens]; the policy's, at temperature 1.
        weights: float [tokens]; ptx_coef / the number of learnt tokens of the whole batch, over all ranks.
        mask: bool [tokens]; which are learnt.

    Returns: the loss [], and sums over the learnt tokens: actor/ptx_loss (negative log-likelihood in nats, without the
        weights) and actor/ptx_tokens (their number).
    """
    losses = torch.where(mask, -log_probs, 0.0)
    sums = {"actor/ptx_loss": losses.detach().double().sum(), "actor/ptx_tokens": mask.sum().double()}
    return (losses * weights).sum(), sums


def log_ratio(log_probs: Tensor, tokens: PolicyTokens) -> Tensor:
    """log (new / old probability), clamped; [tokens]."""
    return (log_probs - tokens.old_log_probs).clamp(-20.0, 20.0)


@register_policy_loss("vanilla")
def vanilla(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate (arXiv:1707.06347 eq. 7), negated.

    max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); for A < 0 at most -A clip_c (dual clip, Ye et al.
    2020, arXiv:1912.09729). clip_high > clip_low is DAPO's clip-higher (arXiv:2503.14476, section 3.1).

    Sums: actor/pg_clipfrac (the clipped branch was the larger), actor/pg_clipfrac_lower (dual clip held).
    """
    losses, sums = _clipped(log_ratio(log_probs, tokens).exp(), tokens, options)
    dual = torch.zeros_like(tokens.mask)
    if options.clip_c is not None:
        assert options.clip_c > 1.0, f"the dual clip bound {options.clip_c} must be above 1"
        bound = -tokens.advantages * options.clip_c
        dual = (losses > bound) & (tokens.advantages < 0)
        losses = torch.where(dual, bound, losses)
    return losses, {**sums, "actor/pg_clipfrac_lower": dual.sum().double()}


@register_policy_loss("gspo")
def gspo(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """PPO's clip on the trajectory's ratio s_i = (pi / pi_old)^(1 / |y_i|) (GSPO, arXiv:2507.18071 eq. 5, 7).

    In its token form (eq. 13, 14): s_i,t = sg[s_i] pi_t / sg[pi_t] has s_i's value, and the gradient of token t goes
    through its own log-prob. With one advantage a trajectory and seq-mean-token-mean that is eq. 5 exactly.
    """
    sequences = _sequences(tokens, "gspo")
    own = log_ratio(log_probs, tokens)
    mean = sequences.spread(sequences.mean(own.detach(), tokens.mask)).to(own.dtype)
    return _clipped((mean + (own - own.detach())).exp(), tokens, options)


@register_policy_loss("gmpo")
def gmpo(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A times the geometric mean of the trajectory's ratios, each clipped by itself (GMPO, arXiv:2507.20673).

    The clip is on the LOGARITHM: to [-clip_low, clip_high] where that makes the objective smaller. The paper's range
    (e^-0.4, e^0.4) is clip_low = clip_high = 0.4.

    Sums: actor/pg_clipfrac (the token's ratio was clipped).
    """
    sequences = _sequences(tokens, "gmpo")
    own = log_ratio(log_probs, tokens)
    sign = tokens.advantages.sign()
    inside = own.clamp(-options.clip_low, options.clip_high)
    clipped = (sign * inside < sign * own) & tokens.mask
    mean = sequences.mean(torch.where(clipped, inside, own), tokens.mask)
    ratio = sequences.spread(mean.exp()).to(own.dtype)
    return -tokens.advantages * ratio, {"actor/pg_clipfrac": clipped.sum().double()}


@register_policy_loss("cispo")
def cispo(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log pi (CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4, 5).

    No token loses its gradient; its weight is bounded. The paper sets no lower bound: clip_low of 1 or more.

    Sums: actor/pg_clipfrac (the weight was bounded).
    """
    ratio = log_ratio(log_probs, tokens).detach().exp()
    bounded = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    clipped = (bounded != ratio) & tokens.mask
    return -bounded * tokens.advantages * log_probs, {"actor/pg_clipfrac": clipped.sum().double()}


@register_policy_loss("sapo")
def sapo(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A sigmoid(tau (ratio - 1)) 4 / tau (SAPO, arXiv:2511.20347 eq. 5, 6), tau = tau_pos for A > 0, else tau_neg.

    At ratio 1 the gate's slope is 1, like that of the ratio itself; away from it the gradient fades instead of stopping.
    """
    ratio = log_ratio(log_probs, tokens).exp()
    positive = tokens.advantages > 0
    tau = torch.where(positive, options.tau_pos, options.tau_neg).to(ratio.dtype)
    return -tokens.advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau), {}


@register_policy_loss("clip_cov")
def clip_cov(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate, 0 on the selected tokens (Clip-Cov, arXiv:2505.22617).

    Sums: actor/pg_clipfrac as in `vanilla`, actor/cov_selected.
    """
    selected = _selected(tokens, "clip_cov")
    losses, sums = _clipped(log_ratio(log_probs, tokens).exp(), tokens, options)
    return torch.where(selected, 0.0, losses), {**sums, "actor/cov_selected": selected.sum().double()}


@register_policy_loss("kl_cov")
def kl_cov(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A ratio, plus ppo_kl_coef |log ratio| on the selected tokens (KL-Cov, arXiv:2505.22617; |.| as in verl).

    Sums: actor/cov_selected.
    """
    selected = _selected(tokens, "kl_cov")
    own = log_ratio(log_probs, tokens)
    penalty = torch.where(selected, options.ppo_kl_coef * own.abs(), 0.0)
    return -tokens.advantages * own.exp() + penalty, {"actor/cov_selected": selected.sum().double()}


@register_policy_loss("gpg")
def gpg(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A log pi: the policy gradient without a ratio (GPG, arXiv:2504.02546)."""
    return -tokens.advantages * log_probs, {}


@register_policy_loss("topr")
def topr(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A log pi where A >= 0, else -sg[min(1, pi / pi_old of the trajectory)] A log pi (TOPR, arXiv:2503.14286).

    A trajectory that the policy has left is unlearnt no further, and a good one is learnt however unlikely it is. The paper sums over a
    trajectory's tokens, as the default of loss_agg_mode does.

    Sums: actor/topr_taper, 1 - the weight of the tokens with A < 0.
    """
    sequences = _sequences(tokens, "topr")
    own = log_ratio(log_probs, tokens).detach()
    whole = sequences.spread(sequences.sum(own).clamp(max=0.0).exp()).to(own.dtype)
    weight = torch.where(tokens.advantages < 0, whole, 1.0)
    return -weight * tokens.advantages * log_probs, {"actor/topr_taper": _total((1.0 - weight) * tokens.mask)}


@register_policy_loss("dppo_tv")
def dppo_tv(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """-A times the ratio, 0 where the token's probability has moved by more than clip_high up for A > 0, or by more than clip_low down
    for A < 0 (DPPO with its binary total variation, arXiv:2602.04879).

    The ratio of a rare token is large after a small change of the policy, the ratio of a frequent one small after a large change.
    `_within_divergence` has the form of the gradient.
    """
    change = log_probs.detach().exp() - tokens.old_log_probs.exp()
    outside = torch.where(tokens.advantages > 0, change > options.clip_high, change < -options.clip_low)
    return _within_divergence(log_probs, tokens, options, outside)


@register_policy_loss("dppo_kl")
def dppo_kl(log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    """As `dppo_tv`, with bounds on KL(old || new) of the token and all others as one, in nats (DPPO, arXiv:2602.04879)."""
    new, old = log_probs.detach().exp(), tokens.old_log_probs.exp()
    rest, old_rest = (1.0 - new).clamp(min=_REST), (1.0 - old).clamp(min=_REST)
    kl = old * (tokens.old_log_probs - log_probs.detach()) + old_rest * (old_rest / rest).log()
    up = (kl > options.clip_high) & (new > old)
    down = (kl > options.clip_low) & (new < old)
    return _within_divergence(log_probs, tokens, options, torch.where(tokens.advantages > 0, up, down))


_REST = 1e-8  # least probability of all other tokens together


def _within_divergence(
    log_probs: Tensor, tokens: PolicyTokens, options: PolicyLossOptions, outside: Tensor
) -> tuple[Tensor, Sums]:
    """-A sg[min(ratio, clip_c)] log pi, 0 on the tokens `outside`: the gradient of -A ratio, with a bounded ratio as in verl's losses of
    these names.

    Sums: actor/pg_clipfrac (the token is outside).
    """
    ratio = log_ratio(log_probs, tokens).detach().exp()
    if options.clip_c is not None:
        ratio = ratio.clamp(max=options.clip_c)
    losses = torch.where(outside, 0.0, -ratio * tokens.advantages * log_probs)
    return losses, {"actor/pg_clipfrac": (outside & tokens.mask).sum().double()}


def _clipped(ratio: Tensor, tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Sums]:
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    count = (tokens.mask & (clipped > unclipped)).sum().double()
    return torch.maximum(unclipped, clipped), {"actor/pg_clipfrac": count}


def _sequences(tokens: PolicyTokens, name: str) -> Sequences:
    assert tokens.sequences is not None, f"{name} needs to know which trajectory each token belongs to"
    return tokens.sequences


def _selected(tokens: PolicyTokens, name: str) -> Tensor:
    assert tokens.selected is not None, f"{name} needs the tokens that were selected over the mini-batch"
    return tokens.selected & tokens.mask


@dataclass(frozen=True)
class ClipCov:
    """`share` of the live tokens (one at least, as in verl), drawn among the tokens with low < covariance < high."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class KLCov:
    """`share` of the live tokens (one at least, as in verl), the tokens of largest covariance."""

    share: float


def select_tokens(
    rule: ClipCov | KLCov, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, seed: int
) -> Tensor:
    """The chosen tokens of a whole mini-batch; everything flat [tokens], the result bool.

    Args:
        seed: of the draws of `ClipCov`.
    """
    covariance = token_covariance(old_log_probs, advantages, mask)
    live = mask.nonzero().squeeze(1)
    wanted = max(int(rule.share * live.numel()), 1)
    if isinstance(rule, KLCov):
        ranked = live[covariance[live].argsort(descending=True, stable=True)]
    else:
        candidates = live[(covariance[live] > rule.low) & (covariance[live] < rule.high)]
        generator = torch.Generator().manual_seed(seed)
        ranked = candidates[torch.randperm(candidates.numel(), generator=generator)]
    chosen = torch.zeros_like(mask)
    chosen[ranked[:wanted]] = True
    return chosen


def token_covariance(old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log-prob - its mean) (advantage - its mean), means over all live tokens; float64 [tokens], 0 on masked ones."""
    out = torch.zeros(mask.numel(), dtype=torch.float64)
    log_probs, live = old_log_probs[mask].double(), advantages[mask].double()
    if live.numel() > 0:
        out[mask] = (log_probs - log_probs.mean()) * (live - live.mean())
    return out
