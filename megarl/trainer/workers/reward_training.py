"""The ranks of a reward model that is trained."""

from __future__ import annotations

import pyarrow as pa
import torch

from megarl.algorithms.preference import preference_loss, preference_metrics
from megarl.cluster.ranks import RankInfo
from megarl.data.preferences import ranking_lengths, texts_of
from megarl.megatron.heads import value_head
from megarl.megatron.packing import PackedBatch
from megarl.megatron.parallel import context_parallel_group
from megarl.megatron.sequences import text_values
from megarl.models.table import VALUE_HEAD
from megarl.models.weight_files import stored_tensors
from megarl.trainer.workers.model import Share
from megarl.trainer.workers.rankings import compared_texts
from megarl.trainer.workers.reward_model import RewardModelWorker
from megarl.trainer.workers.specs import ModelSpec


class RMWorker(RewardModelWorker):
    """A rank of the reward model.

    `head_init`: "zeros" or "normal"; how the head begins that the model's folder does not have.
    """

    def __init__(self, info: RankInfo, spec: ModelSpec, head_init: str) -> None:
        self.head_init = head_init
        super().__init__(info, spec)

    def load(self, path: str, head: str, *, trainable: bool) -> list[torch.nn.Module]:
        chunks = super().load(path, head, trainable=trainable)
        new = VALUE_HEAD not in stored_tensors(path)
        if new and self.head_init == "zeros" and hasattr(chunks[-1], "value_head"):
            chunks[-1].value_head.weight.data.zero_()
        return chunks

    def train_rankings(self, table: pa.Table, shares: list[Share]) -> dict[str, float]:
        """One optimizer step on the loss of all rankings of the table (`PREFERENCE_SCHEMA`).

        Args:
            shares: rows of the table; the texts of a ranking are in one micro-batch.
        """
        share = shares[self.coords.dp]
        texts = [texts_of(table, rows) for rows in share]
        batches = [self.pack_texts(micro, [list(range(micro.num_rows))])[0] for micro in texts]
        # Micro-batches come to the loss as the schedule has them; each is known by its object.
        compared = {batch: compared_texts(table, rows) for batch, rows in zip(batches, share, strict=True)}
        cp = self.layout.cp
        group = context_parallel_group() if cp > 1 else None

        def loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            pairs, margins = compared[batch]
            rewards = text_values(output, batch, group)
            total, sums = preference_loss(
                rewards, pairs.to(rewards.device), margins.to(rewards.device), table.num_rows
            )
            # Every context parallel rank has all of it, and the sum over them is what counts.
            return total / cp, {name: value / cp for name, value in sums.items()}

        result = self.train(batches, value_head, loss)
        metrics = {**preference_metrics(result.stats, table.num_rows), **result.numbers()}
        return {
            **{f"train/{name}": value for name, value in metrics.items()},
            "perf/tokens": float(ranking_lengths(table).sum()),
        }
