"""How a reward model's outputs become rewards: shifted, and perhaps scaled, by what reference answers get.

Differences of rewards are all that preferences tell, so where 0 is has to be said: InstructGPT (arXiv:2203.02155,
appendix C) shifts rewards such that demonstrations have mean 0. Hugging Face's head for sequence classification has no
bias, so the numbers lie in a file beside the weights.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

FILE = "reward_normalization.json"


@dataclass(frozen=True)
class RewardNormalization:
    """A reward is (output - mean) / std; `num_answers` were measured."""

    mean: float = 0.0
    std: float = 1.0
    num_answers: int = 0

    def apply(self, outputs: np.ndarray) -> np.ndarray:
        """Rewards from the head's outputs: float32 [texts] each."""
        return ((outputs.astype(np.float64) - self.mean) / self.std).astype(np.float32)

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


AS_IT_IS = RewardNormalization()


def measure_normalization(outputs: np.ndarray, kind: str) -> RewardNormalization:
    """What gives the measured outputs mean 0, and of kind "mean_std" standard deviation 1.

    Args:
        outputs: float32 [reference answers].
        kind: "mean" or "mean_std".

    Raises:
        ValueError: all outputs are equal, so that nothing can be divided by their deviation.
    """
    assert kind in ("mean", "mean_std"), kind
    values = outputs.astype(np.float64)
    std = 1.0
    if kind == "mean_std":
        std = float(values.std())
        if std == 0.0:
            raise ValueError(
                f"data.normalize=mean_std: the {len(values)} reference answers all get the reward {values[0]:g}; give more "
                "of them (data.normalize_files, data.normalize_max_samples), or set data.normalize=mean"
            )
    return RewardNormalization(float(values.mean()), std, len(values))


def read_normalization(path: str | Path) -> RewardNormalization:
    """That of a reward model's folder; outputs are left alone where it says nothing.

    Raises:
        ValueError: the file is not what `megarl rm` writes.
    """
    file = Path(path).expanduser() / FILE
    if not file.is_file():
        return AS_IT_IS
    try:
        found = json.loads(file.read_text())
        mean, std = float(found["mean"]), float(found["std"])
        number = int(found.get("num_answers", 0))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} must be a JSON object with the numbers mean and std: {type(error).__name__}: {error}"
        ) from None
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ValueError(f"{file}: mean={mean} must be finite, std={std} positive and finite")
    return RewardNormalization(mean, std, number)
