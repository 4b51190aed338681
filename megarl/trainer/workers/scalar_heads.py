"""The ranks of models with a scalar head: the critic, the critic on the actor's frozen model, and the reward model.

Guarantee, asserted by a test: with a shared frozen model values, updates and log-probs are those of a critic with a model of its own.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from megarl.algorithms.aggregate import LossAggregation, LossCounts
from megarl.algorithms.value_loss import value_loss
from megarl.cluster.ranks import RankInfo
from megarl.data.trajectories import POSITIONS, from_lists, take
from megarl.megatron.build import gather_parameters
from megarl.megatron.heads.outputs import value_head
from megarl.megatron.lora.parameter_sets import in_turn, parameter_set
from megarl.megatron.offload import frozen_of
from megarl.megatron.packing import PackedBatch
from megarl.megatron.step import Loss
from megarl.trainer.workers.actor import ActorWorker, pack_weighted
from megarl.trainer.workers.dispatch import ModelSpec, RowColumns
from megarl.trainer.workers.model import ModelWorker, Share
from megarl.trainer.workers.nonfinite_source import trajectory_names


def scaled_value_loss(clip: float | None, vf_coef: float) -> Loss:
    """The loss of a micro-batch: `value_loss` times `vf_coef`; the sums are without it."""

    def loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        fields = batch.fields
        unscaled, sums = value_loss(
            output, fields["values"], fields["returns"], batch.mask, fields["loss_weights"], clip
        )
        return vf_coef * unscaled, sums

    return loss


class CriticWorker(ModelWorker):
    """A rank of the critic."""

    def compute_values(self, table: pa.Table, shares: list[Share]) -> RowColumns | None:
        """The value of the state before each response token, as column `values`."""
        return self.compute_columns(table, shares, self.pack_share, value_head, ["values"])

    def update_values(
        self,
        table: pa.Table,
        plan: list[list[Share]],
        counts: list[LossCounts],
        aggregation: LossAggregation,
        clip: float | None,
        vf_coef: float = 1.0,
    ) -> list[dict[str, float]]:
        """One optimizer step for each mini-batch of `plan`, as in `ActorWorker.update_policy`.

        `vf_coef`: factor of the loss; the metric critic/vf_loss is without it.
        """
        loss, fields = scaled_value_loss(clip, vf_coef), ["values", "returns", "loss_weights"]
        steps = []
        for shares, count in zip(plan, counts, strict=True):
            if count.tokens == 0:
                continue
            share = shares[self.coords.dp]
            batches = pack_weighted(self, table, share, fields, aggregation, count)
            names = partial(trajectory_names, table, share)
            result = self.train(batches, value_head, loss, names, more=True)
            steps.append({**result.stats, **result.numbers()})
        gather_parameters(self.chunks)
        return steps


class ActorCriticWorker(ActorWorker):
    """A rank of the policy and of the critic. The critic's own memory has the parts "critic_..."."""

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
        with in_turn(self._critics, self._actors):
            return self.critic.compute_values(table, shares)

    @wraps(CriticWorker.update_values)
    def update_values(self, *arguments: Any, **named: Any) -> list[dict[str, float]]:
        with in_turn(self._critics, self._actors):
            return self.critic.update_values(*arguments, **named)


class RewardModelWorker(ModelWorker):
    """A rank of the reward model."""

    two_labels = True

    def score_texts(self, texts: pa.Table, shares: list[Share]) -> RowColumns | None:
        """The head's output at the last token of each text (column `input_ids`), as column `scores` of one value a row:
        the logit of the one label of transformers' *ForSequenceClassification. With the column POSITIONS: the outputs at these tokens."""
        found = self.compute_columns(texts, shares, self.pack_texts, value_head, ["scores"])
        if found is None or POSITIONS not in texts.column_names:
            return found
        rows, columns = found
        positions = take(texts.select([POSITIONS]), rows)[POSITIONS].to_pylist()
        values, offsets = columns["scores"]
        outputs = np.split(values, offsets[1:-1])
        chosen = [
            outputs_of_row[np.array(own) - own[0]]
            for outputs_of_row, own in zip(outputs, positions, strict=True)
        ]
        return rows, {"scores": from_lists(chosen, np.float32)}
