"""What a run may change of its losses from step to step: the coefficients of the KL, the bounds of the ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.algorithms.kl import FixedKLController, KLController, LinearKLController, make_kl_controller
from megarl.config import TrainConfig


@dataclass
class Controls:
    """The settings in force; part of a checkpoint.

    Attributes:
        kl: of the KL in the reward; adapts in `compute_batch_advantages`.
        kl_loss: of the KL in the actor's loss; moves in `update`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    """

    kl: KLController
    kl_loss: KLController
    clip_low: float
    clip_high: float

    def state_dict(self) -> dict[str, Any]:
        return {
            "kl": self.kl.state_dict(),
            "kl_loss": self.kl_loss.state_dict(),
            "clip_low": self.clip_low,
            "clip_high": self.clip_high,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.load_state_dict(state["kl"])
        self.kl_loss.load_state_dict(state["kl_loss"])
        self.clip_low, self.clip_high = float(state["clip_low"]), float(state["clip_high"])


def make_controls(config: TrainConfig, num_steps: int) -> Controls:
    """The controls at the start of a run of `num_steps` steps (`config` is resolved)."""
    control, actor = config.algorithm.kl_ctrl, config.actor_rollout_ref.actor
    kl = make_kl_controller(
        control.type,
        control.kl_coef,
        control.target_kl,
        control.horizon,
        control.end_kl_coef,
        control.schedule_steps or num_steps,
    )
    kl_loss: KLController = FixedKLController(actor.kl_loss_coef)
    if actor.kl_loss_end_coef is not None:
        kl_loss = LinearKLController(
            actor.kl_loss_coef, actor.kl_loss_end_coef, actor.kl_loss_schedule_steps or num_steps
        )
    return Controls(kl, kl_loss, actor.clip_ratio_low, actor.clip_ratio_high)
