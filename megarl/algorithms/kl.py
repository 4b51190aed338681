"""KL to the reference policy: per-token estimators, the penalty in the reward, and its coefficient.

The coefficient is fixed, steered to a target, or on a schedule. Every controller has a `coef`, `update` (once a step, after it
was used), `scale` (an intervention from outside, which lasts) and a state for checkpoints: a resume that starts again from the
configuration's value is another run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megarl.algorithms.ragged import check_ragged, live_offsets, segment_sum

KL_KINDS = ("kl", "k1", "k1+", "abs", "mse", "k2", "low_var_kl", "k3", "k3+")
TOP_K = "top_k"  # as FULL_KL, over the reference's most likely tokens and all others together
FULL_KL = "full"  # no estimate: KL(policy || reference) over the whole vocabulary, which the models compute
_SAME = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy || reference) in nats at each token, from tokens that the policy sampled; any shape.

    With r = log_probs - ref_log_probs (J. Schulman, "Approximating KL divergence", 2020):
    "kl" or "k1": r, unbiased, may be negative; "abs": |r|; "mse" or "k2": r^2 / 2, biased, low variance;
    "low_var_kl" or "k3": exp(-r) - 1 + r, unbiased and >= 0 (DeepSeekMath eq. 4).
    k3 is clamped where verl clamps it: r to +-20 before the exponential, the estimate to at most 10; a clamped
    token passes no gradient.
    As a LOSS on the policy's own samples the kinds differ by their expected gradients: k1's is zero (it pulls
    nowhere), k2's is that of KL(policy || reference), k3's that of KL(reference || policy). "k1+" and "k3+" have the
    value of k1 and k3 with the gradient of k2.
    """
    kind = _SAME.get(kind, kind)
    if kind in ("k1+", "k3+"):
        value = kl_estimate(log_probs, ref_log_probs, kind[:2])
        steered = kl_estimate(log_probs, ref_log_probs, "mse")
        return value.detach() + (steered - steered.detach())
    log_ratio = log_probs - ref_log_probs
    if kind == "kl":
        return log_ratio
    if kind == "abs":
        return log_ratio.abs()
    if kind == "mse":
        return 0.5 * log_ratio.square()
    if kind == "low_var_kl":
        # Without the inner clamp exp() overflows to inf, and the outer clamp's gradient 0 * inf is NaN.
        bounded = log_ratio.clamp(-20.0, 20.0)
        return (torch.exp(-bounded) - 1.0 + bounded).clamp(max=10.0)
    raise ValueError(f"KL estimator {kind!r} is unknown; known: {', '.join(KL_KINDS)}")


