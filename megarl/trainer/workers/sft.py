"""The ranks of supervised fine-tuning."""

from __future__ import annotations

import pyarrow as pa
import torch

from megarl.megatron.build import unwrap
from megarl.megatron.packing import PackedBatch
from megarl.megatron.parallel import context_parallel_group
from megarl.megatron.step import forward_only
from megarl.trainer.workers.model import ModelWorker, Share


class SFTWorker(ModelWorker):
    """A rank of the model that is fine-tuned."""

    def train_examples(self, table: pa.Table, shares: list[Share], num_learnt: int) -> dict[str, float]:
        """One optimizer step on the negative log-likelihood, a mean over the `num_learnt` tokens of all ranks."""

        def loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            total = -torch.where(batch.mask, output[:, 0], 0.0).sum()
            return total / num_learnt, {"loss": total.double(), "tokens": batch.mask.sum().double()}

        share = shares[self.coords.dp]
        result = self.train(self.pack_examples(table, share), self.lm_head(), loss)
        assert result.stats["tokens"] == num_learnt, (result.stats, num_learnt)
        return {
            "train/loss": result.stats["loss"] / num_learnt,
            **{f"train/{name}": value for name, value in result.numbers().items()},
            "perf/tokens": float(sum(len(ids) for ids in table["input_ids"])),
        }

    def sum_losses(self, table: pa.Table, shares: list[Share]) -> float | None:
        """The summed negative log-likelihood of this data parallel rank's examples; None on all but one rank."""
        batches = self.pack_examples(table, shares[self.coords.dp])
        outputs = forward_only(unwrap(self.chunks), batches, self.lm_head())
        if self.coords.pp != self.layout.pp - 1:
            return None
        total = torch.stack(
            [-output[:, 0][batch.mask].sum() for output, batch in zip(outputs, batches, strict=True)]
        )
        total = total.double().sum()
        if self.layout.cp > 1:
            torch.distributed.all_reduce(total, group=context_parallel_group())
        return None if self.coords.tp or self.coords.cp else float(total)
