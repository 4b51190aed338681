"""The best value so far of a metric of validations, part of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Best:
    """The best value so far of `trainer.best_metric`, of those whose checkpoint was written."""

    metric: str | None
    mode: str
    value: float | None = None

    def found(self, metrics: Mapping[str, float]) -> float | None:
        """The value in a validation's metrics; None: they are of none, or no metric is asked for.

        Raises:
            ValueError: they are of a validation and have none of that name.
        """
        if self.metric is None or not any(name.startswith("val/") for name in metrics):
            return None
        if self.metric not in metrics:
            known = ", ".join(sorted(name for name in metrics if name.startswith("val/")))
            raise ValueError(f"trainer.best_metric={self.metric!r}: validations have {known}")
        return metrics[self.metric]

    def is_beaten_by(self, value: float | None) -> bool:
        """Whether a value of `found` is better than all before."""
        if value is None or not math.isfinite(value):
            return False
        sign = 1.0 if self.mode == "max" else -1.0
        return self.value is None or sign * value > sign * self.value

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "mode": self.mode, "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A best value of another metric is none."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value = state["value"]
