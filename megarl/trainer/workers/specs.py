"""What the controller tells the ranks about models; importable without torch's distributed parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.algorithms.aggregate import LossAggregation
from megarl.algorithms.policy_loss import ClipCov, KLCov, PolicyLossOptions
from megarl.config import LoraConfig, MegatronConfig, OptimConfig

NAMED = "megarl.trainer.workers.profiling:named"  # around each call of a rank with a model


@dataclass(frozen=True)
class ModelSpec:
    """One Megatron model and how it is trained.

    Attributes:
        head: "lm" or "value".
        optim: None for a model that is only evaluated.
        num_updates: optimizer steps of the whole run, over which learning rates may decay.
        timeout: seconds after which a collective that not all ranks joined is an error.
        plugins: the user's files, whole paths, that the ranks import before anything is looked up by name.
        lora: the adapters that are trained instead of the weights, if their rank is not 0.
        share_prompts: the option that has trajectories of one prompt compute it once; None: they do not.
    """

    path: str
    head: str
    megatron: MegatronConfig
    optim: OptimConfig | None
    num_updates: int
    timeout: float
    plugins: tuple[str, ...] = ()
    lora: LoraConfig = field(default_factory=LoraConfig)
    share_prompts: str | None = None

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained, and nothing of the model but a value head."""
        return self.optim is not None and self.lora.rank > 0


@dataclass(frozen=True)
class PolicyUpdate:
    """How the actor is updated in a step.

    Attributes:
        aggregation: from token losses to a mini-batch's loss.
        select: which tokens of each mini-batch the loss treats apart; None: none.
        target_kl: after a mini-batch whose ppo_kl (nats a token) is over this the step's others are left out; None: never.
        seed: of what is drawn in the step.
    """

    aggregation: LossAggregation
    options: PolicyLossOptions
    select: ClipCov | KLCov | None
    target_kl: float | None
    seed: int
