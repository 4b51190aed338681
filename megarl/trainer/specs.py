"""What the controller tells the ranks about models; importable without torch's distributed parts."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import MegatronConfig, OptimConfig


@dataclass(frozen=True)
class ModelSpec:
    """One Megatron model and how it is trained.

    Attributes:
        head: "lm" or "value".
        optim: None for a model that is only evaluated.
        num_updates: optimizer steps of the whole run, over which learning rates may decay.
        timeout: seconds after which a collective that not all ranks joined is an error.
    """

    path: str
    head: str
    megatron: MegatronConfig
    optim: OptimConfig | None
    num_updates: int
    timeout: float
