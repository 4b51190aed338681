"""The actor's ranks with the critic in them: one frozen model, on which each has adapters of its own, and the critic a
value head.

Guarantee, asserted by a test: values, updates and log-probs are those of a critic with a model of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import pyarrow as pa

from megarl.algorithms.aggregate import LossAggregation, LossCounts
from megarl.cluster.ranks import RankInfo
from megarl.megatron.lora.parameter_sets import in_turn, parameter_set
from megarl.megatron.offload import frozen_of
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.critic import CriticWorker
from megarl.trainer.workers.model import ModelWorker, RowColumns, Share
from megarl.trainer.workers.specs import ModelSpec


class ActorCriticWorker(ActorWorker):
    """A rank of the policy and of the critic. What is the critic's alone are the parts "critic_..." of its memory."""

    critic_class = CriticWorker

    def __init__(
        self,
        info: RankInfo,
        spec: ModelSpec,
        temperature: float,
        reference_path: str | None,
        critic: ModelSpec,
    ) -> None:
        super().__init__(info, spec, temperature, reference_path)
        self._actors = parameter_set(self.chunks, self.adapter)
        self.critic = self.critic_class(info, critic, base=self)
        self._critics = parameter_set(self.critic.chunks, self.critic.adapter)
        self._actors.switch_on()
        trained = self._actors.parameters + self._critics.parameters
        self.parts["weights"] = frozen_of(self.chunks, trained)
        self.parts |= {f"critic_{name}": part for name, part in self.critic.parts.items()}

    def of_role(self, role: str) -> ModelWorker:
        return self.critic if role == "critic" else self

    def compute_values(self, table: pa.Table, shares: list[Share]) -> RowColumns | None:
        """As `CriticWorker.compute_values`."""
        with self._critics_turn():
            return self.critic.compute_values(table, shares)

    def update_values(
        self,
        table: pa.Table,
        plan: list[list[Share]],
        counts: list[LossCounts],
        aggregation: LossAggregation,
        clip: float | None,
        vf_coef: float = 1.0,
    ) -> list[dict[str, float]]:
        """As `CriticWorker.update_values`."""
        with self._critics_turn():
            return self.critic.update_values(table, plan, counts, aggregation, clip, vf_coef)

    def _critics_turn(self) -> AbstractContextManager[None]:
        return in_turn(self._critics, self._actors)
