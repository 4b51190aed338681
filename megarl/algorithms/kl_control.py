"""The coefficient of the KL to the reference policy: fixed, steered to a target, or on a schedule.

Every controller has a `coef`, `update` (once a step, after it was used), `scale` (an intervention from outside, which
lasts) and a state for checkpoints: a resume that starts again from the configuration's value is another run.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class FixedKLController:
    """A constant coefficient. It does not evolve, so after a resume the configuration's value holds, times `factor`."""

    kind: ClassVar[str] = "fixed"
    initial: float
    factor: float = 1.0  # of all interventions

    @property
    def coef(self) -> float:
        return self.initial * self.factor

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do; here so that callers need not ask which controller they hold."""

    def scale(self, factor: float) -> None:
        self.factor *= factor

    def state_dict(self) -> dict[str, Any]:
        return {"type": self.kind, "factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_type(self.kind, state)
        self.factor = float(state["factor"])


@dataclass
class AdaptiveKLController:
    """A coefficient that steers the KL to a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    coef <- coef * (1 + clip((kl - target) / target, -0.2, 0.2) * n_steps / horizon); their K_beta is
    n_steps / horizon.
    """

    kind: ClassVar[str] = "adaptive"
    coef: float
    target_kl: float  # nats, in the unit of `apply_kl_penalty`'s mean
    horizon: float  # trajectories

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt after a train batch of `n_steps` trajectories whose mean KL was `current_kl`.

        ValueError: a KL that is not finite (it would stick in the coefficient for ever); a batch so large
        against the horizon that the coefficient could reach zero or change sign.
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

    def state_dict(self) -> dict[str, Any]:
        return {"type": self.kind, "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_type(self.kind, state)
        self.coef = float(state["coef"])


@dataclass
class LinearKLController:
    """A coefficient on a straight line: `first` in the first step, `last` in step `num_steps` and after it."""

    kind: ClassVar[str] = "linear"
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
        """Count a step, whatever its KL was."""
        self.done += 1

    def scale(self, factor: float) -> None:
        self.factor *= factor

    def state_dict(self) -> dict[str, Any]:
        return {"type": self.kind, "done": self.done, "factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_type(self.kind, state)
        self.done, self.factor = int(state["done"]), float(state["factor"])


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


def _check_type(kind: str, state: dict[str, Any]) -> None:
    if state["type"] != kind:
        raise ValueError(
            f"the checkpoint holds a {state['type']!r} KL controller, but algorithm.kl_ctrl.type is {kind!r}; "
            "resume with the type that the run was started with"
        )
