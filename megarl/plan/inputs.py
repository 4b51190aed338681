"""What is read or worked out once for many plans of one recipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.config import TrainConfig, TuningConfig
from megarl.config.schema.models import LoraConfig
from megarl.costs.flops import ModelFlops
from megarl.costs.model import StageBytes
from megarl.costs.parameters import StageTensors
from megarl.models import ModelConfig, read_model_config
from megarl.models.lora import adapted_weights
from megarl.models.shards import Shapes


@dataclass
class PlanInputs:
    """What is read or worked out once for many plans of one recipe, which differ by layouts and nodes alone."""

    model: ModelConfig
    critic: ModelConfig | None = None
    reward: ModelConfig | None = None
    adapted: dict[tuple[str, LoraConfig], Shapes] = field(default_factory=dict)
    served: dict[object, int] = field(default_factory=dict)
    stages: dict[object, list[StageBytes]] = field(default_factory=dict)
    tables: dict[object, StageTensors] = field(default_factory=dict)
    flops: dict[tuple[str, str], ModelFlops] = field(default_factory=dict)

    @classmethod
    def read(cls, config: TrainConfig | TuningConfig) -> PlanInputs:
        """The facts of a resolved configuration's models, whose folders are here."""
        if not isinstance(config, TrainConfig):
            return cls(read_model_config(config.model.path))
        critic, reward = config.critic, config.reward_model
        return cls(
            read_model_config(config.actor_rollout_ref.model.path),
            None if critic is None else read_model_config(critic.model.path),
            read_model_config(reward.model.path) if reward.enable else None,
        )

    def weights(self, role: str, model: ModelConfig, lora: LoraConfig) -> Shapes | None:
        if not lora.rank:
            return None
        if (role, lora) not in self.adapted:
            self.adapted[role, lora] = adapted_weights(model, lora)
        return self.adapted[role, lora]
