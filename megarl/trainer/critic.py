"""The critic's ranks: values and value updates."""

from __future__ import annotations

import pyarrow as pa
import torch

from megarl.algorithms.aggregate import LossCounts
from megarl.algorithms.value_loss import value_loss
from megarl.megatron.packed import PackedBatch
from megarl.megatron.value import value_head
from megarl.trainer.actor import pack_weighted
from megarl.trainer.model_worker import ModelWorker, RowColumns, Share


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
        loss_agg_mode: str,
        clip: float | None,
    ) -> list[dict[str, float]]:
        """One optimizer step for each mini-batch of `plan`, as in `ActorWorker.update_policy`."""

        def loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            fields = batch.fields
            return value_loss(
                output, fields["values"], fields["returns"], batch.mask, fields["loss_weights"], clip
            )

        steps = []
        for shares, count in zip(plan, counts, strict=True):
            fields = ["values", "returns", "loss_weights"]
            batches = pack_weighted(self, table, shares[self.coords.dp], fields, loss_agg_mode, count)
            result = self.train(batches, value_head, loss)
            steps.append({**result.stats, "grad_norm": result.grad_norm, "lr": result.lr})
        return steps
