"""The critic's ranks: values and value updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa
import torch

from megarl.algorithms.aggregate import LossAggregation, LossCounts
from megarl.algorithms.value_loss import value_loss
from megarl.megatron.heads import value_head
from megarl.megatron.packing import PackedBatch
from megarl.trainer.workers.actor import pack_weighted
from megarl.trainer.workers.model import ModelWorker, RowColumns, Share
from megarl.trainer.workers.nonfinite_source import trajectory_names

MicroBatchLoss = Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def scaled_value_loss(clip: float | None, vf_coef: float) -> MicroBatchLoss:
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
        share = shares[self.coords.dp]
        batches = self.pack_share(table, share)
        return self.forward_columns(self.chunks, batches, share, value_head, ["values"])

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
        loss = scaled_value_loss(clip, vf_coef)
        steps = []
        for shares, count in zip(plan, counts, strict=True):
            if count.tokens == 0:
                continue
            fields = ["values", "returns", "loss_weights"]
            batches = pack_weighted(self, table, shares[self.coords.dp], fields, aggregation, count)
            names = partial(trajectory_names, table, shares[self.coords.dp])
            result = self.train(batches, value_head, loss, names)
            steps.append({**result.stats, **result.numbers()})
        return steps