def place_scores(scores: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Token level rewards [tokens]: each trajectory's score on its last live token, 0 elsewhere.

    A trajectory without a live token has no place for its score: it takes no part in training.
    Args: scores [n], mask bool [tokens], offsets int64 [n + 1]. Returns scores' dtype.
    """
    check_ragged(offsets, mask)
    assert scores.numel() == offsets.numel() - 1, (
        f"{scores.numel()} scores, {offsets.numel() - 1} trajectories"
    )
    live = mask.nonzero().squeeze(1)
    bounds = live_offsets(mask, offsets)
    trained = bounds.diff() > 0
    rewards = torch.zeros(mask.numel(), dtype=scores.dtype, device=scores.device)
    rewards[live[bounds[1:][trained] - 1]] = scores[trained]
    return rewards


def place_steps(rows: Tensor, places: Tensor, scores: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Token level rewards [tokens]: the score of each step on the last live token of its trajectory up to the step's place; where there is none,
    on the first live token after it. Scores that fall on the same token are added.

    Steps of trajectories without a live token take no part.
    Args: rows, places (in flat tensors) int64 [steps]; scores [steps]; mask bool [tokens]; offsets int64 [n + 1]. Returns scores' dtype.
    """
    check_ragged(offsets, mask)
    bounds = live_offsets(mask, offsets)
    live = mask.nonzero().squeeze(1)
    kept = bounds.diff()[rows] > 0
    rows, places, scores = rows[kept], places[kept], scores[kept]
    order = torch.searchsorted(live, places, right=True) - 1  # of live tokens, the last one up to the place
    order = torch.maximum(order, bounds[rows])
    return torch.zeros(mask.numel(), dtype=scores.dtype).index_add_(0, live[order], scores)


def apply_kl_penalty(
    scores: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    offsets: Tensor,
    coef: float,
    kind: str,
    full_kl: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Rewards with the KL to the reference taken off at every live token (Ziegler et al. 2019, section 2.2).

    Args: scores [n]; log-probs [tokens]; mask bool [tokens]; offsets int64 [n + 1]; coef: the controller's; full_kl
    [tokens]: the exact KL, needed for the kind FULL_KL.
    Returns: token level rewards [tokens] (score on the last live token, minus coef * KL), and the KL for the
    controller and the log: nats a token, mean over live tokens of each trajectory, then over trajectories with
    a live token (verl's definition, so `target_kl` means the same).
    """
    check_ragged(offsets, old_log_probs, ref_log_probs, mask)
    if kind == FULL_KL:
        assert full_kl is not None, "the exact KL comes with the log-probs"
        each = full_kl
    else:
        each = kl_estimate(old_log_probs, ref_log_probs, kind)
    kl = torch.where(mask, each, 0.0)
    rewards = place_scores(scores, mask, offsets) - coef * kl
    lengths = segment_sum(mask, offsets)
    trained = lengths > 0
    if not bool(trained.any()):
        return rewards, 0.0
    mean_kl = (segment_sum(kl.double(), offsets)[trained] / lengths[trained]).mean()
    return rewards, float(mean_kl)


class _KLController:
    """The common part of all controllers. `saved`: the fields that a checkpoint holds, each with its type."""

    kind: ClassVar[str]
    saved: ClassVar[dict[str, Callable[[Any], Any]]]
    factor: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Take note of a train batch of `n_steps` trajectories whose mean KL, before the update, was `current_kl`."""

    def scale(self, factor: float) -> None:
        self.factor *= factor

    def state_dict(self) -> dict[str, Any]:
        return {"type": self.kind, **{name: getattr(self, name) for name in self.saved}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError: the state is of a controller of another kind."""
        if state["type"] != self.kind:
            raise ValueError(
                f"the checkpoint holds a {state['type']!r} KL controller, but algorithm.kl_ctrl.type is {self.kind!r}; "
                "resume with the type that the run was started with"
            )
        for name, read in self.saved.items():
            setattr(self, name, read(state[name]))


@dataclass
class FixedKLController(_KLController):
    """A constant coefficient: after a resume it is the configuration's value times `factor`."""

    kind = "fixed"
    saved = {"factor": float}  # noqa: RUF012 (a constant of the class)
    initial: float
    factor: float = 1.0  # of all interventions

    @property
    def coef(self) -> float:
        return self.initial * self.factor


@dataclass
class AdaptiveKLController(_KLController):
    """A coefficient that steers the KL to a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    coef <- coef * (1 + clip((kl - target) / target, -0.2, 0.2) * n_steps / horizon); their K_beta is
    n_steps / horizon.
    """

    kind = "adaptive"
    saved = {"coef": float}  # noqa: RUF012
    coef: float
    target_kl: float  # nats, in the unit of `apply_kl_penalty`'s mean
    horizon: float  # trajectories

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient.

        ValueError: a KL that is not finite (it would stay in the coefficient for ever); a batch so large
        compared with the horizon that the coefficient could reach zero or change sign.
        """
        if not math.isfinite(current_kl):
            raise ValueError(
                f"the KL to the reference policy is {current_kl}; the coefficient cannot follow it"
            )
        if 0.2 * n_steps >= self.horizon:
            raise ValueError(
                f"algorithm.kl_ctrl.horizon={self.horizon} is too short for {n_steps} trajectories a step: "
                f"the KL coefficient could change sign; it must be over {0.2 * n_steps:g}"
            )
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * n_steps / self.horizon

    def scale(self, factor: float) -> None:
        self.coef *= factor


@dataclass
class LinearKLController(_KLController):
    """A coefficient on a straight line: `first` in the first step, `last` in step `num_steps` and after it."""

    kind = "linear"
    saved = {"done": int, "factor": float}  # noqa: RUF012
    first: float
    last: float
    num_steps: int  # steps, at least 1; with 1 it is `last` from the second step on
    done: int = 0  # steps that were taken
    factor: float = 1.0  # of all interventions

    @property
    def coef(self) -> float:
        way = min(self.done / max(self.num_steps - 1, 1), 1.0)
        return (self.first + (self.last - self.first) * way) * self.factor

    def update(self, current_kl: float, n_steps: int) -> None:
        self.done += 1


KLController = FixedKLController | AdaptiveKLController | LinearKLController


def make_kl_controller(
    kind: str,
    kl_coef: float,
    target_kl: float,
    horizon: float,
    end_kl_coef: float | None = None,
    schedule_steps: int | None = None,
) -> KLController:
    """The controller that `algorithm.kl_ctrl` asks for; `schedule_steps` is needed by "linear". ValueError names the
    key."""
    if kind == "fixed":
        return FixedKLController(kl_coef)
    if kind == "adaptive":
        for key, value in (("target_kl", target_kl), ("horizon", horizon)):
            if not value > 0:
                raise ValueError(
                    f"algorithm.kl_ctrl.{key} is {value}; an adaptive KL coefficient needs it above 0"
                )
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    if kind == "linear":
        if end_kl_coef is None:
            raise ValueError("algorithm.kl_ctrl.end_kl_coef is null; a linear KL coefficient moves to it")
        assert schedule_steps is not None and schedule_steps >= 1, schedule_steps
        return LinearKLController(kl_coef, end_kl_coef, schedule_steps)
    raise ValueError(f"algorithm.kl_ctrl.type={kind!r} is unknown; known: fixed, adaptive, linear")
